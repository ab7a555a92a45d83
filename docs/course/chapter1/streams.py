"""Tasks of one stream run in order. Tasks of two streams may run beside each other."""

import torch

MILLISECOND = 1_980_000  # cycles of an H200

first, second = torch.cuda.Stream(), torch.cuda.Stream()


def timed(*streams: torch.cuda.Stream) -> float:
    """Three pauses of one millisecond in each stream: how long the GPU took, by its own clock."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    begin.record()
    for stream in streams:
        stream.wait_event(begin)
        with torch.cuda.stream(stream):
            for _ in range(3):
                torch.cuda._sleep(MILLISECOND)  # a task that uses next to nothing of the GPU
    for stream in streams:
        torch.cuda.current_stream().wait_stream(stream)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


timed(first)  # to warm up
in_one, beside = timed(first, first), timed(first, second)
print(f"six tasks in one stream: {in_one:.1f} ms; three in each of two: {beside:.1f} ms")
assert in_one > 1.8 * beside
