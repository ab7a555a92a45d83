"""Scripts that watch themselves, test themselves or take themselves apart."""

from __future__ import annotations

from odd.case import Case

TRACED = """\
import sys, threading
seen = []
def trace(frame, event, arg):
    if frame.f_code.co_filename == __file__:
        seen.append((event, frame.f_lineno, frame.f_code.co_name))
    return trace
sys.settrace(trace)
def f(x):
    return x + 1
f(3)
sys.settrace(None)
print(seen)
seen.clear()
sys.setprofile(trace)
f(3)
sys.setprofile(None)
print(seen)
"""
WATCHING = """\
import atexit, os, sys
ours = set()
def watch(frame, event, arg):
    if os.sep + "keepbusy" + os.sep in frame.f_code.co_filename:
        ours.add(os.path.basename(frame.f_code.co_filename))
    return watch
atexit.register(lambda: print(sorted(ours)))
sys.set{what}(watch)
"""
MONITORED = """\
import sys
print([sys.monitoring.get_tool(tool) for tool in range(6)])
events = sys.monitoring.events
sys.monitoring.use_tool_id(sys.monitoring.PROFILER_ID, "mine")
seen = []
sys.monitoring.register_callback(sys.monitoring.PROFILER_ID, events.PY_START, lambda code, at: seen.append(code.co_name))
sys.monitoring.set_events(sys.monitoring.PROFILER_ID, events.PY_START)
def f(): ...
f()
sys.monitoring.set_events(sys.monitoring.PROFILER_ID, 0)
print(seen)
"""
INSPECTED = """\
import copy, inspect, linecache, pickle, sys, types
class Point:
    def __init__(self, x): self.x = x
    def __eq__(self, other): return self.x == other.x
def f(a, /, b: int = 3, *, c): return a
print(inspect.getsource(f), inspect.getsource(Point), inspect.signature(f), inspect.getsourcefile(Point))
print(inspect.getmodule(f) is sys.modules["__main__"], linecache.getline(__file__, 1))
print(pickle.loads(pickle.dumps(Point(3))) == Point(3), pickle.dumps(Point).count(b"__main__"), copy.deepcopy(Point(4)).x)
print(f.__module__, Point.__qualname__, f.__code__.co_filename, f.__code__.co_flags, f.__globals__ is globals())
def frame(): return inspect.currentframe().f_back.f_code
print(frame().co_name, frame().co_filename, frame().co_flags)
"""
RUNPY = """\
import runpy, sys, importlib
print(runpy.run_path("other.py", run_name="given")["value"])
print(runpy.run_module("other")["value"], sys.argv)
runpy.run_path("other.py", run_name="__main__")
import other, script
importlib.reload(other)
print(other.__name__, script.__name__, script is sys.modules["__main__"])
"""
UNITTEST = """\
import unittest
class Test(unittest.TestCase):
    def test_good(self): self.assertEqual(1, 1)
    def test_bad(self): self.assertEqual(1, 2)
    def test_warns(self):
        import warnings
        with self.assertWarns(UserWarning): warnings.warn("x")
unittest.main()
"""
DOCTEST = '''\
"""
>>> 1 + 1
2
>>> 1 + 1
3
"""
import doctest
print(doctest.testmod())
'''
GC = """\
import gc, weakref
phases = []
gc.callbacks.append(lambda phase, info: phases.append(phase))
class Thing: ...
thing = Thing()
thing.itself = thing
gone = weakref.ref(thing, lambda _: print("gone"))
del thing
gc.collect()
print(phases[:2], gc.garbage)
gc.set_debug(gc.DEBUG_SAVEALL)
gc.disable()
"""
MALLOC = """\
import tracemalloc
tracemalloc.start(5)
kept = bytearray(1 << 20)
for one in tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, __file__)]).statistics("lineno"):
    if one.size > 1 << 19:
        print(one.traceback, one.size > 1 << 20)
"""
ASYNCIO = """\
import asyncio, contextvars
var = contextvars.ContextVar("var", default=0)
async def numbers():
    try:
        for n in range(3):
            yield n
    finally:
        print("closed")
async def main():
    async with asyncio.TaskGroup() as group:
        group.create_task(asyncio.sleep(0))
    async for n in numbers():
        if n == 1:
            break
    print(await asyncio.to_thread(lambda: 7), var.get())
    asyncio.get_running_loop().create_task(fails())
    await asyncio.sleep(0)
async def fails(): raise ValueError("in a task")
asyncio.run(main())
async def never(): ...
never()
"""
WARNED = """\
import warnings
warnings.warn("mine")
warnings.warn("mine")
warnings.warn("old", DeprecationWarning)
warnings.warn("pending", PendingDeprecationWarning)
open(__file__)
def f():
    warnings.warn("from f", stacklevel=2)
f()
print(len(__warningregistry__) if "__warningregistry__" in globals() else None)
"""
DEBUGGED = """\
x = 3
breakpoint()
y = x + 1
print(y)
"""
PROFILED = """\
import cProfile, pstats, io
profile = cProfile.Profile()
profile.enable()
def f(): return sum(range(10))
f()
profile.disable()
print(sorted(key[2] for key in pstats.Stats(profile).stats))
cProfile.Profile().enable()
"""
WATCHED = "who follows every call sees that keepbusy flushes the streams as Python does, and returns"
CASES = [
    Case("sys.settrace and sys.setprofile", TRACED),
    Case("a trace that is never taken off", WATCHING.replace("{what}", "trace"), allowed={"stdout": WATCHED}),
    Case("a profile that is never taken off", WATCHING.replace("{what}", "profile"), allowed={"stdout": WATCHED}),
    Case("a profile of threads", "import threading\n" + WATCHING.replace("{what}", "profile").replace("sys.setprofile", "threading.setprofile")),
    Case("sys.monitoring", MONITORED, since=(3, 12)),
    Case("it looks into itself", INSPECTED),
    Case("it runs others", RUNPY, files={"other.py": "import sys\nvalue = 3\nprint(__name__, __file__, __package__ == '', __spec__ is None)\n"}, start=("script.py", "--x")),
    Case("unittest", UNITTEST),
    Case("unittest, from outside", files={"test_it.py": UNITTEST.replace("unittest.main()\n", "")}, start=("-m", "unittest", "test_it")),
    Case("doctest", DOCTEST),
    Case("its own garbage collection", GC),
    Case("tracemalloc", MALLOC),
    Case("asyncio", ASYNCIO),
    Case("a debugger", DEBUGGED, stdin=b"p x\nn\np y\nc\n"),
    Case("a debugger without input", DEBUGGED),
    Case("cProfile", PROFILED),
    Case("cProfile, from outside", "print('x')\n", start=("-m", "cProfile", "-o", "out.prof", "script.py"), allowed={"files": "the profile holds times"}),
    Case("timeit, from outside", start=("-m", "timeit", "-n", "1", "-r", "1", "pass"), allowed={"stdout": "it prints the time it took"}),
    Case("warnings", WARNED),
    Case("warnings as errors", "print('x')\n", python=("-W", "error")),
    Case("warnings as errors, in the environment", "print('x')\n", environment={"PYTHONWARNINGS": "error"}),
    Case("warnings as errors, by its own filter", "import warnings\nwarnings.simplefilter('error')\nprint('x')\n"),
    Case("a warning that is an error", WARNED, python=("-W", "error")),
    Case("the developer's mode", "print('x')\nopen(__file__)\n", python=("-X", "dev")),
    Case("warnings about encodings", "import torch\nopen(__file__).close()\n", python=("-X", "warn_default_encoding")),
    Case("its filters", "import warnings\nprint(len(warnings.filters), warnings.showwarning.__module__)\n", allowed={"stdout": "PyTorch and numpy are there already, and each adds a filter of its own"}),
    Case("faulthandler", "import faulthandler, sys\nfaulthandler.enable()\nfaulthandler.dump_traceback_later(30)\nprint('x')\n"),
    Case("random numbers of a given seed", "import random\nrandom.seed(3)\nprint(random.random(), hash('x'), {'a', 'b', 'c'})\n", environment={"PYTHONHASHSEED": "3"}),
    Case("numpy", "import numpy as np\nnp.random.seed(3)\nprint(np.random.rand(2), np.geterr())\nnp.array([1.0]) / 0\n"),
    Case("torch's state", "import torch\ntorch.manual_seed(3)\nprint(torch.rand(2), torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_rng_state().sum())\nprint(torch.are_deterministic_algorithms_enabled(), torch.get_deterministic_debug_mode(), torch.ones(1).device, torch.utils._python_dispatch._get_current_dispatch_mode())\n"),
    Case("threads that it asks for before it imports torch", "import os\nos.environ['OMP_NUM_THREADS'] = '1'\nimport torch\nprint(torch.get_num_threads())\n"),
    Case("what it hides before it imports torch", "import os\nos.environ['CUDA_VISIBLE_DEVICES'] = ''\nimport torch\nprint(torch.cuda.is_available(), torch.cuda.device_count())\n"),
]
