"""The many ways in which a script ends."""

from __future__ import annotations

from odd.case import Case

OUR_FRAMES = "it prints the whole stack, and keepbusy's frames are in it"
VALUES = {
    "None": "None",
    "0": "0",
    "True": "True",
    "256": "256",
    "-1": "-1",
    "2**40": "2**40",
    "a text": "'a text'",
    "1.5": "1.5",
    "a tuple": "('a', 1)",
    "what has no text": "Silent()",
    "surrogates": "'\\udcff'",
}
EXIT = """\
import sys
class Silent:
    def __str__(self): raise ValueError("no text")
print("so far")
sys.exit({value})
"""
LAST = """\
import atexit, sys
@atexit.register
def last():
    print(sys.last_type.__name__, sys.last_value, sys.last_traceback.tb_frame.f_code.co_name, sys.last_traceback.tb_next)
    print(getattr(sys, "last_exc", sys.last_value) is sys.last_value, sys.exc_info())
1 / 0
"""
CHAINED = """\
class Odd(Exception):
    def __str__(self): raise RuntimeError("no text")
def inner():
    try:
        {}["a"]
    except KeyError as error:
        raise ValueError("with\\nlines") from error
try:
    inner()
except ValueError as error:
    error.add_note("a note")
    group = ExceptionGroup("several", [error, Odd(), SyntaxError("made", ("f.py", 1, 2, "x y", 1, 3))])
    raise group
"""
RECURSION = """\
import sys
def deeper(n):
    return deeper(n + 1)
print(sys.getrecursionlimit())
try:
    deeper(0)
except RecursionError as error:
    print(error)
depth = 0
def count():
    global depth
    depth += 1
    count()
try:
    count()
except RecursionError:
    print(depth > sys.getrecursionlimit() - 60)
"""
ATEXIT = """\
import atexit, gc, sys, threading, weakref

class Thing:
    def __init__(self, name): self.name = name
    def __del__(self): print("del", self.name, flush=True)

kept = Thing("global")
cycle = Thing("in a cycle")
cycle.itself = cycle
atexit.register(print, "first registered")
atexit.register(lambda: print("with", sys.argv[0], __name__, "main" in dir()))
final = weakref.finalize(kept, print, "finalized")
weakref.finalize(Thing("soon gone"), print, "finalized soon")
atexit.register(print, "second registered", flush=True)
started = threading.Event()
def work():
    started.set()
    threading.main_thread().join()
    print("a thread after main", flush=True)
    atexit.register(print, "registered by a thread")
threading.Thread(target=work).start()
started.wait()
threading._register_atexit(print, "threading's own", flush=True)
def main(): ...
print("main ends", flush=True)
"""
FAILING = """\
import atexit, sys, threading
@atexit.register
def fails(): raise ValueError("in atexit")
@atexit.register
def leaves(): sys.exit(9)
class Thing:
    def __del__(self): raise ValueError("in del")
thing = Thing()
del thing
thing = Thing()
def work(): raise KeyError("in a thread")
one = threading.Thread(target=work, name="worker")
one.start()
one.join()
def leave(): sys.exit(4)
one = threading.Thread(target=leave)
one.start()
one.join()
print("end")
"""
HOOKS = """\
import sys, threading, traceback
def hook(kind, error, stack):
    print("hook", kind.__name__, error, [frame.name for frame in traceback.extract_tb(stack)], len(list(traceback.walk_tb(stack))))
    print(sys.exc_info(), error.__traceback__ is stack)
sys.excepthook = hook
threading.excepthook = lambda args: print("thread", args.exc_type.__name__, args.exc_value, args.thread.name)
sys.unraisablehook = lambda raised: print("unraisable", raised.exc_value, raised.err_msg)
class Thing:
    def __del__(self): raise ValueError("in del")
Thing()
one = threading.Thread(target=lambda: {}["a"], name="worker")
one.start()
one.join()
def f(): raise ValueError("mine")
f()
"""
CASES = [
    *(Case(f"sys.exit of {name}", EXIT.format(value=value)) for name, value in VALUES.items()),
    Case("raise SystemExit in a function, within finally", "def f():\n    try:\n        raise SystemExit\n    finally:\n        print('finally')\nf()\n"),
    Case("a SystemExit of its own", "class Mine(SystemExit):\n    code = 6\nraise Mine('text')\n"),
    Case("quit and exit", "print(quit, exit)\nquit(5)\n"),
    Case("exit closes standard input", "import sys\ntry:\n    exit(3)\nexcept SystemExit as error:\n    print(error.code, sys.stdin.closed)\n    raise\n"),
    Case("os._exit", "import os\nprint('lost')\nos.write(1, b'kept\\n')\nos._exit(7)\n"),
    Case("an exception", "def f():\n    x = 3\n    return x.y.z\nf()\n"),
    Case("exceptions in chains and groups", CHAINED),
    Case("what an exception leaves in sys", LAST),
    Case("a syntax error", "print('before')\nx = (1,\nprint 'x'\n"),
    Case("an indentation error", "if True:\nprint('x')\n"),
    Case("await outside of a function", "import asyncio\nawait asyncio.sleep(0)\n"),
    Case("a syntax error in what it imports", "import broken\n", files={"broken.py": "x = = 3\n"}),
    Case("a syntax warning", "x = 3\nprint(x is 3)\nprint('\\d')\n"),
    Case("an error in what it imports", "import broken\n", files={"broken.py": "def f():\n    1 / 0\nf()\n"}),
    Case("an exception from exec", "exec(compile('def f():\\n  1 / 0\\nf()', '<made>', 'exec'))\n"),
    Case("a BaseException", "class Mine(BaseException): ...\nraise Mine('mine')\n"),
    Case("GeneratorExit", "raise GeneratorExit\n"),
    Case("an exception without a traceback", "import sys\nsys.tracebacklimit = 0\n1 / 0\n"),
    Case("recursion", RECURSION),
    Case(
        "recursion without an end",
        "def f():\n    f()\nf()\n",
        allowed={"stderr": "the same limit is met a few frames sooner, those of keepbusy: 'repeated 98x more times'"},
    ),
    Case("a low limit of recursion", "import sys\nsys.setrecursionlimit(60)\nprint(sys.getrecursionlimit())\n"),
    Case("the order at the end", ATEXIT, allowed={"stdout": "PyTorch has registered weakref's exit handler already, which so runs later"}),
    Case("failures at the end", FAILING),
    Case("hooks of its own", HOOKS),
    Case("a hook that fails", "import sys\ndef hook(*a): raise ValueError('in the hook')\nsys.excepthook = hook\n1 / 0\n"),
    Case("no hook", "import sys\nsys.excepthook = None\n1 / 0\n"),
    Case("a hook that leaves", "import sys\nsys.excepthook = lambda *a: sys.exit(8)\n1 / 0\n"),
    Case("an exception with a thread still at work", "import threading\ndef work():\n    threading.main_thread().join()\n    print('worked')\nthreading.Thread(target=work).start()\n1 / 0\n"),
    Case("a daemon thread", "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\nprint('end')\n"),
    Case("a thread that ends the process", "import os, threading\ndef work():\n    threading.main_thread().join()\n    os._exit(6)\nthreading.Thread(target=work).start()\n"),
    Case("it joins all threads that there are", "import threading\nfor one in threading.enumerate():\n    if one is not threading.current_thread():\n        one.join(20)\n        print(one.is_alive())\nprint('end')\n"),
    Case("an abort", "import os, resource\nresource.setrlimit(resource.RLIMIT_CORE, (0, 0))\nprint('so far', flush=True)\nos.abort()\n"),
    Case(
        "a crash with faulthandler",
        "import ctypes, faulthandler, resource\nresource.setrlimit(resource.RLIMIT_CORE, (0, 0))\nfaulthandler.enable()\nctypes.string_at(0)\n",
        allowed={"stderr": OUR_FRAMES},
    ),
    Case("killed by itself", "import os, signal\nprint('so far', flush=True)\nos.kill(os.getpid(), signal.SIGKILL)\n"),
    Case("it becomes another program", "import os, sys\nprint('before', flush=True)\nos.execv(sys.executable, [sys.executable, '-c', 'print(\"after\")'])\n"),
    Case("standard output is full", "print('x')\n", shell='exec "$@" > /dev/full'),
    Case("a thread prints at the end, and main's exit code stays", "import sys, threading\ndef work():\n    threading.main_thread().join()\n    print('late')\nthreading.Thread(target=work).start()\nsys.exit(5)\n"),
]
