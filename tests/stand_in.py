"""Stands where a program starts a Python: a fork of the warm one (`warm_python.py`) is asked to be it, with its files.

A signal goes on to the fork, and the fork's end is this one's.
"""

import json
import os
import signal
import socket
import sys
from pathlib import Path

address, *command = sys.argv[1:]
numbers = [int(path.name) for path in Path("/proc/self/fd").iterdir() if path.exists()]
asked = {"command": command, "cwd": str(Path.cwd()), "env": {**os.environ}, "numbers": numbers}
server = socket.socket(socket.AF_UNIX)
server.connect(address)
socket.send_fds(server, [b" "], numbers)
server.sendall(json.dumps(asked).encode() + b"\n")
with server.makefile() as words:
    fork = int(words.readline())
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: os.kill(fork, number))
    code = os.waitstatus_to_exitcode(int(words.readline()))
if code < 0:
    if -code != signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
