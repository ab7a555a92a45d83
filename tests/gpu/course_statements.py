"""What the course's first chapter says beyond the `assert` lines of its programs: each statement is a small program."""

BEGIN = """
import time
import torch

x = torch.randn({width}, {width}, device="cuda")
y = x @ x
torch.cuda.synchronize()
begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
"""
STATEMENTS = {
    "launching a small product takes longer than computing it": BEGIN.format(width=256)
    + """
torch.cuda._sleep(60_000_000)  # long enough for all of them to be launched meanwhile
begin.record()
start = time.perf_counter()
for _ in range(200):
    torch.mm(x, x, out=y)
launched = (time.perf_counter() - start) * 1e3
end.record()
torch.cuda.synchronize()
assert launched > begin.elapsed_time(end), (launched, begin.elapsed_time(end))
""",
    "two large products on two streams take about as long as on one": BEGIN.format(width=8192)
    + """
def timed(*streams):
    begin.record()
    for stream in streams:
        stream.wait_event(begin)
        with torch.cuda.stream(stream):
            torch.mm(x, x, out=torch.empty_like(x))
        torch.cuda.current_stream().wait_stream(stream)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)

first, second = torch.cuda.Stream(), torch.cuda.Stream()
timed(first, second)
in_one, beside = timed(first, first), timed(first, second)
assert beside > 0.85 * in_one, (beside, in_one)
""",
    "a product finds the result of the one launched before it": BEGIN.format(width=64)
    + """
x = torch.full((64, 64), 0.5, device="cuda")
for _ in range(50):
    y = x @ x
    z = y @ y
    assert z[0, 0].item() == 64 * 16.0**2, z[0, 0].item()
""",
    "to wait for one mark is not to wait for everything": BEGIN.format(width=1024)
    + """
side = torch.cuda.Stream()
with torch.cuda.stream(side):
    torch.cuda._sleep(200_000_000)
    end.record()
y = x @ x
begin.record()
begin.synchronize()
assert not end.query()
torch.cuda.synchronize()
assert end.query()
""",
    "a shape is known before the values are": BEGIN.format(width=1024)
    + """
torch.cuda._sleep(200_000_000)
y = x @ x
end.record()
assert y.shape == (1024, 1024) and y.dtype == torch.float32 and y.device.type == "cuda"
assert not end.query()
""",
    "while there is something in the queue, it does not matter what Python does": BEGIN.format(width=4096)
    + """
def timed(pause):
    begin.record()
    for _ in range(8):
        torch.mm(x, x, out=y)
    time.sleep(pause)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)

timed(0.0)
idle, at_work = timed(0.0), timed(0.005)
assert idle > 10, idle  # milliseconds: longer than Python is at work
assert at_work < 1.1 * idle, (at_work, idle)
""",
    "tensors that are made on the device are waited for by nobody": BEGIN.format(width=64)
    + """
for cycles in (1, 200_000_000, 4_000_000_000):  # the first time loads kernels; a busy host is given more time
    torch.cuda._sleep(cycles)
    end.record()
    for made in (torch.zeros(1000, device="cuda"), torch.arange(1000, device="cuda"), x > 0):
        assert made.device.type == "cuda", made.device
    if not end.query():
        break
else:
    raise AssertionError("the host went on only when the device was done")
""",
}
