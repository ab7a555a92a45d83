"""Events: marks in a stream. One stream can wait for another's mark while the host goes on."""

import time

import torch

HOST_WAITS = False

x = torch.randn(4096, 4096, device="cuda")
x @ x
side = torch.cuda.Stream()
begin, ready, done = (torch.cuda.Event(enable_timing=True) for _ in range(3))
torch.cuda.synchronize()

start = time.perf_counter()
begin.record()
y = x @ x
ready.record()  # a mark behind the product
with torch.cuda.stream(side):
    if HOST_WAITS:
        ready.synchronize()
    else:
        side.wait_event(ready)  # the side stream waits for it: the host does not
    z = y @ y
    done.record()
launched = time.perf_counter() - start
done.synchronize()  # now the host waits, for this one mark

print(f"the host was free after {launched * 1e3:.2f} ms")
print(f"by the GPU's clock: first product {begin.elapsed_time(ready):.1f} ms, both {begin.elapsed_time(done):.1f} ms")
assert begin.elapsed_time(done) > 1.9 * begin.elapsed_time(ready)
assert (launched * 1e3 > begin.elapsed_time(ready)) == HOST_WAITS
