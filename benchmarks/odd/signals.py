"""Signals: from outside once the script says that it is ready, and from itself."""

from __future__ import annotations

from signal import SIGHUP, SIGINT, SIGTERM, SIGUSR1

from odd.case import DEVICE, Case

WAIT = "import threading\nprint('ready', flush=True)\nthreading.Event().wait(20)\nprint('not reached')\n"
LATE = "import atexit\natexit.register(print, 'atexit')\ntry:\n" + "".join(f"    {line}\n" for line in WAIT.splitlines()) + "finally:\n    print('finally')\n"
LOOP = DEVICE + "x = torch.ones(64, 64, device=device)\nfor step in range(8):\n    x = (x @ x) / 64\n    print(x.sum().item())\n"
HANDLER = """\
import signal, sys
def told(number, frame):
    print("told", signal.Signals(number).name, frame.f_code.co_name)
    sys.exit(3)
signal.signal(signal.SIGTERM, told)
print("ready", flush=True)
signal.pause()
"""
COUNTED = """\
import signal
got = []
signal.signal(signal.SIGUSR1, lambda number, frame: got.append(number))
signal.signal(signal.SIGALRM, lambda number, frame: got.append(number))
signal.raise_signal(signal.SIGUSR1)
signal.setitimer(signal.ITIMER_REAL, 0.01)
signal.pause()
print(len(got), signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, signal.getsignal(signal.SIGINT) is signal.default_int_handler)
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
signal.raise_signal(signal.SIGTERM)
print(signal.sigpending())
"""
ASYNC = """\
import asyncio, signal
async def main():
    loop, told = asyncio.get_running_loop(), asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, told.set)
    print("ready", flush=True)
    await told.wait()
    print("told")
asyncio.run(main())
"""
PIPE = """\
import os, signal
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
read, write = os.pipe()
os.close(read)
os.write(write, b"x")
print("not reached")
"""
CASES = [
    Case("it raises KeyboardInterrupt", "import atexit\natexit.register(print, 'atexit')\nraise KeyboardInterrupt\n"),
    Case("it raises KeyboardInterrupt with a text, in a function", "def f():\n    raise KeyboardInterrupt('mine')\nf()\n"),
    Case("it catches KeyboardInterrupt", "import signal\ntry:\n    signal.raise_signal(signal.SIGINT)\nexcept KeyboardInterrupt:\n    print('caught')\n"),
    Case("interrupted", LATE, signal=SIGINT, group=True),
    Case("interrupted, it alone", LATE, signal=SIGINT),
    Case("interrupted while it ignores that", "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nprint('ready', flush=True)\nsignal.sigtimedwait([signal.SIGUSR2], 0.2)\nprint('end')\n", signal=SIGINT, group=True),
    Case("started where interrupts are ignored", "import signal\nprint(signal.getsignal(signal.SIGINT) == signal.SIG_IGN)\n", shell="trap '' INT; exec \"$@\""),
    Case("interrupted in asyncio", "import asyncio\nasync def main():\n    print('ready', flush=True)\n    try:\n        await asyncio.Event().wait()\n    finally:\n        print('cancelled')\nasyncio.run(main())\n", signal=SIGINT, group=True),
    Case("a KeyboardInterrupt with a hook of its own", "import sys\nsys.excepthook = lambda kind, error, stack: print('hook', kind.__name__)\nraise KeyboardInterrupt\n"),
    Case("terminated", LATE, signal=SIGTERM),
    Case("terminated, the whole group", LATE, signal=SIGTERM, group=True),
    Case("terminated, with a handler", HANDLER, signal=SIGTERM),
    Case("terminated, the whole group, with a handler", HANDLER, signal=SIGTERM, group=True),
    Case("terminated in asyncio", ASYNC, signal=SIGTERM),
    Case("terminated after work on the device", LOOP + WAIT, signal=SIGTERM, device=8),
    Case("terminated by its group, after work on the device", LOOP + WAIT, signal=SIGTERM, group=True, device=8),
    Case("terminated with a handler, after work on the device", LOOP + HANDLER, signal=SIGTERM, device=8),
    Case("interrupted after work on the device", LOOP + WAIT, signal=SIGINT, group=True, device=8),
    Case("hung up", LATE, signal=SIGHUP),
    Case("a user's signal that nobody awaits", LATE, signal=SIGUSR1),
    Case(
        "signals of its own",
        COUNTED,
        allowed={"stdout": "the first SIGTERM is taken, so that the report follows it, and getsignal shows that"},
    ),
    Case("it terminates itself", "import os, signal\nprint('so far', flush=True)\nos.kill(os.getpid(), signal.SIGTERM)\nprint('not reached')\n"),
    Case("a pipe without a reader kills it", PIPE),
]
