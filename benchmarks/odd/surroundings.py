"""Few descriptors, little memory, no input, and scripts that change what everybody stands on."""

from __future__ import annotations

from odd.case import DEVICE, Case

LOOP = DEVICE + "x = torch.ones(8, device=device)\nfor step in range(6):\n    x = x * 2\n    last = x.sum().item()\n"
EXHAUSTED = """\
import os, resource
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
held = []
try:
    while True:
        held.append(os.open(os.devnull, os.O_RDONLY))
except OSError as error:
    print(error.strerror)
"""
MEMORY = """\
import resource
resource.setrlimit(resource.RLIMIT_AS, (1 << 34, 1 << 34))
try:
    bytearray(1 << 35)
except MemoryError:
    print("no memory")
"""
LARGE = """\
import resource, signal
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    with open("out.txt", "w") as file:
        file.write("x" * 10_000)
except OSError as error:
    print(error.strerror)
"""
BUILTINS = """\
import builtins
def fails(*a, **k): raise RuntimeError("not for you")
for name in ("print", "open", "input", "sorted", "exec", "compile"):
    setattr(builtins, name, fails)
"""
FROZEN = """\
import time, datetime
for name in ("time", "perf_counter", "monotonic", "process_time"):
    setattr(time, name, lambda: 0.0)
for name in ("time_ns", "perf_counter_ns", "monotonic_ns"):
    setattr(time, name, lambda: 0)
def fails(*a): raise RuntimeError("no sleep")
time.sleep = fails
print("frozen", time.time())
"""
PATCHED = """\
import json, os, pathlib, sys, tempfile, signal, traceback
def fails(*a, **k): raise RuntimeError("patched")
json.dumps = pathlib.Path.cwd = os.getcwd = tempfile.mkstemp = signal.signal = fails
traceback.print_exception = os.path.relpath = os.getpid = sys.exit = fails
print("patched")
"""
CLOSER = """\
import os
os.closerange(3, 256)
os.close(os.open(os.devnull, os.O_RDONLY))
print("closed")
"""
MODULES = {
    "sys.path is empty": "import sys\nsys.path.clear()\nprint('x')\n",
    "sys.meta_path is empty": "import sys\nsys.meta_path.clear()\nprint('x')\n",
    "sys.modules has lost __main__": "import sys\ndel sys.modules['__main__']\nprint('x')\n",
    "sys.modules has lost much": "import sys\nfor name in ('json', 'pathlib', 'logging', 'typing', 'numpy', 'shutil', 'keepbusy', 'keepbusy.cli'):\n    sys.modules.pop(name, None)\nprint('x')\n",
    "sys.modules holds None": "import sys\nfor name in ('rich', 'json', 'shutil', 'shlex', 'tempfile', 'rich.console'):\n    sys.modules[name] = None\nprint('x')\n",
    "the environment is empty": "import os\nos.environ.clear()\nprint(len(os.environ))\n",
    "its folder is gone": "import os, shutil\nos.mkdir('gone')\nos.chdir('gone')\nos.rmdir(os.getcwd())\nprint('x')\n",
    "nothing may be written": "import os\nos.umask(0o777)\nprint('x')\n",
    "built-in functions are replaced": BUILTINS,
    "time stands still": FROZEN,
    "functions of the standard library are replaced": PATCHED,
    "all descriptors above 2 are closed": CLOSER,
    "no descriptor is left": EXHAUSTED,
    "memory is limited": MEMORY,
    "files are limited": LARGE,
    "the temporary folder is gone": "import os, tempfile\ntempfile.tempdir = '/nowhere'\nos.environ['TMPDIR'] = '/nowhere'\nprint('x')\n",
}  # fmt: skip
NOT_WRITTEN = "what was asked for by --save cannot be written there any more, which a sentence says"
ALLOWED = {
    "files are limited": {"report": NOT_WRITTEN},
    "no descriptor is left": {"report": NOT_WRITTEN},
    "functions of the standard library are replaced": dict.fromkeys(
        ("stderr", "exit", "report"),
        "whoever replaces what Python itself ends a script with, sys.exit among it, has replaced it for keepbusy",
    ),
}
TORCH_STATE = """\
torch.set_grad_enabled(False)
torch.inference_mode().__enter__()
torch.set_default_dtype(torch.float64)
torch.set_default_device(device)
torch.use_deterministic_algorithms(True)
torch.autograd.set_detect_anomaly(True)
from torch.utils._python_dispatch import TorchDispatchMode
class Refuses(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        raise RuntimeError("no operator any more")
Refuses().__enter__()
print("x")
"""
CASES = [
    *(Case(name, source, allowed={aspect: why for aspect, why in ALLOWED.get(name, {}).items() if aspect != "report"}) for name, source in MODULES.items()),
    *(Case(f"{name}; with work on the device", LOOP + source, device=6, allowed=ALLOWED.get(name, {})) for name, source in MODULES.items()),
    Case("modes of torch that it leaves on", LOOP + TORCH_STATE, device=6),
    Case("few descriptors from the start", "print('x')\n", shell='ulimit -n 24; exec "$@"'),
    Case("few descriptors from the start; with work on the device", LOOP, shell='ulimit -n 32; exec "$@"', device=6),
    Case("a small stack", "print('x')\n", shell='ulimit -s 1024; exec "$@"'),
    Case("a descriptor that it inherits", "import os\nwith os.fdopen(3) as file:\n    print(file.read())\n", shell='exec "$@" 3< <(echo inherited)'),
    Case("standard input", "import sys\nprint(input('name? '))\nfor line in sys.stdin:\n    print(repr(line))\n", stdin=b"one\ntwo\r\nthree"),
    Case("standard input, as bytes", "import sys\nprint(sys.stdin.buffer.read(), sys.stdin.isatty())\n", stdin=bytes(range(256))),
    Case("standard input that is at its end", "input()\n"),
    Case("standard input that is closed", "import sys\nprint(sys.stdin)\n", stdin=None, shell='exec "$@" <&-'),
    Case("a time zone and a locale of its own", "import time, locale, os\nos.environ['TZ'] = 'Asia/Tokyo'\ntime.tzset()\nlocale.setlocale(locale.LC_ALL, '')\nprint(time.tzname, time.strftime('%H', time.localtime(0)), locale.getlocale())\n"),
    Case("files that it leaves", "import tempfile, pathlib\npathlib.Path('out.txt').write_text('x')\nimport beside\nprint(pathlib.Path(tempfile.mkdtemp(prefix='mine')).exists())\n", files={"beside.py": "value = 3\n"}, allowed={"temporary": "the name that it leaves there is random"}),
    Case("big numbers and long lines", "import sys\nsys.set_int_max_str_digits(0)\nprint(len(str(1 << 40_000)), 'x' * 100_000)\n"),
    Case("a thread with a small stack", "import threading\nthreading.stack_size(65536)\none = threading.Thread(target=print, args=('x',))\none.start()\none.join()\n"),
]
