"""What programs of every day are made of: command lines, services, pools, debuggers, limits, last words."""

from __future__ import annotations

from signal import SIGALRM, SIGQUIT, SIGTERM

from odd.case import DEVICE, Case

ARGPARSE = """\
import argparse
parser = argparse.ArgumentParser(description="trains")
parser.add_argument("--epochs", type=int, default=1)
parser.add_argument("--version", action="version", version="%(prog)s 7")
options = parser.parse_args()
print(options)
parser.exit(4, "bye\\n")
"""
LAST_WORDS = """\
import atexit, logging, logging.handlers, queue, sys, tempfile, threading, weakref
class Slow(logging.StreamHandler):
    def flush(self): super().flush(); self.stream.write("")
    def close(self): self.stream.write("closed\\n"); super().close()
lines = queue.Queue()
listener = logging.handlers.QueueListener(lines, Slow(sys.stdout))
listener.start()
logging.basicConfig(level="INFO", handlers=[logging.handlers.QueueHandler(lines), logging.handlers.MemoryHandler(9, target=Slow(sys.stderr))])
logging.info("to both")
listener.stop()
listener.start()
class Thing:
    def __del__(self): print("deleted", sys.is_finalizing())
thing = Thing()
weakref.finalize(thing, print, "finalized")
folder = tempfile.TemporaryDirectory()
open(folder.name + "/x", "w").close()
threading._register_atexit(print, "threads first")
atexit.register(listener.stop)
atexit.register(lambda: atexit.register(print, "registered at exit"))
def generator():
    try:
        yield
    finally:
        print("generator closed")
held = generator()
next(held)
"""
SERVED = """\
import http.server, threading, urllib.request
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(self.path.encode())
    def log_message(self, *what): pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer)
threading.Thread(target=server.serve_forever).start()
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
print(opener.open(f"http://127.0.0.1:{server.server_port}/x").read())
server.shutdown()
server.server_close()
"""
PROCESSES = """\
import asyncio, concurrent.futures, multiprocessing, sys
def square(x): return x * x
def dies(x):
    import os; os._exit(x)
async def main():
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", "print(input() * 2)", stdin=-1, stdout=-1)
    print(await child.communicate(b"ab\\n"), child.returncode)
    with concurrent.futures.ProcessPoolExecutor(2, multiprocessing.get_context("{method}")) as pool:
        print(await asyncio.gather(*(asyncio.get_running_loop().run_in_executor(pool, square, x) for x in range(4))))
        try:
            pool.submit(dies, 3).result()
        except concurrent.futures.process.BrokenProcessPool as error:
            print(type(error).__name__)
if __name__ == "__main__":
    asyncio.run(main())
"""
KEPT_POOL = """\
import multiprocessing, sys
def work(x):
    print("at work", flush=True)
    return x + 1
def prepare(): print("prepared", flush=True)
if __name__ == "__main__":
    pool = multiprocessing.get_context("fork").Pool(1, prepare, maxtasksperchild=2)
    print(list(pool.imap(work, range(3))))
    sys.exit(6)
"""
EXECUTOR_AT_EXIT = """\
import concurrent.futures, time
pool = concurrent.futures.ThreadPoolExecutor(1)
def work(n):
    time.sleep(0.05)
    print("work", n, flush=True)
    if n < 2:
        try:
            pool.submit(work, n + 1)
        except RuntimeError as error:
            print(error)
pool.submit(work, 0)
print("main ends")
"""
ALARM = """\
import signal, sys
class Timeout(Exception): ...
def late(number, frame): raise Timeout
signal.signal(signal.SIGALRM, late)
signal.setitimer(signal.ITIMER_REAL, 0.05)
try:
    while True: pass
except Timeout:
    print("timed out", signal.getitimer(signal.ITIMER_REAL))
signal.signal(signal.SIGVTALRM, late)
signal.setitimer(signal.ITIMER_VIRTUAL, 0.02)
try:
    while True: pass
except Timeout:
    print("again")
signal.signal(signal.SIGALRM, signal.SIG_DFL)
print(end="", flush=True)
signal.setitimer(signal.ITIMER_REAL, 0.05)
while True: pass
"""
MASKED = """\
import os, signal, threading
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
read, write = os.pipe()
os.set_blocking(write, False)
signal.set_wakeup_fd(write)
print("ready", flush=True)
print(signal.sigwait({signal.SIGTERM}).name, signal.set_wakeup_fd(-1) == write)
"""
CHILD_ENDS = """\
import os, signal
signal.signal(signal.SIGCHLD, lambda number, frame: print("told", os.waitpid(-1, os.WNOHANG)[1]))
if not os.fork():
    os._exit(2)
signal.pause()
"""
ZOMBIES = "import os, signal, subprocess, sys\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)\nprint(subprocess.run([sys.executable, '-c', 'print(1)']).returncode)\n"
STOPPED = "import os, signal\nif not os.fork():\n    import time\n    time.sleep(0.3)\n    os.kill(os.getppid(), signal.SIGCONT)\n    os._exit(0)\nos.kill(os.getpid(), signal.SIGSTOP)\nos.wait()\nprint('continued')\n"
AUDITED = """\
import os, sys
ours = []
def audit(event, args):
    if event in ("open", "exec", "subprocess.Popen", "os.fork") and active:
        ours.append(event)
active = True
sys.addaudithook(audit)
open(__file__).close()
exec("x = 1")
active = False
print(ours)
"""
FENCED = """\
import atexit, sys
def fence(event, args):
    if event in ("socket.connect", "os.system", "subprocess.Popen"):
        raise PermissionError(event)
sys.addaudithook(fence)
import subprocess
try:
    subprocess.run(["true"])
except PermissionError as error:
    print("refused", error)
"""
INTERPRETERS = """\
try:
    import _interpreters as interpreters
except ImportError:
    import _xxsubinterpreters as interpreters
one = interpreters.create()
text = "import sys, threading\\nprint('inside', 'keepbusy' in sys.modules, __name__, flush=True)\\nthreading.Thread(target=print, args=('thread',)).start()"
(interpreters.exec if hasattr(interpreters, "exec") else interpreters.run_string)(one, text)
interpreters.destroy(one)
print("outside")
"""
DEBUGGED = "def f(x):\n    y = x + 1\n    return y\nprint(f(3))\nraise ValueError('post mortem')\n"
FROM_ENV = "import sys\ndef stop(*what):\n    print('stopped at', sys._getframe(1).f_lineno)\n"
CONSOLE = """\
import code, cmd
class Shell(cmd.Cmd):
    prompt = ""
    def do_add(self, line): print(sum(map(int, line.split())))
    def do_EOF(self, line): return True
    def do_leave(self, line): return True
Shell().cmdloop("welcome")
code.interact("banner", local={"x": 3}, exitmsg="left")
"""
RUNS_TRAINING = """\
import runpy, sys
sys.argv = ["train.py", "--steps", "3"]
print(sorted(set(runpy.run_path("train.py", run_name="__main__")) & {"x", "step"}))
exec(compile(open("train.py").read(), "train.py", "exec"), {"__name__": "__main__"})
"""
IN_EXECUTOR = DEVICE + """\
import asyncio
def train(n):
    x = torch.full((4,), float(n), device=device)
    for step in range(3):
        x = x * 2
    return x.sum().item()
async def main():
    print(await asyncio.gather(*(asyncio.to_thread(train, n) for n in range(3))))
asyncio.run(main())
"""
IN_POOL = DEVICE + """\
import multiprocessing
def train(n):
    x = torch.full((4,), float(n), device=device)
    for step in range(3):
        x = x * 2
    return x.sum().item()
if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        print(pool.map(train, range(3)))
    print(train(9))
"""
SPAWNED = DEVICE + """\
import torch.multiprocessing
def work(rank, x):
    x.mul_(rank + 2)
    raise ValueError("in a rank")
if __name__ == "__main__":
    x = torch.ones(3).share_memory_()
    for step in range(6):
        x.add_(torch.ones(3, device=device).cpu())
    try:
        torch.multiprocessing.spawn(work, (x,), 1)
    except torch.multiprocessing.ProcessRaisedException as error:
        print(type(error).__name__, "in a rank" in str(error))
"""
GRACEFUL = DEVICE + """\
import contextlib, signal, sys
stop = []
signal.signal(signal.SIGTERM, lambda number, frame: stop.append(number))
x = torch.ones(8, device=device)
for step in range(6):
    x = x * 2
print("ready", flush=True)
with contextlib.ExitStack() as stack:
    stack.callback(print, "checkpoint written")
    while not stop:
        signal.sigtimedwait([signal.SIGUSR2], 0.05)
    x = x * 2
    print(x.sum().item())
sys.exit(0)
"""
LOOP = DEVICE + "x = torch.ones(8, device=device)\nfor step in range(6):\n    x = x * 2\nprint(x.sum().item(), flush=True)\n"
UNRAISABLE = """\
import sys, threading
sys.unraisablehook = lambda what: print("unraisable", what.exc_type.__name__)
threading.excepthook = lambda what: print("in a thread", what.exc_type.__name__)
class Bad:
    def __del__(self): raise ValueError
del (bad := Bad(),)[0] if False else None
""".replace("del (bad := Bad(),)[0] if False else None\n", "Bad()\n") + """\
thread = threading.Thread(target=lambda: 1 / 0)
thread.start()
thread.join()
late = Bad()
"""
RELOADED = """\
import importlib, sys, types
module = sys.modules["__main__"]
print(module.__dict__ is globals(), isinstance(module, types.ModuleType), importlib.util.find_spec("script") is not None)
try:
    importlib.reload(module)
except Exception as error:
    print(type(error).__name__, error)
sys.modules["__main__"] = types.ModuleType("__main__")
print(__name__)
""".replace("import importlib,", "import importlib.util,")
REPLACED = """\
import importlib, os
if os.environ.get("AGAIN"):
    print("again")
else:
    print("first", flush=True)
    os.environ["AGAIN"] = "1"
    import sys
    os.execv(sys.executable, [sys.executable, *sys.argv])
"""
CPU_LIMIT = "import resource, signal\nresource.setrlimit(resource.RLIMIT_CPU, (int(resource.getrusage(resource.RUSAGE_SELF).ru_utime) + 2, resource.RLIM_INFINITY))\nsignal.signal(signal.SIGXCPU, lambda *what: exit(9))\nprint('begins', flush=True)\nwhile True: pass\n"
CASES = [
    Case("argparse", ARGPARSE, start=("script.py", "--epochs", "3")),
    Case("argparse: --help", ARGPARSE, start=("script.py", "--help")),
    Case("argparse: --version", ARGPARSE, start=("script.py", "--version")),
    Case("argparse: what it does not know", ARGPARSE, start=("script.py", "--save", "x", "--ranks=2")),
    Case("last words", LAST_WORDS),
    Case("last words after an exit", LAST_WORDS + "sys.exit(8)\n"),
    Case("last words after an exception", LAST_WORDS + "raise ValueError('mine')\n"),
    Case("what is raised where nobody catches it", UNRAISABLE),
    Case("a server in a thread", SERVED),
    Case("asyncio with processes, spawn", PROCESSES.replace("{method}", "spawn")),
    Case("asyncio with processes, fork", PROCESSES.replace("{method}", "fork")),
    Case("a pool that is never closed", KEPT_POOL),
    Case("an executor that outlives main", EXECUTOR_AT_EXIT),
    Case("an alarm that raises, then one that kills", ALARM),
    Case("an alarm from outside", "import signal\nprint('ready', flush=True)\nsignal.pause()\n", signal=SIGALRM),
    Case("signals that it waits for", MASKED, signal=SIGTERM),
    Case("quit", "import signal, resource\nresource.setrlimit(resource.RLIMIT_CORE, (0, 0))\nprint('ready', flush=True)\nsignal.pause()\n", signal=SIGQUIT),
    Case("a child's end is told", CHILD_ENDS),
    Case("children's ends are ignored", ZOMBIES),
    Case("stopped and continued", STOPPED),
    Case("an audit of what it opens", AUDITED),
    Case("a fence around it", FENCED),
    Case("a fence around it, with work on the device", FENCED + LOOP, device=6),
    Case("interpreters within it", INTERPRETERS, since=(3, 12)),
    Case("pdb, from outside", DEBUGGED, start=("-m", "pdb", "script.py"), stdin=b"b f\nc\np x\nw\nc\nq\nq\n"),
    Case("breakpoints of its own", "x = 3\nbreakpoint()\nprint(x)\n", files={"stops.py": FROM_ENV}, environment={"PYTHONBREAKPOINT": "stops.stop"}),
    Case("consoles", CONSOLE, stdin=b"add 1 2\nleave\nprint(x)\n1/0\n"),
    Case("the standard library's trace, from outside", DEBUGGED, start=("-m", "trace", "--count", "--missing", "-C", "counts", "--ignore-dir", "/", "script.py")),
    Case("it loads itself again", RELOADED),
    Case("it starts itself again", REPLACED),
    Case("a limit of the processor's time", CPU_LIMIT),
    Case("input", "name = input('who? ')\nimport sys\nfor line in sys.stdin:\n    print(name, line.strip())\n", stdin=b"me\na\nb\n"),
    Case("it asks whether it is on a terminal", "import os, sys, shutil\nprint([one.isatty() for one in (sys.stdin, sys.stdout, sys.stderr)], shutil.get_terminal_size())\n"),
    Case("its process group, umask and priority", "import os\nprint(os.umask(0o27) == 0o22 or True, os.getpgrp() == os.getpid(), os.nice(0), os.getppid() > 0)\nopen('f', 'w').close()\nprint(oct(os.stat('f').st_mode))\n"),
    Case("it runs a training script, twice", RUNS_TRAINING, files={"train.py": "import sys\n" + LOOP}, device=12),
    Case("training in asyncio's threads", IN_EXECUTOR, device=9),
    Case("training in a pool of processes, and here", IN_POOL, device=3),
    Case("torch.multiprocessing.spawn beside work on the device", SPAWNED, device=6, allowed={"temporary": "PyTorch leaves a file there, whose name is random"}),
    Case("a graceful end after SIGTERM", GRACEFUL, signal=SIGTERM, device=6),
    Case("an alarm kills it after work on the device", LOOP + "import signal\nsignal.alarm(1)\nsignal.pause()\n"),
    Case("a limit of time raises within work on the device", LOOP + "import signal\nclass Late(Exception): ...\ndef late(*what): raise Late\nsignal.signal(signal.SIGALRM, late)\nsignal.setitimer(signal.ITIMER_REAL, 0.2)\ntry:\n    while True:\n        x = x * 1\nexcept Late:\n    print('late')\n", device=6),
    Case("last words after work on the device", LOOP + LAST_WORDS + "sys.exit(8)\n", device=6,
         allowed={"stdout": "what is said while Python takes modules apart follows the report"}),
    Case("it starts itself again after work on the device", LOOP + REPLACED, device=0),
    Case("os._exit after work on the device", LOOP + "import os\nos._exit(4)\n", device=0),
]
