"""Processes that a script starts."""

from __future__ import annotations

from odd.case import DEVICE, Case

FORKED = """\
import atexit, os, sys, threading
atexit.register(lambda: print("atexit of the", who, flush=True))
who = "parent"
child = os.fork()
if child:
    print("ended with", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    who = "child"
    def work():
        threading.main_thread().join()
        print("a thread of the child", flush=True)
    threading.Thread(target=work).start()
    print("buffered by the child")
"""
IN_CHILD = """\
import os, sys
child = os.fork()
if child:
    print("ended with", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    sys.exit(5)
{what}
"""
SPAWN = """\
import dataclasses, multiprocessing, sys, os

@dataclasses.dataclass
class Point:
    x: int
    def where(self) -> int: ...

def work(point, told):
    import __main__
    kinds = [field.type for field in dataclasses.fields(Point)]
    told.put((__name__, type(__builtins__).__name__, kinds, point, Point.where.__annotations__, os.path.isabs(__file__)))
    told.put((sys.argv, __spec__, type(__loader__).__name__, __main__.__name__, Point.__module__, repr(__package__)))

if __name__ == "__main__":
    context = multiprocessing.get_context("{method}")
    told = context.Queue()
    child = context.Process(target=work, args=(Point(3), told))
    child.start()
    print(told.get())
    print(told.get())
    child.join()
    print(child.exitcode)
"""
FAILS = """\
import multiprocessing, sys
def fails(): raise ValueError("in the child")
def leaves(): sys.exit("text")
def interrupted(): raise KeyboardInterrupt
if __name__ == "__main__":
    context = multiprocessing.get_context("{method}")
    for target in (fails, leaves, interrupted):
        child = context.Process(target=target, name="child")
        child.start()
        child.join()
        print(child.exitcode, flush=True)
"""
POOL = """\
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
def square(x): return x * x
if __name__ == "__main__":
    multiprocessing.set_start_method("{method}")
    with multiprocessing.Pool(1) as pool:
        print(pool.map(square, range(4)))
    with ProcessPoolExecutor(1) as pool:
        print(list(pool.map(square, range(4))))
"""
ITSELF = """\
import os, subprocess, sys
if "child" in sys.argv:
    print("child", __name__, sys.argv[1:], sorted(name for name in os.environ if "BUSY" in name))
    sys.exit(4)
done = subprocess.run([sys.executable, __file__, "child"], capture_output=True, text=True)
print(done.stdout, done.stderr, done.returncode)
done = subprocess.run([sys.executable, "-c", "import sys; print(sys.argv, 'torch' in sys.modules)"], capture_output=True, text=True)
print(done.stdout, done.stderr, done.returncode)
print(os.system("exit 3"), os.popen("echo popen").read())
"""
DAEMON = """\
import os
read, write = os.pipe()
if os.fork():
    os._exit(0)
os.setsid()
if os.fork():
    os._exit(0)
print("the daemon goes on")
"""
LEAVES_CHILD = """\
import os, sys
read, write = os.pipe()
if os.fork():
    print("parent", flush=True)
    os.close(read)
    os.write(write, b"x")
    sys.exit(3)
os.close(write)
os.read(read, 1)
os.read(read, 1)
print("the child outlives its parent")
"""
AFTER = """\
import os
told = []
os.register_at_fork(before=lambda: told.append("before"), after_in_parent=lambda: told.append("parent"), after_in_child=lambda: print("child", told, flush=True))
child = os.fork()
if not child:
    os._exit(0)
print(os.waitpid(child, 0)[1], told)
"""
SHARED = """\
from multiprocessing import shared_memory, resource_tracker, Value
memory = shared_memory.SharedMemory(create=True, size=64)
memory.buf[0] = 7
print(memory.buf[0], Value("i", 3).value)
memory.close()
memory.unlink()
"""
CASES = [
    Case("a forked child runs off its end", FORKED),
    Case("a forked child exits", IN_CHILD.format(what="print('child')\nsys.exit(6)")),
    Case("a forked child fails", IN_CHILD.format(what="1 / 0")),
    Case("a forked child is interrupted", IN_CHILD.format(what="raise KeyboardInterrupt")),
    Case("a forked child leaves at once", IN_CHILD.format(what="print('lost')\nos._exit(6)")),
    Case("a forked child fails, with a hook", "import sys\nsys.excepthook = lambda *a: print('hook', a[0].__name__)\n" + IN_CHILD.format(what="1 / 0")),
    Case("a child outlives its parent", LEAVES_CHILD),
    Case("a daemon", DAEMON),
    Case("functions at fork", AFTER),
    *(Case(f"{method}: a child of multiprocessing", SPAWN.replace("{method}", method)) for method in ("fork", "spawn", "forkserver")),
    *(Case(f"{method}: children that fail", FAILS.replace("{method}", method)) for method in ("fork", "spawn")),
    *(Case(f"{method}: pools", POOL.replace("{method}", method)) for method in ("fork", "spawn", "forkserver")),
    Case(
        "spawn, from a module",
        files={"package/__init__.py": "", "package/work.py": SPAWN.replace("{method}", "spawn")},
        start=("-m", "package.work"),
    ),
    Case("spawn, without its guard", "import multiprocessing\nmultiprocessing.get_context('spawn').Process(target=print).start()\n",
         allowed={"stderr": "it prints the whole stack of a child that begins, and keepbusy's frames are in it"}),
    Case("spawn, after chdir", "import os\nos.makedirs('elsewhere', exist_ok=True)\nif __name__ == '__main__':\n    os.chdir('elsewhere')\n" + SPAWN.replace("{method}", "spawn")),
    Case("itself as a subprocess", ITSELF),
    Case("shared memory", SHARED),
    Case("a manager", "import multiprocessing\nwith multiprocessing.Manager() as manager:\n    print(dict(manager.dict(a=1)))\n"),
    Case("a fork while warnings are errors", "import os\nchild = os.fork()\nif not child:\n    os._exit(0)\nprint(os.waitpid(child, 0)[1])\n", python=("-W", "error")),
    Case(
        "workers of a loader",
        "import torch\nfrom torch.utils.data import DataLoader, Dataset\n"
        "class Numbers(Dataset):\n    def __len__(self): return 8\n    def __getitem__(self, n): return torch.tensor(n)\n"
        "if __name__ == '__main__':\n    for batch in DataLoader(Numbers(), batch_size=4, num_workers=2):\n        print(batch)\n",
    ),
    Case(
        "a forked child beside work on the device",
        DEVICE + "x = torch.ones(8, device=device)\nfor step in range(4):\n    x = x * 2\n    print(x.sum().item(), flush=True)\n" + FORKED,
        device=8,
    ),
]
