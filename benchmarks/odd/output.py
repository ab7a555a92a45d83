"""Standard output and error: replaced, closed, cut off, of another encoding."""

from __future__ import annotations

from odd.case import DEVICE, Case

LOOP = DEVICE + "x = torch.ones(8, device=device)\nfor step in range(6):\n    x = x * 2\n    last = x.sum().item()\n"
MINIMAL = """\
import sys
class Minimal:
    def __init__(self, stream): self.stream = stream
    def write(self, text): self.stream.write(text.upper())
    def flush(self): self.stream.flush()
"""
CLOSED = """\
import os, sys
print("so far", flush=True)
os.close(1)
"""
REPLACED = {
    "sys.stdout with write and flush only": (MINIMAL + "sys.stdout = Minimal(sys.stdout)\nprint('x')\n", {}),
    "sys.stdout with write only": ("import sys\nclass Minimal:\n    def write(self, text): sys.__stdout__.write(text)\nsys.stdout = Minimal()\nprint('x')\n", {}),
    "sys.stdout is None": ("import sys\nsys.stdout = None\nprint('x')\n", {}),
    "sys.stdout is closed": ("import sys\nprint('x')\nsys.stdout.close()\n", {}),
    "sys.stdout is detached": ("import sys\nraw = sys.stdout.detach()\nraw.write(b'x\\n')\nraw.flush()\n", {}),
    "sys.stdout is deleted": ("import sys\nprint('x')\ndel sys.stdout\n", {}),
    "sys.stdout is a StringIO": ("import io, sys\nsys.stdout = io.StringIO()\nprint('x')\nsys.stderr.write(sys.stdout.getvalue())\n", {}),
    "sys.stdout is a file": ("import sys\nsys.stdout = open('out.txt', 'w')\nprint('x')\n", {}),
    "sys.stdout is UTF-16": ("import sys\nsys.stdout.reconfigure(encoding='utf-16')\nprint('x')\n", {}),
    "sys.stdout fails": (MINIMAL + "def fails(*a): raise RuntimeError('mine')\nsys.stdout = Minimal(sys.stdout)\nsys.stdout.write = sys.stdout.flush = fails\n", {}),
    "a redirection that never ends": ("import contextlib, io\ncontextlib.redirect_stdout(io.StringIO()).__enter__()\nprint('x')\n", {}),
    "descriptor 1 is closed": (CLOSED, {}),
    "descriptors 1 and 2 are closed": (CLOSED + "os.close(2)\n", {}),
    "descriptor 1 leads into a file": ("import os\nprint('before', flush=True)\nto = os.open('out.txt', os.O_WRONLY | os.O_CREAT)\nos.dup2(to, 1)\nprint('in the file', flush=True)\n", {}),
    "sys.stderr with write and flush only": (MINIMAL + "sys.stderr = Minimal(sys.stderr)\nsys.stderr.write('x\\n')\n", {}),
    "sys.stderr with write and flush only, and an exception": (MINIMAL + "sys.stderr = Minimal(sys.stderr)\n1 / 0\n", {}),
    "sys.stderr is None, and an exception": ("import sys\nsys.stderr = None\n1 / 0\n", {}),
    "sys.stderr is closed, and an exception": ("import sys\nsys.stderr.close()\n1 / 0\n", {}),
    "sys.stderr is deleted, and an exit with a text": ("import sys\ndel sys.stderr\nsys.exit('text')\n", {}),
    "both are replaced, and an exception": (MINIMAL + "sys.stdout, sys.stderr = Minimal(sys.stdout), Minimal(sys.stderr)\nprint('x')\n1 / 0\n", {}),
    "both are closed": ("import sys\nprint('x')\nsys.stdout.close()\nsys.stderr.close()\n", {}),
}  # fmt: skip
HUGE = "import sys\nfor n in range(40_000):\n    print(n, 'x' * 60)\n"
BINARY = """\
import os, sys
print("text")
sys.stdout.buffer.write(bytes(range(256)))
sys.stdout.flush()
os.write(1, b"raw\\n")
sys.stderr.write("error without an end")
print("no newline", end="")
"""
CASES = [
    *(Case(name, source) for name, (source, _) in REPLACED.items()),
    *(Case(f"{name}; with work on the device", LOOP + source, device=6) for name, (source, _) in REPLACED.items() if name in (
        "sys.stdout with write and flush only", "sys.stdout is None", "sys.stdout is deleted", "sys.stdout is closed", "sys.stdout is a StringIO",
        "sys.stdout is UTF-16", "sys.stdout is detached", "sys.stdout fails", "both are closed", "descriptors 1 and 2 are closed",
        "descriptor 1 leads into a file", "sys.stderr with write and flush only, and an exception")),
    Case("raw and binary output", BINARY),
    Case("much output", HUGE + "sys.stderr.write('e' * 200_000)\n"),
    Case("a reader that leaves", HUGE, shell='"$@" | head -1; echo "ended with ${PIPESTATUS[0]}"'),
    Case("a reader that leaves, and little output", "print(1)\nprint(2)\n", shell='"$@" | head -1; echo "ended with ${PIPESTATUS[0]}"'),
    Case("a reader that leaves while the device is at work", LOOP + HUGE, shell='"$@" | head -1; echo "ended with ${PIPESTATUS[0]}"', device=6),
    Case("a reader that was never there", "print('x')\n", shell='"$@" | true; echo "ended with ${PIPESTATUS[0]}"', stdin=b""),
    Case("standard output is closed from the start", "import sys\nprint(sys.stdout, 'x')\nsys.stderr.write(repr(sys.stdout))\n", shell='exec "$@" >&-'),
    Case("standard error is closed from the start", "import sys\nprint(sys.stderr)\n1 / 0\n", shell='exec "$@" 2>&-'),
    Case("all three are closed from the start", "open('out.txt', 'w').write('x')\n", shell='exec "$@" <&- >&- 2>&-'),
    Case("ASCII only", "import sys\nprint(sys.stdout.encoding, ascii('ü'))\nprint('ü')\n", environment={"PYTHONIOENCODING": "ascii"}),
    Case("ASCII only, with work on the device", LOOP + "import sys\nprint(sys.stdout.encoding)\n", environment={"PYTHONIOENCODING": "ascii"}, device=6),
    Case("the C locale", "import sys, locale\nprint(sys.stdout.encoding, sys.getfilesystemencoding(), locale.getlocale())\nprint('ü')\n", environment={"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}),
    Case("unbuffered", "import sys, os\nprint('x', end='')\nos.write(1, b'y')\nprint(sys.stdout.line_buffering, sys.stdout.write_through)\n", python=("-u",)),
    Case("both in one pipe", "import sys\nprint('one')\nsys.stderr.write('two\\n')\nprint('three', flush=True)\nsys.stderr.write('four\\n')\n", shell='exec "$@" 2>&1'),
    Case("logging to standard error", "import logging\nlogging.basicConfig()\nlogging.warning('mine')\nlogging.getLogger('a.b').error('yours')\ntry:\n    1 / 0\nexcept Exception:\n    logging.exception('oh')\n"),
    Case("a progress bar", "import sys\nfor n in range(3):\n    sys.stderr.write(f'\\r{n}')\n    sys.stderr.flush()\n"),
    Case("tracebacks and notes to standard output", "import sys\nsys.stderr = sys.stdout\n1 / 0\n"),
]
