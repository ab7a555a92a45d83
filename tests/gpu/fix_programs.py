"""Programs that would notice a fix that takes a liberty. Each leaves what it found in `found`."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from keepbusy.fix.live.live_fixes import LiveFixes, chosen


def found_by(source: str, path: Path, compiled: Callable[[bytes, str], Any] | None = None) -> str:
    """`compiled`: as the fixes have it; as it is written without."""
    path.write_text(source)
    names: dict[str, Any] = {"__name__": "__main__"}
    try:
        exec(compiled(source.encode(), str(path)) if compiled else compile(source, path, "exec"), names)
        return repr(names["found"])
    finally:
        names.clear()  # PyTorch waits five seconds for workers whose loader is only found as garbage


def fixed(source: str, path: Path, tried: bool = True, also: Sequence[str] = ()) -> tuple[str, LiveFixes]:
    """What it finds with the fixes, and what they did."""
    fixes, frozen = LiveFixes(chosen(also=also), tried), gc.get_freeze_count()
    fixes.begin()
    try:
        return found_by(source, path, fixes.compile), fixes
    finally:
        fixes.end()
        if gc.get_freeze_count() > frozen:  # one of the fixes does so
            gc.unfreeze()
            gc.collect()
            gc.freeze()


HEAD = """\
import copy, gc, itertools, random, sys, weakref
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
found = []
torch.manual_seed(0); random.seed(0); np.random.seed(0)
LARGE = (64, 513)

class Rows(Dataset):
    def __init__(self, count=6):
        self.x = torch.arange(count * 513, dtype=torch.float32).reshape(count, 513) / 1000
    def __len__(self): return len(self.x)
    def __getitem__(self, at): return self.x[at], at % 3

def model(width=513):
    torch.manual_seed(1)
    return nn.Linear(width, 3).cuda()

def train(net, x, y, optimizer):
    loss = nn.functional.cross_entropy(net(x), y)
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    return loss

def sgd(net, **options): return torch.optim.SGD(net.parameters(), lr=0.1, **options)
"""

COPIES = {
    "changed after the copy": """
x = torch.ones(LARGE); sent = x.to("cuda"); x.zero_()
found.append(sent.sum().item())
""",
    "changed after a copy that was not to block": """
x = torch.ones(LARGE).pin_memory(); sent = x.to("cuda"); x.fill_(3)
found.append(sent.sum().item())
""",
    "changed through numpy": """
a = np.ones(LARGE, np.float32); sent = torch.from_numpy(a).cuda(); a[:] = 5
found.append(sent.sum().item())
""",
    "one buffer for all batches": """
buffer, kept = torch.zeros(LARGE), []
for step in range(5):
    buffer.fill_(step); kept.append(buffer.to("cuda"))
found += [one.mean().item() for one in kept]
""",
    "batches kept in a list": """
kept = [x.to("cuda") for x, _ in DataLoader(Rows(), batch_size=2)]
for one in kept: one.mul_(2)
found += [one.sum().item() for one in kept]
""",
    "a batch changed in place before it is moved": """
for x, y in DataLoader(Rows(), batch_size=2):
    x.mul_(2); found.append(x.to("cuda").sum().item()); x.add_(1); found.append(x.cuda().sum().item())
""",
    "moved in one expression": """
device, kinds = torch.device("cuda"), (torch.int64, torch.float32, torch.float64, torch.int8, torch.bfloat16)
row = [torch.arange(12 * (at + 1)).to(kind).reshape(-1, 1 + at % 2 * 2)[:4] for at, kind in enumerate(kinds * 2)]
named = {f"f{at}": one for at, one in enumerate(row)}
for step in range(6):
    a = [one.to("cuda") for one in row]; b = {name: one.to(device, non_blocking=True) for name, one in named.items()}
    c = [one.cuda() for one in named.values()]
    for one in row: one.mul_(2)
    a[0].fill_(7); c[1].add_(1); b["f2"].zero_()
    for held in (a, [*b.values()], c):
        found.append([(x.dtype, x.tolist(), x.stride(), x.untyped_storage().nbytes(), x.device.index) for x in held])
found += [list(b), [one.is_pinned() for one in row], [one.tolist() for one in row]]
""",
    "moved in one expression, of all kinds": """
class Own(dict):
    def items(self): return ((name, 2 * one) for name, one in super().items())
class Device:
    calls = 0
    @property
    def there(self): Device.calls += 1; return "cuda"
once, gradient = torch.ones(3), torch.ones(2, requires_grad=True)
rows = ([once, once, torch.ones(3, 4).T, torch.ones(()), torch.ones(0, 2)], [gradient, once], [once, once.half()], (),
        (one * 2 for one in (once, once)), [torch.ones(1 << 19), torch.ones(1 << 19)], [once.cuda(), once],
        [once, 1j * once], [once.pin_memory(), once], np.ones((2, 3)), [nn.Parameter(once), once])
for row in rows:
    try:
        made = [one.to("cuda") for one in row]
        found.append([(one.sum().item(), one.shape, one.stride(), type(one).__name__, one.is_leaf) for one in made])
        if len(made) > 1: found.append((made[0] is made[1], made[0].data_ptr() == made[1].data_ptr()))
    except Exception as error: found.append(type(error).__name__)
there = Device()
found += [{name: one.to(there.there).tolist() for name, one in held.items()} for held in (Own(a=once), {"a": once})]
twice = [once, once]
found += [[one.to("cuda", torch.float64).dtype for one in twice], [one.to(torch.int8).dtype for one in twice]]
found += [[one.to("cuda").tolist() for one in rows[0][:2]], Device.calls > 1]
for wrong in (lambda: [one.to("nowhere") for one in twice], lambda: [one.to("cuda", 5, 7) for one in twice]):
    try: wrong()
    except Exception as error: found.append((type(error).__name__, str(error)[:40]))
""",
    "rows of rows, moved in one expression": """
def run(rows, device):
    made = [[y.to(device) for y in row] for row in rows]
    named = {k: {n: t.to(device) for n, t in v.items()} for k, v in {"a": {"x": rows[0][0], "y": rows[0][1]}}.items()}
    total, last = 0.0, None
    for row in made:
        for one in row:
            one.add_(1); last = one.sum().item(); total += last
    return total, last, [[o.tolist() for o in r] for r in made], [t.sum().item() for t in named["a"].values()]
rows = [[torch.ones(2, 3) * k, torch.arange(4)] for k in range(3)]
found += [run(rows, "cuda"), run(rows, torch.device("cuda", 0)), rows[0][0].tolist()]
class A:
    dev = "cuda"
    try: xs = [x.to(dev) for x in rows[0]]
    except NameError: found.append("NameError")
""",
    "a batch moved twice": """
for x, y in DataLoader(Rows(), batch_size=2):
    a, b = x.cuda(), x.cuda(); a.zero_()
    found.append((a.sum().item(), b.sum().item(), a.data_ptr() != b.data_ptr()))
""",
    "the host's tensor stays what it is": """
x = torch.ones(LARGE); x.to("cuda").zero_()
found += [x.sum().item(), x.is_pinned(), x.device.type]
""",
    "strides stay": """
x = torch.randn(8, 3, 32, 32).to(memory_format=torch.channels_last)
for one in (x, x.transpose(1, 2), x[:, ::2], x.expand(2, 8, 3, 32, 32), x[0, 0].T):
    sent = one.to("cuda"); found.append((sent.stride(), sent.shape, sent.sum().item()))
""",
    "types are cast as before": """
x = torch.tensor([1.9, -2.9, 300.7, 65504.0, 1e30] * 5000)
for dtype in (torch.float16, torch.bfloat16, torch.int32, torch.float64, torch.bool):
    found.append(x.to("cuda", dtype).cpu().tolist()[:5])
found.append(x.to(dtype=torch.float16, device="cuda")[3].item())
""",
    "to what another tensor is": """
other = torch.ones(1, dtype=torch.float64, device="cuda")
found.append((torch.ones(3).to(other).dtype, torch.ones(LARGE).to(other).sum().item()))
""",
    "a gradient flows through the copy": """
x = torch.ones(LARGE, requires_grad=True); (x.to("cuda") * 2).sum().backward()
found.append(x.grad.sum().item())
""",
    "parameters stay parameters": """
net = nn.Linear(513, 300).cuda(); found.append([type(p).__name__ for p in net.parameters()])
found.append([p.is_leaf for p in net.parameters()])
""",
    "lazy layers": """
net = nn.Sequential(nn.LazyLinear(4)).cuda(); found.append(net(torch.ones(LARGE).cuda()).shape)
""",
    "special tensors": """
x = torch.randn(200, 200, dtype=torch.complex64)
for one in (x.conj(), x.imag, x.conj().imag, torch._neg_view(torch.ones(300, 300))):
    found.append(one.to("cuda").cpu().sum().item())
""",
    "subclasses stay subclasses": """
class Mine(torch.Tensor): pass
found.append(type(torch.ones(LARGE).as_subclass(Mine).to("cuda")).__name__)
""",
    "empty and zero-dimensional": """
found += [torch.ones(0, 5).to("cuda").shape, torch.tensor(3.5).to("cuda").item(), torch.ones(()).cuda().shape]
""",
    "another stream uses it without waiting": """
x = torch.ones(1 << 20); side = torch.cuda.Stream()
sent = x.to("cuda")
with torch.cuda.stream(side):
    twice = sent * 2
side.synchronize(); found.append(twice.sum().item())
again = torch.full((1 << 20,), 3.0).to("cuda")
with torch.cuda.stream(side):
    found.append((again * 2).sum().item())
""",
    "home without waiting, and there again": """
g = torch.arange(1 << 18, device="cuda", dtype=torch.float32)
for _ in range(30): g = g + 1
home = g.to("cpu", non_blocking=True); back = home.to("cuda", non_blocking=True)
torch.cuda.synchronize(); found.append((back == g).all().item())
pinned = torch.empty(1 << 18, pin_memory=True); pinned.copy_(g * 2, non_blocking=True)
found.append((pinned.to("cuda") == g * 2).all().item())
""",
    "copy_ into what is in use": """
target = torch.zeros(LARGE, device="cuda"); source = torch.ones(LARGE)
for step in range(4):
    target.copy_(source); source.add_(1); found.append(target.sum().item())
target.copy_(torch.arange(513)); found.append(target.sum().item())
target[:, :3].copy_(torch.ones(64, 3, dtype=torch.float64)); found.append(target.sum().item())
""",
    "new tensors from lists": """
found.append(torch.tensor([1, 2, 3], device="cuda").sum().item())
found.append(torch.tensor([1.5, True], device="cuda", dtype=torch.float16).tolist())
t = torch.tensor([[1.0, 2.0]], device="cuda", requires_grad=True); (t * t).sum().backward()
found.append(t.grad.tolist())
found.append((t.is_leaf, torch.tensor(7, device="cuda").dtype, torch.tensor([], device="cuda").dtype))
with torch.device("cuda"):
    found.append(torch.tensor([1.0]).device.type)
""",
    "wrong arguments fail as before": """
for wrong in (lambda: torch.ones(3).to("nowhere"), lambda: torch.ones(3).to("cuda", 5, 7, 8, 9),
              lambda: torch.ones(3).cuda("cpu"), lambda: torch.tensor([[1], [1, 2]], device="cuda"),
              lambda: torch.ones(3).to("cuda:99")):
    try: wrong(); found.append("fine")
    except Exception as error: found.append(type(error).__name__)
""",
    "freed and taken again": """
total = torch.zeros((), device="cuda")
for step in range(40):
    total += torch.full((1 << 17,), float(step)).to("cuda").sum()
    junk = torch.full((1 << 17,), -1.0, device="cuda"); del junk
found.append(total.item())
""",
    "the GPU as the default device": """
with torch.device("cuda"):
    target = torch.zeros(LARGE); target.copy_(torch.ones(LARGE, device="cpu")); found.append(target.sum().item())
    found.append(torch.ones(LARGE, device="cpu").to("cuda").sum().item())
    total = 0.0
    for step in range(3): total += torch.ones(LARGE).sum().item()
    found.append((total, torch.tensor([1, 2], device="cpu").device.type))
""",
    "scripted": """
unit = torch.jit.CompilationUnit('''
def both(a: List[Tensor], b: List[Tensor]):
    torch._foreach_copy_(a, b)
    return a[0].to("cpu")
''')
found.append(unit.both([torch.zeros(3)], [torch.ones(3)]).tolist())
""",
    "traced": """
class Moves(nn.Module):
    def forward(self, x): return x.to("cuda") * 2
traced = torch.jit.trace(Moves(), torch.ones(LARGE))
found.append((traced(torch.full(LARGE, 3.0)).sum().item(), "pin" in str(traced.graph)))
""",
    "inference mode": """
with torch.inference_mode():
    x = torch.ones(LARGE).to("cuda"); found.append((x.is_inference(), x.sum().item()))
""",
    "under autocast": """
net, x = model(), torch.randn(LARGE)
with torch.autocast("cuda", dtype=torch.bfloat16): found.append(net(x.to("cuda")).float().sum().item())
""",
    "a dictionary, a named tuple, an object": """
from collections import namedtuple
Pair = namedtuple("Pair", "x y")
class Batch:
    def __init__(self, x): self.x = x
    def to(self, device): return Batch(self.x.to(device))
found.append(Batch(torch.ones(LARGE)).to("cuda").x.sum().item())
found.append([v.cuda().sum().item() for v in {"a": torch.ones(LARGE), "b": torch.ones(2)}.values()])
found.append(Pair(*(t.to("cuda") for t in Pair(torch.ones(LARGE), torch.ones(3)))).x.sum().item())
""",
}

FED = """
def fed(count=30, **options): return DataLoader(Rows(count), batch_size=2, num_workers=1, **options)
device = torch.device("cuda")
"""
LOADERS = {
    "several loaders at once": """
net = model(); optimizer = sgd(net)
for (a, y), (b, _) in zip(DataLoader(Rows(), batch_size=2), DataLoader(Rows(), batch_size=3)):
    found.append(train(net, a.cuda(), y.cuda(), optimizer).item()); found.append(b.cuda().sum().item())
""",
    "a generator as a loader": """
def batches():
    try:
        for step in range(4): yield torch.full(LARGE, float(step))
    finally: found.append("closed")
for x in batches():
    if x.to("cuda").mean().item() > 1.5: break
gc.collect()
""",
    "a subclass of DataLoader": """
class Doubled(DataLoader):
    def __iter__(self): return ((2 * x, y) for x, y in super().__iter__())
for x, y in Doubled(Rows(), batch_size=2): found.append(x.to("cuda").sum().item())
found.append(len(Doubled(Rows(), batch_size=2)))
""",
    "random numbers in the loop and in the data": """
class Noisy(Rows):
    def __getitem__(self, at): return self.x[at] + torch.randn(513), at
for x, y in DataLoader(Noisy(), batch_size=2, shuffle=True):
    found.append((x.cuda().sum().item(), torch.randn(1).item(), random.random(), y.tolist()))
""",
    "a data set that the loop changes": """
data = Rows()
for x, y in DataLoader(data, batch_size=1):
    found.append(x.cuda().sum().item()); data.x += 1
""",
    "an iterable data set": """
class Stream(IterableDataset):
    def __iter__(self): return iter(torch.full((513,), float(n)) for n in range(5))
for x in DataLoader(Stream(), batch_size=2): found.append(x.cuda().mean().item())
""",
    "leaving early and beginning again": """
loader = DataLoader(Rows(), batch_size=2, shuffle=True)
for _ in range(2):
    for at, (x, y) in enumerate(loader):
        found.append(x.cuda().sum().item())
        if at == 1: break
""",
    "an error in the loop": """
try:
    for x, y in DataLoader(Rows(), batch_size=2):
        found.append(x.cuda().sum().item())
        if len(found) == 2: raise KeyError("stop")
except KeyError as error: found.append(str(error))
""",
    "a loader within the turn of another": """
net = model(); optimizer = sgd(net)
for x, y in DataLoader(Rows(8), batch_size=2, num_workers=1):
    found.append(train(net, x.cuda(), y.cuda(), optimizer).item())
    with torch.no_grad():
        for a, b in DataLoader(Rows(4), batch_size=2, shuffle=True): found.append(net(a.cuda()).sum().item())
""",
    "a place in the pass that is kept and restored": """
class Resumed(torch.utils.data.Sampler):
    def __init__(self, count): self.count, self.at, self.random = count, 0, torch.Generator().manual_seed(5)
    def __len__(self): return self.count
    def __iter__(self):
        order = torch.randperm(self.count, generator=self.random).tolist()
        while self.at < self.count: self.at += 1; yield order[self.at - 1]
        self.at = 0
    def state_dict(self): return {"at": self.at, "random": self.random.get_state()}
    def load_state_dict(self, state): self.at = state["at"]; self.random.set_state(state["random"])
class Stateful(DataLoader):
    def state_dict(self): return self.sampler.state_dict()
for workers in (0, 1):
    loader, kept = Stateful(Rows(12), batch_size=2, sampler=Resumed(12), num_workers=workers), None
    for epoch in range(2):
        for step, (x, y) in enumerate(loader):
            x = x.cuda(); found.append((x.sum().item(), y.tolist(), loader.state_dict()["at"]))
            if epoch == 0 and step == 2: kept = copy.deepcopy(loader.state_dict())
    loader.sampler.load_state_dict(kept); found.append([y.tolist() for x, y in loader])
""",
    "a sampler that the loop tells what to do": """
class Told(torch.utils.data.Sampler):
    def __init__(self): self.next = 0
    def __len__(self): return 8
    def __iter__(self):
        for _ in range(8): yield self.next
sampler = Told()
for x, y in DataLoader(Rows(30), batch_size=1, sampler=sampler):
    found.append(x.cuda().sum().item()); sampler.next += 2
""",
    "a pinned loader": """
for x, y in DataLoader(Rows(300), batch_size=100, pin_memory=True):
    sent = x.to("cuda", non_blocking=True); found.append((sent.sum().item(), x.is_pinned()))
""",
    "the host's batch is kept, read and changed once it was moved": FED
    + """
kept, sent = [], []
for x, y in fed():
    there = x.to(device)
    kept.append(x); sent.append((there, y))
    x.mul_(2); x.numpy()[:] += 1; there.add_(1)
    found.append((x.sum().item(), there.sum().item(), x.is_pinned(), x.device.type))
found += [one.sum().item() for one in kept] + [(one.sum().item(), y.tolist()) for one, y in sent]
found.append([one.cuda().sum().item() for one in kept])
""",
    "pinned, and changed once it was moved": FED
    + """
sent = []
for x, y in fed(pin_memory=True):
    there = x.to(device)
    x.fill_(-1.0)
    sent.append(there)
found += [one.sum().item() for one in sent]
""",
    "workers that persist, and draw": FED
    + """
class Noisy(Rows):
    def __getitem__(self, at): return self.x[at] + torch.rand(1), at
loader = DataLoader(Noisy(24), batch_size=2, num_workers=1, persistent_workers=True)
for stop in (8, 40):
    for step, (x, y) in enumerate(loader):
        x = x.to(device)
        found.append(y.tolist())
        if step == stop: break
""",
    "streams of its own in the middle": FED
    + """
side = None
for step, (x, y) in enumerate(fed(pin_memory=True)):
    if step == 8: side = torch.cuda.Stream()
    x = x.to(device, non_blocking=True)
    if side is not None:
        with torch.cuda.stream(side): x = x * 2
        torch.cuda.current_stream().wait_stream(side)
    found.append(x.sum().item())
""",
}

NUMBERS = {
    "methods of tensors that the program replaced": """
calls, plain, moved = [], torch.Tensor.item, torch.Tensor.to
def item(self): calls.append("item"); return plain(self)
def to(self, *given, **named): calls.append("to"); return moved(self, *given, **named)
torch.Tensor.item, torch.Tensor.to = item, to
try:
    net, total, kept = nn.Linear(8, 8).cuda(), 0.0, []
    for step in range(14):
        x, y = [one.to("cuda") for one in (torch.full((2, 8), float(step)), torch.ones(2, 8))]
        loss = (net(x) - y).sum()
        total += loss.item(); kept.append(loss.item())
        found.append(len(calls))
    found += [total, *kept, len(calls)]
finally: torch.Tensor.item, torch.Tensor.to = plain, moved
""",
    "summed": """
net = model(); optimizer = sgd(net); total = 0.0; seen = 0
for x, y in DataLoader(Rows(), batch_size=2):
    loss = train(net, x.cuda(), y.cuda(), optimizer)
    total += loss.item() * len(x); seen += len(x)
found += [total, total / seen, type(total).__name__, isinstance(total, float), f"{total:.3f}"]
""",
    "kept in a list": """
def run():
    net = model(); optimizer = sgd(net); losses, steps = [], []
    for x, y in DataLoader(Rows(), batch_size=2):
        losses.append(train(net, x.cuda(), y.cuda(), optimizer).item())
    return losses
losses = run()
found += [losses, [type(one).__name__ for one in losses], sum(losses), max(losses), np.mean(losses)]
""",
    "the tensor changes after it was read": """
def run():
    value, values, total = torch.zeros((), device="cuda"), [], 0
    for step in range(5):
        value += 1; values.append(value.item()); total += value.item()
        value *= 2
    return values, total
found.append(run())
""",
    "decides what happens next": """
def run():
    x = torch.tensor(1.0, device="cuda"); steps = 0
    while True:
        x = x * 1.5; value = x.item(); steps += 1
        if value > 10: break
    return steps, value
found.append(run())
""",
    "decides now and then": """
def run():
    x, best, total = torch.tensor(1.0, device="cuda"), 0.0, 0.0
    for step in range(20):
        x = x * 1.1; value = x.item(); total += x.item()
        if step % 5 == 4:
            if value > best: best = value
            found.append((best, total))
    return best, total, value
found.append(run())
""",
    "whole numbers and truths": """
def run():
    right, flags, last = 0, [], None
    for step in range(4):
        x = torch.arange(6, device="cuda") + step
        right += (x > 3).sum().item(); flags.append((x.sum() > 20).item()); last = (x.sum() * 10 ** 15).item()
    return right, flags, last, type(right).__name__, type(flags[0]).__name__
found.append(run())
""",
    "types of all kinds": """
def run():
    out = []
    for dtype in (torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int16, torch.complex64):
        one = torch.full((1, 1), 3, device="cuda").to(dtype)
        if dtype.is_floating_point: one = one / 7
        out.append(one.item())
    return out
found.append(run())
""",
    "a sum that is a tensor": """
def run():
    total = torch.zeros(2); alias = total
    for step in range(3): total += torch.full((), float(step), device="cuda").item()
    return total.tolist(), alias.tolist()
found.append(run())
""",
    "not a number, and infinite": """
def run():
    values, total = [], 0.0
    for step in range(4):
        x = torch.tensor(0.0, device="cuda") / (step - 1); values.append(x.item()); total += x.item()
    return values, total
found.append(repr(run()))
""",
    "closures and inner functions see it": """
def run():
    total, calls = 0.0, []
    def look(): calls.append(total)
    for step in range(3):
        total += torch.full((), float(step), device="cuda").item(); look()
    return total, calls
found.append(run())
""",
    "a global name that a function reads": """
total = 0.0
def look(): return total
for step in range(3):
    total += torch.full((), 1.0, device="cuda").item(); found.append(look())
""",
    "locals and eval look": """
def run():
    total = 0.0
    for step in range(3): total += torch.full((), 2.0, device="cuda").item()
    return locals()["total"], eval("total + 1")
found.append(run())
""",
    "a list that others hold": """
class Log:
    def __init__(self): self.values = []
log = Log()
def run():
    values = []; log.values = values
    for step in range(3):
        values.append(torch.full((), float(step), device="cuda").item()); found.append(list(log.values))
    return values
found.append(run())
""",
    "a list handed over while the loop runs": """
def show(values): found.append(tuple(values))
def run():
    values = []
    for step in range(3):
        values.append(torch.full((), float(step), device="cuda").item())
        if step == 1: show(values); kept = values
    return values, kept
found.append(run())
""",
    "a list that was there before": """
def run(values):
    for step in range(3): values.append(torch.full((), float(step), device="cuda").item())
mine = [9.0]; run(mine); found.append(mine)
""",
    "other changes of the name": """
def run():
    total = 10.0
    for step in range(4):
        total += torch.full((), float(step), device="cuda").item()
        if step == 2: total *= 2; total -= 1
    total **= 2
    del step
    return total
found.append(run())
""",
    "an error in the middle": """
def run():
    total = 0.0
    try:
        for step in range(5):
            total += torch.full((), 1.0, device="cuda").item()
            if step == 3: raise ValueError("stop")
    except ValueError: found.append(total)
    finally: found.append(total + 1)
    return total
found.append(run())
""",
    "more than one value": """
def run():
    total = 0.0
    for step in range(2): total += torch.ones(2, device="cuda").item()
try: run()
except RuntimeError as error: found.append("more than one")
""",
    "a tuple of values": """
def run():
    history = []
    for step in range(3):
        a = torch.full((), float(step), device="cuda"); history.append((a.item(), (a * 2).item() + 1, step))
    return history
found.append(run())
""",
    "not a tensor of PyTorch": """
def run():
    total, values = 0.0, []
    for step in range(3):
        total += np.float64(step).item(); values.append(np.ones(1).item()); total += torch.ones(()).item()
    return total, values
found.append(run())
""",
    "a generator": """
def run():
    total = 0.0
    for step in range(3):
        total += torch.full((), 1.0, device="cuda").item()
        if step % 2: yield total
    yield total
found.append(list(run()))
""",
    "gradient norms by hand": """
net = model(); optimizer = sgd(net)
for x, y in DataLoader(Rows(), batch_size=2):
    loss = nn.functional.cross_entropy(net(x.cuda()), y.cuda()); optimizer.zero_grad(); loss.backward()
    total = 0.0
    for parameter in net.parameters(): total += parameter.grad.norm().item() ** 2
    scale = min(1.0, 1.0 / (total ** 0.5 + 1e-6))
    for parameter in net.parameters(): parameter.grad.mul_(scale)
    optimizer.step(); found.append((total, loss.item()))
""",
    "a loss per class": """
def run():
    scores, count = [0.0] * 3, 0
    for step in range(6):
        scores[step % 3] += torch.full((), float(step), device="cuda").item(); count += 1
    return scores, count
found.append(run())
""",
}

HOMES = {
    "weights taken home, and changed by the next step": """
def run():
    net = model(); optimizer = sgd(net); kept = None
    for turn, (x, y) in enumerate(DataLoader(Rows(), batch_size=1)):
        train(net, x.cuda(), y.cuda(), optimizer)
        if turn % 2 == 0: kept = {name: one.cpu() for name, one in net.state_dict().items()}
    return {name: (one.device.type, one.sum().item(), one.is_pinned(), one.stride()) for name, one in kept.items()}
found.append(run())
""",
    "outputs kept in a list, and their tensor changed in place": """
def run():
    x, kept = torch.zeros(LARGE, device="cuda"), []
    for step in range(6):
        x += 1; kept.append(x.cpu()); x *= 2
        if step == 3: kept[0][0, 0] = 99.0
    kept[1].zero_()
    return [(one.sum().item(), one.is_pinned(), one.requires_grad) for one in kept]
found.append(run())
""",
    "masks made small at home": """
@torch.inference_mode()
def run():
    x, kept = torch.arange(64 * 513, device="cuda").reshape(LARGE), []
    for step in range(5): x += 1; kept.append(x.cpu().numpy().astype("uint8"))
    return [(one.dtype, int(one.sum()), one.shape, one.flags.writeable) for one in kept]
found.append(run())
""",
    "inference tensors stay what they are": """
def run():
    kept = []
    with torch.inference_mode():
        for step in range(4): kept.append(torch.full(LARGE, float(step), device="cuda").cpu())
    return [(one.is_inference(), one.sum().item()) for one in kept]
found.append(run())
""",
    "a gradient that would flow home": """
def run():
    w, kept = torch.ones(LARGE, device="cuda", requires_grad=True), []
    for step in range(3): kept.append((w * step).cpu())
    sum(one.sum() for one in kept).backward()
    return w.grad.sum().item(), kept[1].requires_grad
found.append(run())
""",
    "what cannot become an array": """
def run():
    kept = []
    for step in range(3): kept.append(torch.ones(LARGE, device="cuda", dtype=torch.bfloat16).cpu().numpy())
    return kept
try: run()
except TypeError as error: found.append("TypeError")
""",
    "strides and views": """
def run():
    x, kept = torch.arange(64 * 513.0, device="cuda").reshape(LARGE), []
    for step in range(4):
        x += 1
        for one in (x.T, x[:, ::2], x[0], x.expand(2, *LARGE), x.to_sparse()): kept.append(one.cpu())
    return [(one.stride() if one.layout is torch.strided else None, one.sum().item()) for one in kept]
found.append(run())
""",
    "lists of numbers": """
def run():
    kept, last = [], None
    for step in range(5):
        x = torch.arange(3, device="cuda") * step; kept.append(x.tolist()); last = x.float().cpu().mean().item()
    return kept, last
found.append(run())
""",
    "numbers in places of a list": """
def run():
    sums, counts, names = [0.0] * 3, [0, 0, 0], ["a"] * 3
    for step in range(9):
        sums[step % 3] += torch.full((), 0.1 * step, device="cuda").item()
        counts[step % 3] += (torch.arange(4, device="cuda") > step % 4).sum().item()
        if step == 5: found.append((list(sums), counts[1], f"{sums[2]:.2f}"))
    return sums, counts, names, max(sums)
found.append(run())
""",
    "a place beyond the list": """
def run():
    sums = [0.0] * 2
    for step in range(3): sums[step] += torch.full((), 1.0, device="cuda").item()
try: run()
except IndexError: found.append("IndexError")
""",
    "a list that is a row of another": """
def run():
    row = [0.0] * 2; table = [row, row]
    for step in range(4):
        row[step % 2] += torch.full((), 1.0, device="cuda").item(); found.append(str(table))
    return table
found.append(run())
""",
    "an error while values are on their way": """
def run():
    kept = []
    try:
        for step in range(5):
            kept.append((torch.ones(LARGE, device="cuda") * step).cpu())
            if step == 3: raise KeyError
    except KeyError: return [one.sum().item() for one in kept]
found.append(run())
""",
    "more than a page of numbers": """
def run():
    x, kept, total = torch.zeros((), device="cuda"), [], 0.0
    for step in range(1500):
        x += 0.1; kept.append((x * 1).item()); total += x.item()
    return kept, total
found.append(run())
""",
    "one value under two names, changed through the other": """
def run():
    kept = []
    for step in range(6):
        x = torch.full((), float(step), device="cuda"); y = x.view(1); kept.append(x.item()); y += 1
        kept.append(y.item()); kept.append((x + 0).item())
    return kept
found.append(run())
""",
}

KNOWN_LATER = {
    "handed on": """
def run():
    net = model(); optimizer = sgd(net); total, losses, history, best, last = 0.0, [], [], 9.0, None
    for epoch in range(3):
        for step, (x, y) in enumerate(DataLoader(Rows(), batch_size=2)):
            value = train(net, x.cuda(), y.cuda(), optimizer).item()
            total += value * len(x); losses.append(value); history.append((epoch, value - 1, -value / len(x), "loss"))
            last = value ** 2
            if step == 1: best = min(best, value)
        found.append((best, total, last))
    return total, losses, history, value, type(value).__name__, losses[-1] is value, value in losses
found.append(run())
""",
    "running means, and numbers made of one another": """
def run():
    x, mean, a, b = torch.zeros((), device="cuda"), 0.0, 0.0, 1
    for step in range(150):
        x += 0.1
        mean = 0.9 * mean + 0.1 * x.item()
        a = b * 0.5 + (x * 3).item(); b = a - mean
        if step % 70 == 69: found.append((mean, a))
    return mean, a, b
found.append(run())
""",
    "an array in it that changes, and a tensor": """
def run():
    x, weight, scale, kept, value = torch.ones((), device="cuda"), np.ones(2), torch.ones(2), [], None
    for step in range(6):
        x += 1; kept.append(x.item() * weight); value = scale * x.item(); weight *= 2; scale.add_(1)
    return [one.tolist() for one in kept], value.tolist()
found.append(run())
""",
    "divided by what may be nothing": """
def run():
    x, total, kept = torch.ones((), device="cuda"), 0.0, []
    for step in range(8):
        x += 1; value = x.item()
        try:
            total += value / (step % 4); kept.append(value / (step % 3 - 1.0)); kept.append(1 / (value - 5))
        except ZeroDivisionError as error: found.append((step, str(error), total, len(kept)))
    return total, kept
found.append(run())
""",
    "compared with itself, and not a number": """
def run():
    kept, other = [], float("nan")
    for step in range(6):
        value = (torch.zeros((), device="cuda") / (step % 2)).item(); kept.append(value); last = value
        if step > 1: found.append((value == value, value in kept, kept.index(value), value is last, kept.count(value)))
    return [one != one for one in kept], last is kept[-1], sorted(map(str, kept))
found.append(run())
""",
    "pickled, hashed, formatted": """
import json, pickle
def run():
    kept, value = [], None
    for step in range(7):
        value = torch.full((), step / 3, device="cuda", dtype=torch.float64).item(); kept.append(value)
        if step % 3 == 2:
            found.append((pickle.dumps(value), hash(value), f"{value:>12.3e}|{value!r}|{value}", "%.2f" % value))
            found.append((json.dumps(kept), pickle.loads(pickle.dumps(kept)), "{:+.1%}".format(value), round(value, 2)))
            found.append((value.hex(), value.is_integer(), copy.deepcopy(kept), isinstance(value, float), bool(value)))
    return kept, {value: 1}[kept[-1]]
found.append(run())
""",
    "an index, a key, one of a set, one of an array": """
def run():
    names, kept, at = "abcdefgh", [], None
    for step in range(8):
        at = (torch.arange(8, device="cuda") < step).sum().item(); kept.append(at)
        if step % 4 == 3:
            found.append((names[at], names[:at], {at, step}, {at: step}, [0] * at, np.arange(9)[at], 1 << at))
            found.append((np.array(kept).dtype, torch.tensor(kept).tolist(), list(range(at)), at | 1, divmod(at, 2)))
    return kept, len(set(kept)), torch.zeros(9)[at].item(), bytes(kept)
found.append(run())
""",
    "in a compiled function": """
def step(x, rows):
    total, kept, value = 0.0, [], None
    for _ in range(3):
        x = x * 2; value = x.mean().item(); total += x.sum().item(); kept.append(value); last = {"x": x.cpu()}
    return total, kept, value, last["x"].tolist(), sum(one.sum() for one in [row.to("cuda") for row in rows])
compiled = torch.compile(step, backend="eager")
for turn in range(3):
    for run in (step, compiled):
        made = run(torch.ones(4, device="cuda") + turn, [torch.ones(3), torch.ones(2)])
        found.append([float(one) if isinstance(one, torch.Tensor) else one for one in made])
moving = torch.compile(lambda rows: [row.to("cuda") for row in rows][0] * 2, backend="eager", fullgraph=True)
found.append(moving([torch.ones(3), torch.ones(2)]).tolist())
""",
    "by other names, and in formats": """
def run():
    x, total, n, width, losses, best = torch.ones((), device="cuda"), 0.0, 1, 8, [], None
    for step in range(9):
        x += 1; value = x.item(); other = value; other += 1; total += value * n; n += 1
        flag = (x > 4).item(); losses.append((value, flag, -value))
        if step % 4 == 3: found.append(f"{value:{width}.2f} {other!r} {total}")
        if step == 7: break
    else: found.append("never")
    return total, other, losses, flag, n
found.append(run())
""",
    "in an inner loop that may return": """
def run():
    out = []
    for epoch in range(3):
        losses, total, count = [], 0, 0
        for step in range(4):
            x = torch.full((), float(step + epoch), device="cuda"); value = x.item(); losses.append(value)
            total += value; count += (x > 2).sum().item()
            try:
                if step == 2 and epoch == 1: return out, total, losses
            finally: out.append(total)
        out.append(sum(losses) / len(losses)); out.append((total, count, np.mean(losses)))
    return out
found.append(run())
""",
    "swapped, and decided by": """
def run():
    x, a, b, log = torch.ones((), device="cuda"), 0.0, 0.0, []
    for step in range(100):
        x = x * 1.01
        a, b = b, a
        b = 0.5 * b + x.item(); a = b - a
        log.append(a)
        if x.item() > 2: break
    return a, b, log
found.append(run())
""",
    "a gradient it needs now and then": """
def run():
    kept = []
    for step in range(6):
        x = torch.ones(1, device="cuda", requires_grad=step == 4)
        try: kept.append(x.cpu().numpy())
        except RuntimeError: found.append(step)
    return [one.tolist() for one in kept]
found.append(run())
""",
}

WAITS = {
    "times of the device": """
def run():
    net = model(); optimizer = sgd(net); times = []
    for x, y in DataLoader(Rows(), batch_size=1):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record(); found.append(train(net, x.cuda(), y.cuda(), optimizer).item()); end.record()
        end.synchronize(); times.append(start.elapsed_time(end))
    return [type(one).__name__ for one in times], all(0 < one < 1e4 for one in times)
found.append(run())
""",
    "events that are used again": """
def run():
    x, times = torch.randn(256, 256, device="cuda"), []
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for step in range(8):
        start.record()
        for _ in range(1 + 8 * (step % 2)): x = (x @ x).clamp(-1, 1)
        end.record(); torch.cuda.synchronize(); times.append(start.elapsed_time(end))
    return [a < b for a, b in zip(times[2::2], times[3::2])]
found.append(run())
""",
    "synchronized for nobody": """
net = model(); optimizer = sgd(net)
for x, y in DataLoader(Rows(), batch_size=1):
    loss = train(net, x.cuda(), y.cuda(), optimizer); torch.cuda.synchronize(); found.append(loss.item())
    torch.cuda.current_stream().synchronize(); torch.cuda.synchronize("cuda"); torch.cuda.synchronize(0)
""",
    "an event that must have passed": """
net = model(); optimizer = sgd(net)
for x, y in DataLoader(Rows(), batch_size=1):
    train(net, x.cuda(), y.cuda(), optimizer); event = torch.cuda.Event(); event.record()
    torch.cuda.synchronize(); found.append(event.query())
""",
    "copied home without waiting, and then waited for": """
net = model(); optimizer = sgd(net); home = torch.zeros(3, 513).pin_memory()
for x, y in DataLoader(Rows(), batch_size=1):
    train(net, x.cuda(), y.cuda(), optimizer); home.copy_(net.weight.detach(), non_blocking=True)
    torch.cuda.synchronize(); found.append(home.sum().item())
""",
    "pinned memory that is filled again after waiting": """
net = model(); optimizer = sgd(net); room, kept = torch.zeros(LARGE).pin_memory(), []
for step in range(6):
    kept.append(room.to("cuda", non_blocking=True)); train(net, kept[-1], torch.zeros(64).long().cuda(), optimizer)
    torch.cuda.synchronize(); room.fill_(step)
found += [one.sum().item() for one in kept]
""",
}

SLOW = """
class Slow(Rows):
    def __init__(self, count=40):
        super().__init__(count); self.wide = torch.rand(count, 300)
    def __getitem__(self, at):
        for _ in range(200): sum(range(1000))
        return self.x[at] * 2, at % 3
def look(loader):
    for x, y in loader: found.append((x.cuda().sum().item(), y.tolist(), torch.rand(1).item(), random.random()))
"""
WORKERS = {
    "samples that take long": SLOW + "look(DataLoader(Slow(), batch_size=1)); look(DataLoader(Slow(), batch_size=2))",
    "the same loader, epoch after epoch": SLOW
    + """
loader = DataLoader(Slow(), batch_size=2, shuffle=True)
for epoch in range(3): look(loader)
""",
    "one worker, shuffled": SLOW
    + """
look(DataLoader(Slow(), batch_size=1, shuffle=True, num_workers=1, pin_memory=True))
""",
    "random numbers in some samples": SLOW
    + """
class Now(Slow):
    def __getitem__(self, at):
        x, y = super().__getitem__(at)
        return (x + torch.rand(1) if at > 25 else x), y
look(DataLoader(Now(), batch_size=1)); look(DataLoader(Now(), batch_size=1, num_workers=2))
""",
    "generators of its own": SLOW
    + """
class Own(Slow):
    def __init__(self): super().__init__(); self.random = np.random.default_rng(0)
    def __getitem__(self, at): x, y = super().__getitem__(at); return x * self.random.random(), y
look(DataLoader(Own(), batch_size=1)); look(DataLoader(Own(), batch_size=1, num_workers=1))
""",
    "counts its samples": SLOW
    + """
class Counting(Slow):
    count = 0
    def __getitem__(self, at): x, y = super().__getitem__(at); self.count += 1; return x * self.count, y
data = Counting(); look(DataLoader(data, batch_size=1)); found.append(data.count)
""",
    "a global count": SLOW
    + """
calls = []
class Global(Slow):
    def __getitem__(self, at): calls.append(at); x, y = super().__getitem__(at); return x * len(calls), y
look(DataLoader(Global(), batch_size=1)); found.append(calls)
""",
    "a slow data set that the loop changes": SLOW
    + """
data = Slow()
for at, (x, y) in enumerate(DataLoader(data, batch_size=1)):
    found.append(x.sum().item())
    if at == 20: data.x.mul_(2)
    if at == 30: data.x = data.x + 1
""",
    "an open file": SLOW
    + """
import tempfile
handle = tempfile.TemporaryFile(); handle.write(bytes(range(200))); handle.seek(0)
class Reading(Slow):
    def __getitem__(self, at): x, y = super().__getitem__(at); return x, handle.read(1)[0]
look(DataLoader(Reading(), batch_size=1)); handle.close()
""",
    "errors in samples": SLOW
    + """
class Bad(Slow):
    def __getitem__(self, at):
        if at == 30: raise ZeroDivisionError("thirty")
        return super().__getitem__(at)
for workers in (0, 1):
    try: look(DataLoader(Bad(), batch_size=1, num_workers=workers))
    except ZeroDivisionError as error: found.append(str(error)[-6:])
""",
    "its worker's number": SLOW
    + """
from torch.utils.data import get_worker_info
class Asking(Slow):
    def __getitem__(self, at):
        info = get_worker_info(); x, y = super().__getitem__(at)
        return x, -1 if info is None else info.id
look(DataLoader(Asking(), batch_size=1)); look(DataLoader(Asking(), batch_size=1, num_workers=2))
""",
    "leaving a slow loader early": SLOW
    + """
loader = DataLoader(Slow(), batch_size=1, shuffle=True, generator=torch.Generator().manual_seed(3))
for stop in (3, 20, 50):
    for at, (x, y) in enumerate(loader):
        found.append((x.sum().item(), torch.rand(1).item()))
        if at == stop: break
""",
    "a slow loader by hand": SLOW
    + """
batches = iter(DataLoader(Slow(), batch_size=2, shuffle=True)); found.append(torch.rand(1).item())
for step in range(20): found.append(next(batches)[0].sum().item())
try: next(batches)
except StopIteration: found.append("over")
found.append(torch.rand(1).item())
""",
    "its seeds drawn by the GPU": SLOW
    + """
data = Slow(); torch.set_default_device("cuda")
try: look(DataLoader(data, batch_size=1, collate_fn=lambda rows: (rows[0][0], rows[0][0][:1])))
finally: torch.set_default_device(None)
""",
    "a collate function that counts": SLOW
    + """
made = []
def collate(samples): made.append(len(samples)); return torch.stack([x for x, _ in samples]), torch.tensor([len(made)])
look(DataLoader(Slow(), batch_size=2, collate_fn=collate)); found.append(made)
""",
    "types of batches": SLOW
    + """
class Mixed(Slow):
    def __getitem__(self, at):
        x, y = super().__getitem__(at); return {"x": x, "name": str(y), "both": (y, 0.5), "n": x.numpy()}
for one in DataLoader(Mixed(), batch_size=2):
    found.append([type(v).__name__ for v in one.values()] + [one["name"], one["both"][1].dtype, one["n"].sum().item()])
""",
}

DRAWS = {
    "the same shapes turn after turn": """
for step in range(14):
    for shape in ((4, 4), (300, 1000), (4, 1), (4, 4)): found.append(torch.randn(shape).to("cuda").sum().item())
    found.append((torch.randint(0, 9, (400, 1000)).sum().item(), torch.randperm(40000)[:3].tolist()))
""",
    "another draw in between": """
drop = nn.Dropout(0.5)
for step in range(16):
    x = torch.randn(600, 1000)
    if step % 5 == 4: found.append(drop(torch.ones(9)).tolist())
    found.append((x.cuda().sum().item(), torch.rand(3).tolist()))
""",
    "seeds set again in the loop": """
for step in range(16):
    if step % 6 == 5: torch.manual_seed(step)
    found.append(torch.randn(600, 1000).cuda().sum().item())
""",
    "a state that is kept and restored": """
for step in range(16):
    if step == 9: kept = torch.get_rng_state()
    found.append(torch.randn(600, 1000).cuda().sum().item())
    if step == 12: torch.set_rng_state(kept)
""",
    "generators of the program's own": """
mine = torch.Generator().manual_seed(7)
for step in range(10):
    found.append((torch.randn(600, 1000, generator=mine).sum().item(), torch.randn(600, 1000).sum().item()))
""",
    "types, gradients, devices": """
for step in range(10):
    x = torch.rand([600, 1000], dtype=torch.float64, requires_grad=True); y = torch.randn(600, 1000, device="cpu")
    with torch.inference_mode(): z = torch.randn(600, 1000)
    out = torch.empty(600, 1000); torch.randn(600, 1000, out=out)
    torch.set_default_dtype(torch.float64 if step % 4 == 3 else torch.float32); w = torch.randn(600, 1000)
    torch.set_default_dtype(torch.float32)
    found.append((x.requires_grad, x.is_leaf, x.dtype, y.sum().item(), z.is_inference(), w.dtype, w.sum().item()))
    found.append((out.sum().item(), x.sum().item(), torch.normal(0.0, 1.0, (600, 500)).sum().item(), x.is_pinned()))
""",
    "a device where new tensors go by themselves": """
def draws():
    made = torch.rand(600, 1000), torch.randn(600, 1000), torch.randint(0, 9, (600, 1000)), torch.randperm(400000)
    made += torch.normal(0.0, 1.0, (600, 1000)), torch.bernoulli(made[0]), torch.rand_like(made[0])
    made += torch.randn_like(made[1]), torch.empty(600, 1000).uniform_()
    found.append([(one.device.type, one.double().sum().item()) for one in made])
torch.cuda.manual_seed(0)
for step in range(18):
    torch.set_default_device("cuda" if 9 < step < 14 else None)
    draws()
    with torch.device("cuda"): draws()
try: torch.set_default_tensor_type("torch.cuda.FloatTensor")
except TypeError: torch.set_default_device("cuda")  # where no build has such tensors
for step in range(6): draws()
with torch.device("cpu"): draws()
torch.set_default_device(None); torch.set_default_tensor_type("torch.FloatTensor")
for step in range(6): draws()
""",
    "draws that nobody asks for in the end": """
for step in range(9): found.append(torch.randn(600, 1000).sum().item())
found += [random.random(), torch.rand(5).tolist(), torch.get_rng_state().sum().item()]
""",
    "workers of a loader that draw": """
class Noisy(Rows):
    def __getitem__(self, at): return self.x[at] + torch.randn(513), at
for step in range(8): torch.randn(600, 1000)
for x, y in DataLoader(Noisy(), batch_size=2, num_workers=2):
    found.append((x.sum().item(), torch.randn(600, 1000).sum().item()))
""",
    "numbers changed in place": """
for step in range(12):
    x = torch.randn(600, 1000); x.mul_(2); sent = x.cuda(); x.zero_(); found.append(sent.sum().item())
""",
    "shapes that change": """
for step in range(24): found.append(torch.randn(600 + 100 * (step * step % 7), 1000).sum().item())
""",
}

LIVES = {
    "a schedule": """
net = model(); optimizer = sgd(net, momentum=0.9); schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
for epoch in range(3):
    total = 0.0
    for x, y in DataLoader(Rows(), batch_size=2): total += train(net, x.cuda(), y.cuda(), optimizer).item()
    schedule.step(); found.append((total, schedule.get_last_lr()))
""",
    "a schedule by the loss": """
net = model(); optimizer = sgd(net); schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
for epoch in range(4):
    total = 0.0
    for x, y in DataLoader(Rows(), batch_size=2): total += train(net, x.cuda(), y.cuda(), optimizer).item()
    schedule.step(total); found.append((total, optimizer.param_groups[0]["lr"]))
""",
    "a checkpoint restored in the middle": """
net = model(); optimizer = torch.optim.Adam(net.parameters()); kept = None
for turn, (x, y) in enumerate(itertools.islice(itertools.cycle(DataLoader(Rows(), batch_size=2)), 9)):
    found.append(train(net, x.cuda(), y.cuda(), optimizer).item())
    if turn == 3: kept = copy.deepcopy((net.state_dict(), optimizer.state_dict()))
    if turn == 6: net.load_state_dict(kept[0]); optimizer.load_state_dict(kept[1])
""",
    "a closure for the optimizer": """
net = model(); optimizer = torch.optim.LBFGS(net.parameters(), max_iter=3)
for x, y in DataLoader(Rows(), batch_size=3):
    x, y = x.cuda(), y.cuda()
    def closure():
        optimizer.zero_grad(); loss = nn.functional.cross_entropy(net(x), y); loss.backward(); return loss
    found.append(optimizer.step(closure).item())
""",
    "hooks": """
net = model(); optimizer = sgd(net); norms = []
net.register_forward_hook(lambda module, given, made: norms.append(made.sum().item()))
net.weight.register_hook(lambda gradient: gradient * 0.5)
for x, y in DataLoader(Rows(), batch_size=2): found.append(train(net, x.cuda(), y.cuda(), optimizer).item())
found.append(norms)
""",
    "memory given back in the loop": """
net = model(); optimizer = sgd(net)
for x, y in DataLoader(Rows(), batch_size=2):
    found.append(train(net, x.cuda(), y.cuda(), optimizer).item()); torch.cuda.empty_cache(); gc.collect()
""",
    "garbage is collected at the call": """
net = model(); optimizer = sgd(net)
class Node: pass
for x, y in DataLoader(Rows(), batch_size=2):
    train(net, x.cuda(), y.cuda(), optimizer)
    a, b = Node(), Node(); a.other, b.other = b, a; seen = weakref.ref(a); del a, b
    gc.collect(); found.append(seen() is None)
""",
    "two optimizers": """
one, two = model(), model(3); a, b = sgd(one), torch.optim.Adam(two.parameters())
for x, y in DataLoader(Rows(), batch_size=2):
    hidden = one(x.cuda()); loss = nn.functional.cross_entropy(two(hidden), y.cuda())
    a.zero_grad(); b.zero_grad(); loss.backward(); a.step(); b.step(); found.append(loss.item())
""",
    "accumulated gradients": """
net = model(); optimizer = sgd(net); total = 0.0
for turn, (x, y) in enumerate(DataLoader(Rows(), batch_size=1)):
    loss = nn.functional.cross_entropy(net(x.cuda()), y.cuda()) / 2; loss.backward(); total += loss.item()
    if turn % 2: optimizer.step(); optimizer.zero_grad(); found.append(total); total = 0.0
""",
    "a captured graph": """
x, y = torch.zeros(513, device="cuda"), torch.zeros(513, device="cuda")
side = torch.cuda.Stream()
with torch.cuda.stream(side): y.copy_(x * 2)
torch.cuda.current_stream().wait_stream(side)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph): y.copy_(x * 2)
for step in range(3):
    x.copy_(torch.full((513,), float(step))); graph.replay(); found.append(y.sum().item())
""",
    "a model that only infers": """
net, total = model().eval(), 0.0
with torch.no_grad():
    for x, y in itertools.islice(itertools.cycle(DataLoader(Rows(), batch_size=2)), 80):
        total += net(x.to("cuda")).sum().item()
found.append(total)
""",
    "validated before it is trained": """
net, total = model(), 0.0
with torch.no_grad():
    for x, y in itertools.islice(itertools.cycle(DataLoader(Rows(), batch_size=2)), 60):
        total += net(x.to("cuda")).sum().item()
optimizer = sgd(net); found.append(total)
for x, y in itertools.islice(itertools.cycle(DataLoader(Rows(), batch_size=2)), 8):
    found.append(train(net, x.to("cuda"), y.cuda(), optimizer).item())
""",
    "ending in the middle of a trial": """
def run(stop, how):
    net = model(); optimizer = sgd(net); total = 0.0
    for step, (x, y) in enumerate(itertools.cycle(DataLoader(Rows(), batch_size=2))):
        loss = train(net, x.to("cuda"), y.cuda(), optimizer); total += loss.item(); torch.cuda.empty_cache()
        if step == stop:
            found.append(total)
            if how is None: return total
            raise how("now")
for stop, how in ((8, None), (11, KeyboardInterrupt), (14, SystemExit), (3, ValueError)):
    try: run(stop, how)
    except BaseException as error: found.append(type(error).__name__)
""",
    "a thread that trains beside another": """
import threading
def run(results, start, net, optimizer):
    total = 0.0
    for x, y in itertools.islice(itertools.cycle(DataLoader(Rows(), batch_size=2)), 30):
        loss = train(net, (x + start).to("cuda"), y.cuda(), optimizer); total += loss.item()
    results[start] = (total, [one.sum().item() for one in net.parameters()])
results = {}
torch.set_num_threads(1)
nets = [model(), model()]
threads = [threading.Thread(target=run, args=(results, at, one, sgd(one))) for at, one in enumerate(nets)]
for one in threads: one.start()
for one in threads: one.join()
found += [sorted(results.items())]
""",
    "many turns, with a trial in between": """
net = model(); optimizer = sgd(net); total, losses = 0.0, []
for x, y in itertools.islice(itertools.cycle(DataLoader(Rows(), batch_size=2)), 60):
    loss = train(net, x.to("cuda"), y.cuda(), optimizer); total += loss.item(); losses.append(loss.item())
    torch.cuda.empty_cache()
    if len(losses) % 20 == 0: found.append(total)
found += [total, losses]
""",
}

FOREACH = {
    "averages and steps by hand": """
net, other = (nn.Sequential(*(nn.Linear(7, 7) for _ in range(4))).cuda() for _ in range(2))
weights, momenta = list(net.parameters()), [torch.zeros_like(one) for one in net.parameters()]
second = [torch.zeros_like(one) for one in weights]
class Average:
    def __init__(self, net):
        self.decay, self.shadow = 0.9, {name: one.detach().clone() for name, one in net.named_parameters()}
    def update(self, net):
        for name, one in net.named_parameters():
            if one.requires_grad:
                self.shadow[name].mul_(self.decay).add_(one.data, alpha=1 - self.decay)
average, rate = Average(net), 0.01
weights[2].requires_grad_(False)
for step in range(7):
    loss = net(torch.ones(2, 7, device="cuda") * step).square().mean(); loss.backward()
    scale = 1.0 / (1.0 + loss.detach())
    with torch.no_grad():
        for p in net.parameters():
            if p.grad is None: continue
            p.grad.mul_(scale)
            p.grad.clamp_(-0.5, 0.5)
        for p, momentum, v in zip(weights, momenta, second, strict=True):
            if p.grad is not None:
                grad = p.grad.add(p, alpha=1e-4)
                momentum.mul_(0.9).add_(grad)
                v.mul_(0.99).addcmul_(grad, grad, value=0.01)
                p -= rate * momentum / (v.sqrt() + 1e-8)
    average.update(net)
    for p, q in zip(net.parameters(), other.parameters()):
        q.data.copy_(0.1 * p.data + 0.9 * q.data)
    for p in net.parameters():
        p.grad = None
    found += [one.sum().item() for one in (*weights, *momenta, *average.shadow.values(), *other.parameters())]
    if step > 1: found.append(grad.sum().item())
""",
    "state by names, of several types": """
net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)).cuda()
mean = copy.deepcopy(net); mean[2].half()
kinds = {k: v.dtype for k, v in mean.state_dict().items()}
for step in range(6):
    net(torch.ones(2, 3, 5, 5, device="cuda") * step)
    state = {k: v.to(kinds[k]) for k, v in net.state_dict().items()}
    with torch.no_grad():
        for i, (k, v) in enumerate(mean.state_dict().items()):
            if v.dtype.is_floating_point:
                v.lerp_(state[k], 0.25)
        for k, v in mean.state_dict().items():
            if v.is_floating_point(): v *= 0.75; v += state[k] * 0.25
            else: v.copy_(state[k])
    found += [(k, v.dtype, v.double().sum().item()) for k, v in mean.state_dict().items()]
    found.append((i, k, v.item()))
""",
    "tensors that share memory, in loops": """
flat = torch.arange(40.0, device="cuda"); same = torch.ones(5, device="cuda")
rows = {"views": list(flat.view(8, 5)), "overlapping": [flat[at : at + 5] for at in range(8)], "same": [same] * 8,
        "expanded": [torch.ones(1, device="cuda").expand(5) for _ in range(3)],
        "strided": [flat[at::8] for at in range(8)]}
for step in range(6):
    for name, held in rows.items():
        try:
            for one, two in zip(held, held[1:] + held[:1]):
                one.mul_(0.5).add_(two, alpha=0.25)
        except RuntimeError as error: found.append(str(error)[:30])
        for one in rows["views"]:
            one.add_(1.0)
        found.append([one.tolist() for one in held])
""",
    "changed and read in one loop": """
ones = [torch.full((4,), float(at), device="cuda") for at in range(6)]
seen, total = [], torch.zeros(4, device="cuda")
class Rates:
    calls = 0
    @property
    def rate(self): Rates.calls += 1; return 1.0 / Rates.calls
rates = Rates()
for step in range(5):
    for one in ones:
        one.mul_(2); seen.append(one.sum().item())
    for one in ones:
        one.sub_(1); total.add_(one)
    before = ones[0]
    for one in ones:
        one.add_(before); before = one
    for one in ones:
        one.mul_(rates.rate)
    for at, one in enumerate(ones):
        one.add_(at)
    for one in ones:
        one.add_(total)
    for one in ones[1:]:
        one.mul_(ones[0][1])
    for one in reversed(ones):
        one.div_(3)
    found += [one.tolist() for one in ones] + [total.tolist(), Rates.calls]
found += seen
""",
    "names that are looked at after a loop": """
def run(ones):
    for one in ones: one.mul_(2).add_(1)
    return sorted(locals())
def later(ones):
    for one, two in zip(ones, ones[1:]):
        if two is not None: three = two.neg(); one.copy_(three)
    return one.tolist(), two.tolist(), three.tolist()
ones = [torch.full((4,), float(at), device="cuda") for at in range(6)]
for step in range(6):
    for one in ones: one.mul_(0.5)
    found += [run(ones), one.tolist(), later(ones)]
found += [name for name in globals() if "keepbusy" in name]
""",
    "errors in the middle of a loop": """
ones = [torch.ones(4, device="cuda") for _ in range(6)]
others = [torch.ones(4 if at != 3 else 5, device="cuda") for at in range(6)]
for step in range(12):
    try:
        for one, other in zip(ones, others):
            one.add_(other).mul_(2)
    except RuntimeError as error: found.append(str(error)[:40])
    try:
        for one, other in zip(ones, others[:4] , strict=True):
            one.add_(1)
    except ValueError as error: found.append(str(error))
    try:
        for one in [*ones[:3], None, *ones[3:]]:
            one.add_(1)
    except AttributeError as error: found.append(str(error))
    try:
        for one in ones: one.add_(unknown)
    except NameError as error: found.append(str(error))
    for one in []: one.add_(unknown)
    found.append([one.sum().item() for one in ones])
""",
    "loops over what autograd, hooks and subclasses see": """
class Mine(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        found.append(getattr(function, "__name__", ""))
        return super().__torch_function__(function, types, args, kwargs or {})
net = nn.Sequential(*(nn.Linear(3, 3) for _ in range(3))).cuda()
for one in net.parameters(): one.register_hook(lambda grad: found.append("hook") or grad * 2)
mine = [torch.ones(2, device="cuda").as_subclass(Mine) for _ in range(3)]
leaves = [torch.ones(2, device="cuda", requires_grad=True) for _ in range(3)]
for step in range(6):
    net(torch.ones(2, 3, device="cuda")).sum().backward()
    for p in net.parameters(): p.grad.mul_(0.5)
    for p in net.parameters(): p.data.add_(p.grad, alpha=-0.1)
    made = [one * 2 for one in leaves]
    for one in made: one.mul_(3).add_(1)
    sum(one.sum() for one in made).backward()
    found.append([one.grad.tolist() for one in leaves])
    for one in leaves: one.grad.zero_()
    for one in mine: one.add_(1)
    try:
        for one in leaves: one.add_(1)
    except RuntimeError as error: found.append(str(error)[:30])
    with torch.autocast("cuda", dtype=torch.bfloat16):
        for p in net.parameters(): p.data.mul_(0.99)
    with torch.inference_mode(): held = [torch.ones(2, device="cuda") for _ in range(3)]
    try:
        for one in held: one.add_(1)
    except RuntimeError as error: found.append(str(error)[:30])
    found += [one.sum().item() for one in net.parameters()]
""",
    "loops on other streams, in threads, and in functions of functions": """
import threading
from torch.utils._python_dispatch import TorchDispatchMode
class Counting(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found.append(str(function)); return function(*args, **(kwargs or {}))
def halve(held, by=0.5):
    def inner():
        for one in held:
            if by: one.mul_(by)
            one += 1
        return one
    return inner()
rows = [[torch.ones(3, device="cuda") for _ in range(5)] for _ in range(3)]
side = torch.cuda.Stream()
for step in range(6):
    halve(rows[0])
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side): last = halve(rows[0], 0.25)
    torch.cuda.current_stream().wait_stream(side)
    threads = [threading.Thread(target=halve, args=(row,)) for row in rows]
    for one in threads: one.start()
    for one in threads: one.join()
    with Counting():
        for one in rows[1]: one.mul_(1.5)
    for row in rows:
        for one, at in zip(row, itertools.count()): one.add_(at)
    for one in (x.mul_(1.25) for x in rows[2]): one.sub_(0.5)
    for row in rows:
        for name in ("zero_", "neg_"): pass
        else: row[0].neg_()
    plain = torch.Tensor.mul_
    if step == 4: torch.Tensor.mul_ = lambda one, by: plain(one, by).add_(7)
    halve(rows[1])
    torch.Tensor.mul_ = plain
    found.append([one.tolist() for row in rows for one in row] + [last.tolist(), at])
""",
}


DEEP = """
from torch.nn import functional as F
def deep(dropout=0.0):
    torch.manual_seed(2)
    layers = [layer for _ in range(6) for layer in (nn.Linear(33, 33), nn.ReLU(), nn.Dropout(dropout))]
    net = nn.Sequential(*layers, nn.Linear(33, 5)).cuda()
    return net, sgd(net)
def batches(count=24):
    random = torch.Generator().manual_seed(5)
    for _ in range(count):
        yield torch.randn(8, 33, generator=random).cuda(), torch.randint(0, 5, (8,), generator=random).cuda()
def weights(net): return [one.detach() for one in net.parameters()]
"""
GRAPHS = {
    "twenty-four plain turns": DEEP
    + """
net, optimizer = deep()
for x, y in batches():
    optimizer.zero_grad()
    loss = F.cross_entropy(net(x), y)
    loss.backward()
    optimizer.step()
    found.append(loss.item())
found += weights(net)
""",
    "in a function that is called again": DEEP
    + """
def epoch(net, optimizer, scale):
    total = 0.0
    for x, y in batches(9):
        optimizer.zero_grad()
        out = net(x)
        loss = scale * F.cross_entropy(out, y)
        loss.backward()
        optimizer.step()
        total += loss.item() + (out.argmax(1) == y).sum().item()
    return total
net, optimizer = deep()
for scale in (1.0, 1.0, 0.5): found.append(epoch(net, optimizer, scale))
found += weights(net)
""",
    "a step of its own, in a class": DEEP
    + """
class Trainer:
    def __init__(self): self.net, self.optimizer = deep(); self.scale = 1.0
    def step(self, x, y):
        self.optimizer.zero_grad()
        loss = self.scale * F.cross_entropy(self.net(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(self.net.parameters(), 0.5)
        self.optimizer.step()
        return loss.item()
trainer = Trainer()
for turn, (x, y) in enumerate(batches()):
    if turn == 16: trainer.scale = 2.0
    found.append(trainer.step(x, y))
found += weights(trainer.net)
""",
    "a number of a configuration that changes": DEEP
    + """
class Settings: weight = 1.0
class Net(nn.Module):
    def __init__(self, settings): super().__init__(); self.inner, self.settings = deep()[0], settings
    def forward(self, x): return self.inner(x) * self.settings.weight
settings = Settings(); net = Net(settings); optimizer = sgd(net)
for turn, (x, y) in enumerate(batches()):
    if turn == 15: settings.weight = 0.25
    optimizer.zero_grad()
    loss = F.cross_entropy(net(x), y)
    loss.backward()
    optimizer.step()
    found.append(loss.item())
found += weights(net)
""",
    "a number of a class, and a function that is replaced": DEEP
    + """
class Settings: weight = 1.0
class Net(nn.Module):
    def __init__(self): super().__init__(); self.inner, self.last = deep()[0], torch.tanh
    def forward(self, x): return self.last(self.inner(x)) * Settings.weight
net = Net(); optimizer = sgd(net)
for turn, (x, y) in enumerate(batches(48)):
    if turn == 14: Settings.weight = 0.25
    if turn == 28: net.last = torch.relu
    optimizer.zero_grad()
    loss = F.cross_entropy(net(x), y)
    loss.backward()
    optimizer.step()
    found.append(loss.item())
found += weights(net)
""",
    "a number in a dictionary, of a list and behind another name": DEEP
    + """
limits = {"low": [0.0, -1.0]}
class Net(nn.Module):
    def __init__(self): super().__init__(); self.inner = deep()[0]; self.held = limits
    def forward(self, x):
        held = self.held
        return self.inner(x).clamp(min=held["low"][1])
net = Net(); optimizer = sgd(net)
for turn, (x, y) in enumerate(batches()):
    if turn == 15: limits["low"][1] = 0.0
    optimizer.zero_grad()
    loss = F.cross_entropy(net(x), y)
    loss.backward()
    optimizer.step()
    found.append(loss.item())
found += weights(net)
""",
    "dropout that is turned up, and evaluation in between": DEEP
    + """
net, optimizer = deep(dropout=0.1)
for turn, (x, y) in enumerate(batches()):
    net.train()
    if turn == 14: net[2].p = 0.5
    optimizer.zero_grad()
    loss = F.cross_entropy(net(x), y)
    loss.backward()
    optimizer.step()
    found.append(loss.item())
    if turn % 5 == 0:
        net.eval()
        with torch.no_grad(): found.append(net(x).sum())
found += [*weights(net), torch.rand(2, device="cuda")]
""",
    "a hook that comes later": DEEP
    + """
net, optimizer = deep(); seen = []
for turn, (x, y) in enumerate(batches()):
    if turn == 15: net[0].register_forward_hook(lambda module, given, out: seen.append(len(given[0])) or out * 2)
    optimizer.zero_grad()
    loss = F.cross_entropy(net(x), y)
    loss.backward()
    optimizer.step()
    found.append(loss.item())
found += [*weights(net), seen]
""",
    "hooks on gradients": DEEP
    + """
net, optimizer = deep(); seen = []
for turn, (x, y) in enumerate(batches()):
    if turn == 15: net[0].weight.register_hook(lambda one: seen.append(turn) or 2 * one)
    optimizer.zero_grad()
    loss = F.cross_entropy(net(x), y)
    loss.backward()
    optimizer.step()
    found.append(loss.item())
found += [*weights(net), seen]
""",
    "prints, counts and lists in a forward pass": DEEP
    + """
seen, counts = [], {"calls": 0}
class Net(nn.Module):
    def __init__(self): super().__init__(); self.inner = deep()[0]
    def forward(self, x):
        seen.append(tuple(x.shape)); counts["calls"] += 1
        return self.inner(x)
net = Net(); optimizer = sgd(net)
for x, y in batches():
    optimizer.zero_grad()
    loss = F.cross_entropy(net(x), y)
    loss.backward()
    optimizer.step()
    found.append(loss.item())
found += [*weights(net), len(seen), counts]
""",
    "an attribute written in a forward pass": DEEP
    + """
class Net(nn.Module):
    def __init__(self): super().__init__(); self.inner = deep()[0]; self.last, self.calls = None, 0
    def forward(self, x):
        self.calls += 1; self.last = self.inner(x)
        return self.last / self.calls
net = Net(); optimizer = sgd(net)
for x, y in batches():
    optimizer.zero_grad()
    loss = F.cross_entropy(net(x), y)
    loss.backward()
    optimizer.step()
    found.append(net.last.sum())
found += [*weights(net), net.calls]
""",
    "random numbers of Python, of NumPy and of generators": DEEP
    + """
class Net(nn.Module):
    def __init__(self, kind):
        super().__init__(); self.inner, self.kind, self.own = deep()[0], kind, np.random.default_rng(0)
    def forward(self, x):
        if self.kind == "python" and random.random() < 0.5: x = x * 2
        if self.kind == "numpy": x = x * float(np.random.rand())
        if self.kind == "own": x = x * float(self.own.random())
        return self.inner(x)
for kind in ("python", "numpy", "own"):
    net = Net(kind); optimizer = sgd(net)
    for x, y in batches(14):
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        found.append(loss.item())
""",
    "what comes next of an iterator": DEEP
    + """
class Net(nn.Module):
    def __init__(self): super().__init__(); self.inner, self.scales = deep()[0], iter(range(1, 1000))
    def forward(self, x):
        for scale in self.scales: return self.inner(x) / scale
net = Net(); optimizer = sgd(net)
for x, y in batches():
    optimizer.zero_grad()
    loss = F.cross_entropy(net(x), y)
    loss.backward()
    optimizer.step()
    found.append(loss.item())
""",
    "a result that shows how it was made": DEEP
    + """
net, optimizer = deep()
for x, y in batches():
    optimizer.zero_grad()
    loss = F.cross_entropy(net(x), y)
    loss.backward()
    optimizer.step()
found.append(loss)
""",
    "gradients that are kept over turns": DEEP
    + """
net, optimizer = deep(); before = None
for x, y in batches():
    optimizer.zero_grad()
    loss = F.cross_entropy(net(x), y)
    loss.backward()
    now = [one.grad for one in net.parameters()]
    if before is not None: found.append(sum((a * b).sum() for a, b in zip(now, before)))
    before = now
    optimizer.step()
""",
    "gradients that add up over micro-batches, of many shapes": DEEP
    + """
net, optimizer = deep()
for turn, (x, y) in enumerate(batches(32)):
    cut = 5 + turn % 3
    x, y = x[:cut], y[:cut]
    loss = F.cross_entropy(net(x), y) / 4
    loss.backward()
    if turn % 4 == 3:
        optimizer.step()
        optimizer.zero_grad(set_to_none=turn % 8 == 3)
    found.append(loss.item())
found += weights(net)
""",
    "results that are kept, and changed": DEEP
    + """
net, optimizer = deep(); kept = []
for x, y in batches():
    optimizer.zero_grad()
    out = net(x)
    loss = F.cross_entropy(out, y)
    loss.backward()
    optimizer.step()
    kept.append((out.detach(), loss.detach()))
for out, loss in kept: out.data.mul_(2); found.append((out.sum(), loss))
""",
    "a step whose result its callers look at, in a function within another": DEEP
    + """
def main():
    net, optimizer = deep()
    def step(x, y):
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        return loss
    total = 0.0
    for x, y in batches():
        loss = step(x, y)
        total += loss.item()
    return total, weights(net)
for _ in range(2): found.append(main())
""",
    "a step whose result somebody keeps": DEEP
    + """
def main(kept):
    net, optimizer = deep()
    def step(x, y):
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        return loss
    for x, y in batches(): kept.append(step(x, y))
main(found)
""",
    "two networks that train each other": DEEP
    + """
real, fake = deep(), deep()
for x, y in batches():
    real[1].zero_grad()
    loss = F.cross_entropy(real[0](x), y)
    loss.backward()
    drawn = torch.randn(8, 33, device="cuda")
    made = fake[0](drawn)
    other = real[0](torch.cat([made] * 7, 1)[:, :33].detach()).square().mean()
    other.backward()
    real[1].step()
    fake[1].zero_grad()
    last = real[0](torch.cat([made] * 7, 1)[:, :33]).mean()
    last.backward()
    fake[1].step()
    found.append((loss.item(), other.item(), last.item()))
found += [*weights(real[0]), *weights(fake[0])]
""",
    "a second way back through what came out": DEEP
    + """
net, optimizer = deep()
def pull(out): (out * 0.1).sum().backward()
for x, y in batches():
    optimizer.zero_grad()
    out, aside = net(x), net(-x)
    loss = F.cross_entropy(out, y)
    loss.backward()
    pull(aside)
    optimizer.step()
    found.append(loss.item())
found += weights(net)
""",
    "weights that are replaced, frozen and loaded": DEEP
    + """
net, optimizer = deep(); saved = copy.deepcopy(net.state_dict())
for turn, (x, y) in enumerate(batches(48)):
    if turn == 14: net.load_state_dict(saved)
    if turn == 20: net[0].weight.data = net[0].weight.data.clone() * 2
    if turn == 26: net[0].weight.requires_grad_(False)
    if turn == 32: net[-1] = nn.Linear(33, 5).cuda(); optimizer = sgd(net)
    optimizer.zero_grad()
    loss = F.cross_entropy(net(x), y)
    loss.backward()
    optimizer.step()
    found.append(loss.item())
found += weights(net)
""",
    "an optimizer restored in the middle, and a schedule": DEEP
    + """
net, optimizer = deep(); optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)
for turn, (x, y) in enumerate(batches(30)):
    if turn == 12: saved = copy.deepcopy((net.state_dict(), optimizer.state_dict()))
    if turn == 20: net.load_state_dict(saved[0]); optimizer.load_state_dict(saved[1])
    optimizer.zero_grad()
    loss = F.cross_entropy(net(x), y)
    loss.backward()
    optimizer.step(); schedule.step()
    found.append((loss.item(), optimizer.param_groups[0]["lr"]))
found += weights(net)
""",
    "batch statistics": DEEP
    + """
net = nn.Sequential(deep()[0], nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 5)).cuda(); optimizer = sgd(net)
for x, y in batches():
    optimizer.zero_grad()
    loss = F.cross_entropy(net(x), y)
    loss.backward()
    optimizer.step()
    found.append(loss.item())
found += [*weights(net), *net.buffers()]
""",
    "a state that goes from turn to turn": DEEP
    + """
cell, (head, optimizer) = nn.GRUCell(33, 33).cuda(), deep()
optimizer = torch.optim.SGD([*cell.parameters(), *head.parameters()], lr=0.1)
hidden = torch.zeros(8, 33, device="cuda")
for x, y in batches():
    hidden = hidden.detach()
    optimizer.zero_grad()
    hidden = cell(x, hidden)
    loss = F.cross_entropy(head(hidden), y)
    loss.backward()
    optimizer.step()
    found.append(loss.item())
found += [hidden.detach(), *weights(head)]
""",
    "mixed precision and a scaler": DEEP
    + """
net, optimizer = deep(); scaler = torch.amp.GradScaler("cuda", init_scale=2.0**40, growth_interval=7)
for x, y in batches(40):
    optimizer.zero_grad()
    with torch.autocast("cuda", torch.float16):
        loss = F.cross_entropy(net(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer); scaler.update()
    found.append((loss.item(), scaler.get_scale()))
found += weights(net)
""",
    "two threads that train": DEEP
    + """
import threading
both = threading.Barrier(2)  # neither trains alone
def run(results, at, net, optimizer):
    total = 0.0
    for x, y in batches():
        both.wait()
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        total += loss.item()
    results[at] = total, weights(net)
torch.set_num_threads(1)
results, pairs = {}, [deep(), deep()]
threads = [threading.Thread(target=run, args=(results, at, *one)) for at, one in enumerate(pairs)]
for one in threads: one.start()
for one in threads: one.join()
found += sorted(results)
found += [results[0], results[1]]
""",
    "the way back alone": DEEP
    + """
net, optimizer = deep()
for x, y in batches():
    loss = F.cross_entropy(net(x), y)
    found.append(loss.item())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
    "weights stepped by hand": DEEP
    + """
net, _ = deep()
for x, y in batches():
    loss = F.cross_entropy(net(x), y)
    loss.backward()
    for one in net.parameters(): one.data.add_(one.grad, alpha=-0.1)
    net.zero_grad()
    found.append(loss.item())
found += weights(net)
""",
    "plain tensors as weights": DEEP
    + """
w = [torch.full((33, 33), 0.01, device="cuda", requires_grad=True) for _ in range(6)]
for x, y in batches():
    h = x
    out = torch.relu(torch.relu(h @ w[0]) @ w[1]) @ w[2]
    loss = (out - 1).square().mean()
    loss.backward()
    with torch.no_grad():
        for one in w[:3]: one -= 0.1 * one.grad; one.grad = None
    found.append(loss.item())
found += w
""",
    "plain tensors whose gradients add up": DEEP
    + """
w = torch.full((33, 33), 0.01, device="cuda", requires_grad=True)
for turn, (x, y) in enumerate(batches()):
    out = torch.relu(x @ w)
    loss = (out - 1).square().mean()
    loss.backward()
    found.append(loss.item())
    if turn % 6 == 5: torch.optim.SGD([w], lr=0.1).step()
found.append(w)
""",
    "a backward pass of its own": DEEP
    + """
calls = []
class Twice(torch.autograd.Function):
    @staticmethod
    def forward(context, x): return 2 * x
    @staticmethod
    def backward(context, given): calls.append(1); return 2 * given
net, optimizer = deep()
for x, y in batches():
    optimizer.zero_grad()
    loss = F.cross_entropy(Twice.apply(net(x)), y)
    loss.backward()
    optimizer.step()
    found.append(loss.item())
found += [*weights(net), len(calls)]
""",
    "errors in a forward pass": DEEP
    + """
class Net(nn.Module):
    def __init__(self): super().__init__(); self.inner, self.broken = deep()[0], False
    def forward(self, x):
        if self.broken: raise KeyError("broken")
        return self.inner(x)
net = Net(); optimizer = sgd(net)
for turn, (x, y) in enumerate(batches()):
    net.broken = turn in (1, 4, 7, 15)
    try:
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
    except KeyError as error: found.append(repr(error))
    found.append(loss.item())
found += weights(net)
""",
    "an error while it is watched": DEEP
    + """
class Settings: weight = 1.0
class Net(nn.Module):
    def __init__(self): super().__init__(); self.inner, self.settings, self.broken = deep()[0], Settings(), False
    def forward(self, x):
        if self.broken: raise KeyError("broken")
        return self.inner(x) * self.weight()
    def weight(self): return self.settings.weight
net = Net(); optimizer = sgd(net)
for turn, (x, y) in enumerate(batches()):
    if turn == 16: net.settings.weight = 0.25
    net.broken = turn == 2
    try:
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
    except KeyError as error: found.append(repr(error))
    found.append(loss.item())
found += weights(net)
""",
    "a number of the file, of a function around and by default": DEEP
    + """
SCALE = 1.0
def made(by):
    class Net(nn.Module):
        def __init__(self): super().__init__(); self.inner = deep()[0]
        def forward(self, x, shift=0.5): return self.inner(x) * by * SCALE + shift
    def change(to): nonlocal by; by = to
    return Net(), change
net, change = made(1.0); optimizer = sgd(net)
for turn, (x, y) in enumerate(batches(40)):
    if turn == 14: SCALE = 0.5
    if turn == 26: change(3.0)
    optimizer.zero_grad()
    loss = F.cross_entropy(net(x), y)
    loss.backward()
    optimizer.step()
    found.append(loss.item())
found += weights(net)
""",
    "layers by chance and by turn": DEEP
    + """
class Net(nn.Module):
    def __init__(self):
        super().__init__(); self.parts, self.turn = nn.ModuleList([nn.Linear(33, 33) for _ in range(6)]), [0]
    def forward(self, x):
        for at, part in enumerate(self.parts):
            if at != self.turn[0] % 6: x = torch.relu(part(x))
        return x
net = Net().cuda(); optimizer = sgd(net)
for turn, (x, y) in enumerate(batches()):
    net.turn[0] = turn // 9
    optimizer.zero_grad()
    loss = F.cross_entropy(net(x), y)
    loss.backward()
    optimizer.step()
    found.append(loss.item())
found += weights(net)
""",
    "settings of PyTorch and seeds": DEEP
    + """
net, optimizer = deep(dropout=0.3)
for turn, (x, y) in enumerate(batches(36)):
    if turn == 12: torch.manual_seed(7)
    if turn == 16: torch.backends.cuda.matmul.allow_tf32 = True
    if turn == 24: torch.backends.cuda.matmul.allow_tf32 = False; torch.set_grad_enabled(True)
    optimizer.zero_grad()
    loss = F.cross_entropy(net(x), y)
    loss.backward()
    optimizer.step()
    found.append(loss.item())
found += [*weights(net), torch.rand(2, device="cuda")]
""",
    "loops over objects with numbers": DEEP
    + """
class Part:
    def __init__(self, by): self.by = by
class Net(nn.Module):
    def __init__(self): super().__init__(); self.inner, self.own = deep()[0], [Part(1.0), Part(0.5)]
    def forward(self, x):
        for part in self.own: x = x * part.by
        return self.inner(x) * sum([part.by for part in self.own])
net = Net(); optimizer = sgd(net)
for turn, (x, y) in enumerate(batches()):
    if turn == 15: net.own[0].by = 3.0
    optimizer.zero_grad()
    loss = F.cross_entropy(net(x), y)
    loss.backward()
    optimizer.step()
    found.append(loss.item())
found += weights(net)
""",
    "a gradient of gradients, later": DEEP
    + """
net, optimizer = deep()
for turn, (x, y) in enumerate(batches(24)):
    optimizer.zero_grad()
    x = x.requires_grad_(turn >= 10)
    out = net(x)
    loss = F.cross_entropy(out, y)
    if turn % 4 == 3 and turn >= 10:
        slope, = torch.autograd.grad(out.sum(), x, create_graph=True)
        loss = loss + slope.square().sum()
    loss.backward()
    optimizer.step()
    found.append((loss.item(), x.grad))
found += weights(net)
""",
    "back twice, with leave and without": DEEP
    + """
net, optimizer = deep()
for turn, (x, y) in enumerate(batches(24)):
    optimizer.zero_grad()
    loss = F.cross_entropy(net(x), y)
    if turn % 3 == 0: loss.backward(retain_graph=True)
    loss.backward()
    if turn == 17:
        try: loss.backward()
        except RuntimeError as error: found.append(str(error)[:60])
    optimizer.step()
    found.append(loss.item())
found += weights(net)
""",
    "a weight changed before the way back": DEEP
    + """
net, optimizer = deep()
for turn, (x, y) in enumerate(batches(24)):
    optimizer.zero_grad()
    loss = F.cross_entropy(net(x), y)
    with torch.no_grad():
        if turn == 15: net[0].weight.mul_(0.5)
        if turn == 18: net[0].bias.add_(1)
    try: loss.backward()
    except RuntimeError as error: found.append(str(error)[:60])
    optimizer.step()
    found.append(loss.item())
found += weights(net)
""",
    "gradients of what goes in, by another call": DEEP
    + """
net, optimizer = deep()
for turn, (x, y) in enumerate(batches(24)):
    x.requires_grad_()
    loss = F.cross_entropy(net(x), y)
    if turn < 8: loss.backward()
    else: x.grad, *slopes = torch.autograd.grad(loss, [x, *net.parameters()]); found.append(slopes[0].sum())
    found.append((loss.item(), x.grad))
    optimizer.step(); optimizer.zero_grad()
found += weights(net)
""",
    "several results, of which some are used": DEEP
    + """
class Net(nn.Module):
    def __init__(self): super().__init__(); self.inner, self.other = deep()[0], deep()[0]
    def forward(self, x):
        first = self.inner(x)
        return {"out": first, "more": [self.other(x), first.argmax(1), None, 3]}
net = Net(); optimizer = sgd(net)
for turn, (x, y) in enumerate(batches(30)):
    optimizer.zero_grad()
    made = net(x)
    made["out"].retain_grad()
    loss = F.cross_entropy(made["out"], y)
    if turn >= 20: loss = loss + made["more"][0].square().mean()
    loss.backward()
    with torch.no_grad(): made["more"][0].mul_(2); made["more"][1].add_(1)
    optimizer.step()
    found.append((loss.item(), made["out"].grad, made["more"]))
found += weights(net)
""",
    "copies of a network, and one that is saved and loaded": DEEP
    + """
import io
net, optimizer = deep(); average = copy.deepcopy(net)
for turn, (x, y) in enumerate(batches(48)):
    if turn == 12: average = copy.deepcopy(net)
    if turn == 24:
        torch.save(net, held := io.BytesIO()); held.seek(0)
        net = torch.load(held, weights_only=False); optimizer = sgd(net)
    optimizer.zero_grad()
    loss = F.cross_entropy(net(x), y)
    loss.backward()
    optimizer.step()
    found.append(loss.item())

    with torch.no_grad():
        for one, other in zip(average.parameters(), net.parameters()): one.lerp_(other, 0.1)
        found.append(average(x).sum())
found += [*weights(net), *weights(average)]
""",
    "modules that are not called as Python's classes are": DEEP
    + """
import functools
class Reads(nn.Module):
    def __init__(self, inner): super().__init__(); self.inner, self.last = inner, nn.Linear(5, 5).cuda()
    def forward(self, x): open("/dev/null").close(); return self.last(self.inner(x))
class Partly(nn.Module):
    def __init__(self): super().__init__(); self.inner = deep()[0]
    def scaled(self, x, by=1): return self.inner(x) * by
    forward = functools.partialmethod(scaled, by=2)
class OfInstances:
    def __get__(self, one, kind):
        if one is None: raise AttributeError("forward")
        return one.inner
class Described(nn.Module):
    def __init__(self): super().__init__(); self.inner = deep()[0]
    forward = OfInstances()
class Property(nn.Module):
    def __init__(self): super().__init__(); self.inner = deep()[0]
    @property
    def forward(self): return lambda x: self.inner(x) * 3
x = next(batches(1))[0]
def others():
    yield torch.jit.script(deep()[0]); yield torch.jit.trace(deep()[0], x); yield torch.fx.symbolic_trace(deep()[0])
    yield Partly(); yield Described(); yield Property()
def compiled():  # last, for all modules are left alone from then on
    yield torch.export.export(deep()[0], (x,)).module(); yield torch.compile(deep()[0], backend="eager")
for net in itertools.chain(others(), map(Reads, others()), compiled()):
    optimizer = sgd(net)
    for x, y in batches(12):
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
    found += [loss.item(), *weights(net)]
""",
    "modules that were given all attributes of another": DEEP
    + """
for net in (nn.DataParallel(deep()[0]), torch.fx.symbolic_trace(deep()[0])):
    optimizer = sgd(net); before = None
    for turn, (x, y) in enumerate(batches(12)):
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        if turn == 9: before = copy.deepcopy(net), copy.copy(net)
        optimizer.step()
        found.append(loss.item())
        if before: found += [one(x).sum().item() for one in before]
    found += weights(net)
""",
    "forward passes that nobody goes back through": DEEP
    + """
net, optimizer = deep(); kept = []
for turn, (x, y) in enumerate(batches(30)):
    if turn % 5 == 4: kept.append(net(x))
    if turn % 7 == 6: net(x)
    optimizer.zero_grad()
    loss = F.cross_entropy(net(x), y)
    loss.backward()
    optimizer.step()
    found.append(loss.item())

found += [*weights(net), *kept]
""",
    "a loss over two turns": DEEP
    + """
net, optimizer = deep(); before = None
for turn, (x, y) in enumerate(batches(24)):
    loss = F.cross_entropy(net(x), y)
    if before is not None and turn % 2:
        optimizer.zero_grad()
        (loss + before).backward()
        optimizer.step()
    before = loss
    found.append(loss.item())
found += weights(net)
""",
    "weights that are shared, and punished outside": DEEP
    + """
class Net(nn.Module):
    def __init__(self): super().__init__(); self.inner, self.last = deep()[0], nn.Linear(33, 33)
    def forward(self, x): return self.inner(torch.tanh(self.last(torch.tanh(self.last(torch.tanh(self.last(x)))))))
net = Net().cuda(); optimizer = sgd(net)
for turn, (x, y) in enumerate(batches(30)):
    optimizer.zero_grad()
    loss = F.cross_entropy(net(x), y) + 0.1 * net.last.weight.square().sum()
    loss.backward()
    optimizer.step()
    found.append(loss.item())
found += weights(net)
""",
    "other weights in its place, and a forward pass that is replaced": DEEP
    + """
net, optimizer = deep(); plain = net.forward
for turn, (x, y) in enumerate(batches(48)):
    if turn == 14: net.forward = lambda x: plain(x) * 2
    if turn == 26: del net.forward
    optimizer.zero_grad()
    doubled = {name: one * 2 for name, one in net.named_parameters()}
    out = torch.func.functional_call(net, doubled, (x,)) if turn in (18, 34) else net(x)
    loss = F.cross_entropy(out, y)
    loss.backward()
    optimizer.step()
    found.append(loss.item())
found += weights(net)
""",
    "what it keeps for the way back lies on the host": DEEP
    + """
net, optimizer = deep()
for turn, (x, y) in enumerate(batches(24)):
    optimizer.zero_grad()
    if turn % 4 == 3:
        with torch.autograd.graph.save_on_cpu(): loss = F.cross_entropy(net(x), y)
    else: loss = F.cross_entropy(net(x), y)
    loss.backward()
    optimizer.step()
    found.append(loss.item())
found += weights(net)
""",
    "weights made of others": DEEP
    + """
net, optimizer = deep()
net[0] = torch.nn.utils.parametrizations.spectral_norm(nn.Linear(33, 33)).cuda(); optimizer = sgd(net)
for turn, (x, y) in enumerate(batches(24)):
    optimizer.zero_grad()
    loss = F.cross_entropy(net(x), y)
    loss.backward()
    optimizer.step()
    found.append(loss.item())

found += [*weights(net), *net.buffers()]
""",
    "parts of a module that reads on the host": DEEP
    + """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.parts = nn.Linear(33, 33), nn.ModuleList([deep()[0] for _ in range(2)])
    def forward(self, x):
        x = torch.tanh(self.first(x))
        return sum(part(x) for part in self.parts) * (2 if x.sum().item() > 0 else 1)
net = Net().cuda(); optimizer = sgd(net)
for turn, (x, y) in enumerate(batches(40)):
    optimizer.zero_grad()
    loss = F.cross_entropy(net(x), y)
    loss.backward()
    optimizer.step()
    found.append(loss.item())

found += weights(net)
""",
    "lines that do not run, and some that do later": DEEP
    + """
class Net(nn.Module):
    def __init__(self): super().__init__(); self.inner, self.table, self.turns = deep()[0], None, 0
    def forward(self, x):
        if self.table is None:
            self.table = torch.ones(5, device=x.device)
        if getattr(self, "counts", False):
            self.turns = self.turns + 1
        return self.inner(x) * self.table
net = Net(); optimizer = sgd(net)
for turn, (x, y) in enumerate(batches(48)):
    if turn == 16: net.counts = True
    if turn == 24: net.table = None
    optimizer.zero_grad()
    loss = F.cross_entropy(net(x), y)
    loss.backward()
    optimizer.step()
    found.append(loss.item())

found += [*weights(net), net.turns]
""",
    "batch statistics of several calls, gone back through together": DEEP
    + """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = deep()[0], nn.BatchNorm1d(5), nn.Linear(5, 5)
    def forward(self, x): return self.last(torch.tanh(self.norm(self.first(x))))
net = Net().cuda(); optimizer = sgd(net)
for turn, (x, y) in enumerate(batches(30)):
    mixed = (x * 0.5).requires_grad_()
    slope, = torch.autograd.grad(net(mixed).sum(), mixed, create_graph=True)
    loss = F.cross_entropy(net(x), y) - net(-x).mean() + slope.square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    found.append(loss.item())
found += [*weights(net), *net.buffers()]
""",
    "sparse tensors given, held and saved": DEEP
    + """
class Net(nn.Module):
    def __init__(self, held): super().__init__(); self.inner = deep()[0]; self.register_buffer("held", held)
    def forward(self, x, given): return self.inner(torch.sparse.mm(self.held, torch.sparse.mm(given, x)))
links = torch.eye(8, device="cuda").to_sparse()
net = Net(links); optimizer = sgd(net)
for x, y in batches(12):
    optimizer.zero_grad()
    loss = F.cross_entropy(net(x, links), y)
    loss.backward()
    optimizer.step()
    found.append(loss.item())
found += weights(net)
""",
    "inside of a longer loop with breaks": DEEP
    + """
net, optimizer = deep(); best = 1e9
for epoch in range(4):
    for turn, (x, y) in enumerate(batches(12)):
        if turn == 3: continue
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        if turn == 9 and epoch == 1: break
    best = min(best, loss.item()); found.append(best)
found += weights(net)
""",
}

PROGRAMS = {
    **GRAPHS,
    **FOREACH,
    **COPIES,
    **LOADERS,
    **NUMBERS,
    **KNOWN_LATER,
    **HOMES,
    **WAITS,
    **DRAWS,
    **WORKERS,
    **LIVES,
}
