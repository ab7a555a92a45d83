"""A copy from pinned memory, on a stream of its own, runs beside the computation."""

import time

import torch

PINNED = True
OWN_STREAM = True

batch = torch.ones(32, 1024, 1024)  # 134 MB on the host
if PINNED:
    batch = batch.pin_memory()
x = torch.randn(8192, 8192, device="cuda")
x @ x  # to warm up: the first product takes longer
x = x[:4096, :4096].contiguous()
copying = torch.cuda.Stream() if OWN_STREAM else torch.cuda.current_stream()
start, copied, computed = (torch.cuda.Event(enable_timing=True) for _ in range(3))
torch.cuda.synchronize()

start.record()
with torch.cuda.stream(copying):
    copying.wait_event(start)
    called = time.perf_counter()
    on_device = batch.to("cuda", non_blocking=True)
    held = (time.perf_counter() - called) * 1e3
    copied.record()
for _ in range(3):
    y = x @ x
computed.record()
torch.cuda.synchronize()

copy, all_of_it = start.elapsed_time(copied), start.elapsed_time(computed)
print(f"the call that copies returned after {held:.2f} ms")
print(f"the copy was done after {copy:.1f} ms, the three products after {all_of_it:.1f} ms")
assert (held < copy / 2) == PINNED
