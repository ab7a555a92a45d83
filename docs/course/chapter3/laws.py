"""A law of two figures, a latency and a rate, against what four real H200 took."""

import json
from pathlib import Path

measured = json.loads(Path(__file__).with_name("measured.json").read_text())
ranks = measured["ranks"]
crossings = {
    "all_reduce": 2 * (ranks - 1) / ranks,  # of the whole tensor, there and back
    "all_gather": ranks - 1,  # of each rank's part: all but one's own come by
    "broadcast": 1,
}
SMALL = "262144"  # bytes
LARGE = "1073741824"

errors = []
for name, times in measured["microseconds"].items():
    latency = times[SMALL]
    rate = int(LARGE) * crossings[name] / (times[LARGE] - latency)  # bytes a microsecond
    print(f"{name}: {latency:.0f} µs and {rate / 1e3:.0f} GB/s")
    for size, time in times.items():
        law = latency + int(size) * crossings[name] / rate
        errors.append(abs(law / time - 1))
        print(f"    {int(size) / 2**20:9.3f} MiB  measured {time:7.0f} µs  law {law:7.0f} µs")
errors.sort()
print(f"half of the times are within {errors[len(errors) // 2]:.0%} of the law, all within {errors[-1]:.0%}")
assert errors[len(errors) // 2] < 0.15
