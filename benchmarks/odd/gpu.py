"""Work on the device, at odd moments; without a GPU, plain Python does it on the host."""

from __future__ import annotations

from odd.case import DEVICE, Case

LOOP = "x = torch.ones(8, device=device)\nfor step in range({count}):\n    x = x * 2\n    print(x.sum().item(), flush=True)\n"
SHORT = DEVICE + LOOP.format(count=6)
THREAD = (
    DEVICE
    + """\
import threading
def work():
    threading.main_thread().join()
    x = torch.ones(8, device=device)
    for step in range(6):
        x = x * 2
        print(x.sum().item(), flush=True)
threading.Thread(target=work).start()
print("main ends", flush=True)
"""
)
IN_ATEXIT = (
    DEVICE
    + """\
import atexit
@atexit.register
def last():
    x = torch.ones(8, device=device)
    for step in range(6):
        x = x * 2
    print(x.sum().item())
"""
)
HOOKED = (
    DEVICE
    + """\
import dataclasses
class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2
    @staticmethod
    def backward(ctx, grad):
        print("backward")
        return grad * 2
x = torch.ones(4, device=device, requires_grad=True)
for step in range(6):
    Double.apply(x).sum().backward()
    print(x.grad.tolist())
model = torch.nn.Linear(4, 1).to(device)
model.register_forward_hook(lambda *a: print("hook"))
with torch.no_grad():
    for parameter in model.parameters():
        parameter.fill_(1)
print(model(x).item())
torch.save(model.state_dict(), "model.pt")
print({name: tuple(one.shape) for name, one in torch.load("model.pt", map_location="cpu").items()})
"""
)
CASES = [
    Case("a loop", SHORT, device=6),
    Case("a loop, after chdir", "import os\nos.mkdir('elsewhere')\nos.chdir('elsewhere')\n" + SHORT, device=6),
    Case("torch imported late", "def main():\n" + "".join(f"    {line}\n" for line in SHORT.splitlines()) + "print('first')\nmain()\n", device=6),
    Case("a loop, then an exception", SHORT + "raise ValueError('mine')\n", device=6),
    Case("a loop, then an exception within torch", SHORT + "torch.ones(2, 3, device=device) @ torch.ones(2, 3, device=device)\n", device=6,
         allowed={"stderr": "a GPU's message is not the host's"}),
    Case("a loop, then an exit", SHORT + "import sys\nsys.exit('text')\n", device=6),
    Case("a loop, then KeyboardInterrupt", SHORT + "raise KeyboardInterrupt\n", device=6),
    Case("a thread at work after main has ended", THREAD, device=6),
    Case("work at exit", IN_ATEXIT, device=6),
    Case("functions, hooks and files of autograd", HOOKED, device=6, allowed={"files": "a file of tensors names their device"}),
    Case("a loop under warnings as errors", SHORT, python=("-W", "error"), device=6),
    Case("a loop in the developer's mode", SHORT, python=("-X", "dev"), device=6, allowed={}),
    Case("a loop in a folder program", files={"folder/__main__.py": SHORT}, start=("folder",), device=6),
    Case("a loop in a module", files={"package/__init__.py": "", "package/work.py": SHORT}, start=("-m", "package.work"), device=6),
    Case("a loop under a trace of its own", "import sys\nsys.settrace(lambda frame, event, arg: None)\n" + SHORT, device=6),
    Case("a loop with a low limit of recursion", SHORT + "import sys\nsys.setrecursionlimit(60)\n", device=6),
    Case("a loop under tracemalloc", "import tracemalloc\ntracemalloc.start()\n" + SHORT, device=6),
]
