"""What a script finds when it looks around: its own names, files and paths."""

from __future__ import annotations

import py_compile
import zipfile
from pathlib import Path

from odd.case import Case

OUR_FRAMES = "whoever walks the whole stack sees that the script was called by keepbusy; Python cannot hide a frame"


def _archive(folder: Path) -> None:
    with zipfile.ZipFile(folder / "app.zip", "w") as archive:
        archive.writestr(
            "__main__.py",
            "import sys, inside\n"
            "print(__name__, repr(__package__), __spec__.name, type(__loader__).__name__, __file__, sys.argv, sys.path[0])\n"
            "inside.fail()\n",
        )
        archive.writestr("inside.py", "def fail():\n    raise ValueError('in the archive')\n")
        archive.writestr("data.txt", "data")


def _compiled(folder: Path) -> None:
    source = folder / "source.py"
    source.write_text("print(__name__, __file__, __cached__)\n")
    py_compile.compile(str(source), cfile=str(folder / "script.pyc"), doraise=True)
    source.unlink()


def _linked(folder: Path) -> None:
    (folder / "real").mkdir()
    (folder / "real" / "beside.py").write_text("print('beside', __name__)\n")
    (folder / "real" / "script.py").write_text("import sys, beside\nprint(__file__, sys.argv[0], sys.path[0])\n")
    (folder / "link.py").symlink_to("real/script.py")


ANNOTATIONS = """\
import dataclasses, typing

@dataclasses.dataclass
class Point:
    x: int
    y: "float"
    z: dataclasses.InitVar[int] = 3

    def at(self, t: int) -> float: ...

one: int = 3
print({f.name: f.type for f in dataclasses.fields(Point)})
print(Point.at.__annotations__, Point.__init__.__annotations__["x"])
print(__annotations__)
print(typing.get_type_hints(Point.at))
names = {}
exec("def f(x: int): ...", names)
exec(compile("def g(x: int): ...", "<made>", "exec"), names)
print(names["f"].__annotations__, names["g"].__annotations__)
print("annotations" in globals())
"""
GLOBALS = """\
"What it is."
import sys
print(sorted(name for name in globals() if name != "__cached__"))
print(__name__, __doc__, repr(__package__), __spec__, __file__)
print(type(__builtins__), __builtins__ is __import__("builtins"))
print(type(__loader__).__name__, __loader__.name, __loader__.path)
print(len(__loader__.get_data(__file__)) > 100, __loader__.get_filename("__main__") == __file__)
print(sys.modules["__main__"].__dict__ is globals(), repr(sys.modules["__main__"]))
import __main__
print(__main__.__file__, "__annotations__" in globals())
"""
CHDIR = """\
import os, sys
os.mkdir("elsewhere")
os.chdir("elsewhere")
print(os.path.isabs(__file__), sys.argv[0])
with open(__file__) as file:
    print(len(file.read()) > 50)
raise ValueError("after chdir")
"""
INTERPRETER = """\
import sys, os, logging, signal, threading, gc, faulthandler, tracemalloc, random, multiprocessing, locale, decimal
print(sys.argv, sys.flags, sys.warnoptions, sys._xoptions, sys.dont_write_bytecode, sys.pycache_prefix)
print(sys.path)
print(sys.getrecursionlimit(), sys.getswitchinterval(), sys.getdlopenflags(), sys.gettrace(), sys.getprofile())
print(sys.excepthook is sys.__excepthook__, sys.displayhook is sys.__displayhook__)
print(sys.unraisablehook is sys.__unraisablehook__, threading.excepthook is threading.__excepthook__)
print(sys.stdout is sys.__stdout__, sys.stderr is sys.__stderr__, sys.stdin is sys.__stdin__)
print(gc.get_threshold(), gc.isenabled(), gc.get_debug(), len(gc.callbacks), gc.get_freeze_count())
print(faulthandler.is_enabled(), tracemalloc.is_tracing(), sys.get_asyncgen_hooks(), hasattr(sys, "last_type"))
print(logging.root.handlers, logging.root.level, logging.Logger.manager.disable)
print(threading.current_thread().name, threading.active_count(), threading.main_thread() is threading.current_thread())
print([one.name for one in signal.Signals if signal.getsignal(one) not in (signal.SIG_DFL, None)])
print(signal.pthread_sigmask(signal.SIG_BLOCK, []), signal.set_wakeup_fd(-1), signal.getitimer(signal.ITIMER_REAL))
print(multiprocessing.get_start_method(allow_none=True), multiprocessing.current_process().name)
print(locale.setlocale(locale.LC_ALL), decimal.getcontext(), os.getcwd(), oct(os.umask(0o22)))
print(sys.path_hooks[0].__name__, [getattr(one, "__name__", one) for one in sys.meta_path])
print(sys.stdout.encoding, sys.stdout.errors, sys.stdout.line_buffering, sys.stdout.write_through, sys.stdout.newlines)
"""
MODULE = """\
import sys
from . import sibling
from .sibling import value
print(__name__, __package__, __spec__.name, __file__, sys.argv, sys.path[0], type(__loader__).__name__, value)
print(sibling.__name__, type(__builtins__), "__annotations__" in globals())
"""
WORDING = "of a text that cannot be read Python says otherwise than of such a file: the same error, at the same line"
CASES = [
    Case("annotations are real types", ANNOTATIONS),
    Case("annotations of a script that wants strings", "from __future__ import annotations\n" + ANNOTATIONS),
    Case("the names of a script", GLOBALS),
    Case("its file, after chdir", CHDIR),
    Case("the state of the interpreter", INTERPRETER,
         allowed={"stdout": "the first SIGTERM is taken, threads change every 0.25 ms so that one can look on, and the import of Triton is awaited"}),
    Case(
        "the modules that are there",
        "import sys\nprint([name for name in ('torch', 'numpy', 'rich', 'keepbusy') if name in sys.modules])\n",
        allowed={"stdout": "PyTorch is imported before the script: the virtual GPU must lie beneath it"},
    ),
    Case(
        "sys.orig_argv",
        "import sys\nprint(sys.orig_argv[1:])\n",
        allowed={"stdout": "who starts it again by this list (a re-exec) wants it under keepbusy again"},
    ),
    Case("its whole environment", "import os\nprint(sorted(os.environ.items()))\n"),
    Case(
        "arguments that look like ours",
        "import sys\nprint(sys.argv)\n",
        start=("script.py", "--help", "--save", "x", "-m", "--", "", "-", "--on=h100", "--ranks", "2", "--", "ü"),
    ),
    Case("only two dashes", "import sys\nprint(sys.argv)\n", start=("script.py", "--", "--epochs", "3")),
    Case(
        "a folder program",
        files={
            "folder/__main__.py": "import sys, sibling\n"
            "print(__name__, repr(__package__), __spec__.name, __file__, sys.argv, sys.path[0], type(__loader__).__name__)\n"
            "sibling.fail()\n",
            "folder/sibling.py": "def fail():\n    raise ValueError('in the folder')\n",
        },
        start=("folder", "--epochs", "3"),
    ),
    Case("a folder program, named with a slash", files={"folder/__main__.py": "import sys\nprint(sys.argv, __file__)\n"}, start=("folder/",)),
    Case("a folder without a program", files={"folder/other.py": ""}, start=("folder",),
         allowed={"stderr": "keepbusy says it in a sentence of its own", "exit": "as for any bad input"}),
    Case("a zip program", prepare=_archive, start=("app.zip", "--epochs", "3")),
    Case("a compiled program", prepare=_compiled, start=("script.pyc",)),
    Case("a symbolic link", prepare=_linked, start=("link.py",)),
    Case("no such script", start=("nowhere.py",), allowed={"stderr": "keepbusy says it in a sentence of its own"}),
    Case(
        "a module of a package",
        files={"package/__init__.py": "print('package')\n", "package/sibling.py": "value = 3\n", "package/work.py": MODULE},
        start=("-m", "package.work", "--epochs", "3"),
    ),
    Case(
        "a package with a __main__",
        files={"package/__init__.py": "", "package/sibling.py": "value = 3\n", "package/__main__.py": MODULE + "1 / 0\n"},
        start=("-m", "package"),
    ),
    Case("a module that is not there", start=("-m", "nowhere")),
    Case("a package that is no program", files={"package/__init__.py": ""}, start=("-m", "package")),
    Case("a module of the standard library", start=("-m", "json.tool", "--indent", "1"), stdin=b'{"a": [1, 2]}'),
    Case("a module with a syntax error", files={"broken.py": "print('before'\n"}, start=("-m", "broken")),
    Case("an empty script", " "),
    Case("a script without an ending", files={"train": "import sys\nprint(__file__, sys.argv)\n"}, start=("train",)),
    Case("a name with spaces", files={"my run ü/a b.py": "import sys\nprint(__file__, sys.argv)\nraise ValueError\n"}, start=("my run ü/a b.py",)),
    Case("a name that begins with a dash", files={"here/-x.py": "import sys\nprint(__file__, sys.argv)\n"}, start=("here/-x.py",)),
    Case("an absolute path", "import sys\nprint(__file__, sys.argv, sys.path[0])\n", shell='exec "${@/#script.py/$PWD/script.py}"'),
    Case("line ends of Windows", b"x = '''a\r\nb'''\r\nprint(repr(x))\r\nraise ValueError(x)\r\n"),
    Case("a byte order mark", b"\xef\xbb\xbf# -*- coding: utf-8 -*-\r\nprint('\xc3\xbc', __doc__)\r\n"),
    Case("a declared encoding", "# -*- coding: latin-1 -*-\nprint('ü'.encode(), 'ß')\nraise ValueError('ü')  # ö\n".encode("latin-1")),
    Case("an encoding that is not declared", "print('ü')\n".encode("latin-1"),
         allowed={"stderr": WORDING}),
    Case("no newline at its end, and a first line for the shell", b"#!/usr/bin/env python\n\x0c\nif True:\n\tprint('tab')"),
    Case("a null byte", b"print('before')\n\0\n", allowed={"stderr": WORDING}),
    Case("without assertions", '"doc"\nassert False\nprint(__doc__, __debug__)\n', python=("-OO",)),
    Case(
        "a safe path",
        "import sys\nprint(sys.path)\ntry:\n    import beside\nexcept ImportError as error:\n    print(error)\n",
        files={"beside.py": "print('beside')\n"},
        environment={"PYTHONSAFEPATH": "1"},
    ),
    Case("the depth of its stack", "import inspect\nprint(len(inspect.stack()))\n", allowed={"stdout": OUR_FRAMES}),
    Case("the frame outside of it", "import sys\nprint(sys._getframe().f_back)\n", allowed={"stdout": OUR_FRAMES}),
    Case(
        "a warning about its caller",
        "import warnings\nwarnings.warn('mine', stacklevel=2)\nwarnings.warn('yours', stacklevel=9)\n",
        allowed={"stderr": OUR_FRAMES},
    ),
    *(
        Case(
            f"modules of its own that are named as those of {whose}",
            f"import {', '.join(modules)}\nprint([one.__file__ for one in ({', '.join(modules)},)])\n",
            files={f"{name}.py": f"print('my own {name}')\n" for name in modules},
        )
        for whose, modules in {
            "keepbusy": ("rich", "msgspec", "isal", "shlex"),
            "torch": ("numpy", "sympy", "statistics", "inspect", "queue"),
        }.items()
    ),
    Case(
        "modules beside it that it never imports",
        "print('done')\n",
        files={
            f"{name}.py": f"raise RuntimeError('{name} was imported')\n"
            for name in ("rich", "msgspec", "isal", "numpy", "queue", "shlex", "colorsys", "zlib", "tempfile", "secrets", "torch")
        },
    ),
    Case(
        "names like ours",
        "path = runs = options = error = main = code = self = device = timeline = keepbusy = torch = 3\n"
        "def _execute(): return 1\ndef find(x): return x\n"
        "print(sorted(name for name in globals() if not name.startswith('__')))\n",
    ),
]
