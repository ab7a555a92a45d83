"""Reading the loss: every step, every tenth, by torchmetrics, by keepbusy, and not at all, which is the bound.

    python benchmarks/runtime/readback.py        (needs a GPU; writes readback.json to $OUT)

Three loops: one whose host has a batch to prepare, where a read costs what it keeps the host from doing; one that
launches more slowly than the GPU computes and one whose GPU is busy anyway, where reads should cost nothing.
"""

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from rounds import REPEATS, milliseconds, show, take_turns, write
from torch import Tensor
from torch.nn.functional import cross_entropy

import keepbusy
from keepbusy.runtime import Readings

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "stalls"))
from models import SMALL, TextClassifier, size

try:
    from torchmetrics import MeanMetric
except ImportError:
    MeanMetric = None

Log = Callable[[Tensor], object]


class Loop:
    """Training steps of one model, the loss of each handed to whoever logs it."""

    def __init__(self, steps: int, batches: Callable[[], Iterator[Tensor]], **shape: int) -> None:
        torch.manual_seed(0)
        self.steps = size(steps, 3)
        self.model = TextClassifier(**shape).cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.batches = batches
        self.target = torch.zeros(next(batches()).shape[0], dtype=torch.int64, device="cuda")

    def run(self, log: Log) -> float:
        return milliseconds(lambda: self._steps(log), self.steps)

    def _steps(self, log: Log) -> None:
        for _, batch in zip(range(self.steps), self.batches(), strict=False):
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = cross_entropy(self.model(batch.to("cuda", non_blocking=True)).float(), self.target)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            log(loss)


def prepared() -> Iterator[Tensor]:
    """What a tokenizer or an augmentation costs: about fifteen milliseconds of one core."""
    while True:
        yield torch.randn(size(64, 2), size(512, 16), size(48, 8)).argmax(-1).pin_memory()


def on_the_device(batch: int, length: int) -> Callable[[], Iterator[Tensor]]:
    tokens = torch.randint(0, 8192, (size(batch, 2), size(length, 16)), device="cuda")

    def batches() -> Iterator[Tensor]:
        while True:
            yield tokens

    return batches


def nothing() -> Log:
    return lambda _: None


def item() -> Log:
    log: list[float] = []
    return lambda loss: log.append(loss.item())


def item_every_10() -> Log:
    log, step = [], iter(range(1 << 30))
    return lambda loss: log.append(loss.item()) if next(step) % 10 == 9 else None


def torchmetrics() -> Log:
    metric, log = MeanMetric().cuda(), []

    def read(loss: Tensor) -> None:
        metric.update(loss.detach())
        log.append(metric.compute().item())

    return read


def readback() -> Log:
    """Each step shows the loss of the one before."""
    log: list[keepbusy.runtime.readback.Reading] = []
    shown: list[str] = []

    def read(loss: Tensor) -> None:
        log.append(keepbusy.readback(loss))
        if len(log) > 1:
            shown.append(f"{log[-2]:.4f}")

    return read


def readings() -> Log:
    readings, shown = Readings(), []

    def read(loss: Tensor) -> None:
        readings.add(loss=loss, scale=1.0)
        shown.append((readings.means(), readings.nonfinite()))

    return read


def loops() -> dict[str, Loop]:
    large = {"width": 768, "layers": 8, "heads": 12}
    return {
        "the host prepares batches": Loop(10, prepared, **large),
        "launch-bound": Loop(40, on_the_device(8, 64), width=64, layers=8, heads=4),
        "GPU-bound": Loop(10, on_the_device(64, 512), **large),
    }


def call_costs() -> dict[str, float]:
    """Microseconds of the host a call, while the device is idle."""
    loss = torch.ones((), device="cuda")
    running = torch.zeros((), device="cuda")
    home = torch.empty((), pin_memory=True)
    event = torch.cuda.Event()

    def in_line() -> None:
        home.copy_(loss, non_blocking=True)
        event.record()

    calls = {
        "loss.item()": loss.item,
        "running += loss": lambda: running.add_(loss),
        "a copy in line and an event": in_line,
        "readback(loss)": lambda: keepbusy.readback(loss),
        "readback of four": lambda: keepbusy.readback([loss, loss, loss, loss]),
    }
    return {name: min(_microseconds(call) for _ in range(5)) for name, call in calls.items()}


def _microseconds(call: Callable[[], object], count: int = 200) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        call()
    spent = (time.perf_counter() - start) / count * 1e6
    torch.cuda.synchronize()
    return spent


def beside_a_large_copy() -> dict[str, dict[str, float]]:
    """Steps of a millisecond while a gigabyte is on its way home, and a loss read in each: why a stream of its own."""
    large = torch.empty(size(1 << 30, 1 << 20), dtype=torch.uint8, device="cuda")
    home, side = torch.empty(large.shape, dtype=torch.uint8, pin_memory=True), torch.cuda.Stream()
    loss, small = torch.ones((), device="cuda"), torch.empty((), pin_memory=True)
    ways: dict[str, Log] = {
        "no reads": nothing(),
        "copied in line": lambda loss: small.copy_(loss, non_blocking=True),
        "readback": keepbusy.readback,
    }
    rows = {}
    torch.cuda._sleep(1)  # its first call loads it, and waits for the device
    for pieces in (1, 16):
        for name, read in ways.items():
            torch.cuda.synchronize()
            with torch.cuda.stream(side):
                for there, here in zip(home.chunk(pieces), large.chunk(pieces), strict=True):
                    there.copy_(here, non_blocking=True)
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            for _ in range(10):
                torch.cuda._sleep(1_980_000)
                last = read(loss)
            end.record()
            end.synchronize()
            began = time.perf_counter()
            if isinstance(last, keepbusy.runtime.readback.Reading):
                last.item()
            waited = (time.perf_counter() - began) * 1e3
            rows[f"{name}, {pieces} pieces"] = {"ten_steps_ms": start.elapsed_time(end), "reading_waited_ms": waited}
    return rows


def main() -> None:
    torch.set_num_threads(1)
    logs = {"no reads": nothing, "item every step": item, "item every 10": item_every_10}
    logs |= {"torchmetrics every step": torchmetrics} if MeanMetric else {}
    logs |= {"readback, a step late": readback, "Readings, every step": readings}
    found: dict[str, object] = {}
    for title, loop in loops().items():
        repeats = 2 * REPEATS if title == "launch-bound" else REPEATS  # its host is the noisiest
        ways = {name: lambda make=make, loop=loop: loop.run(make()) for name, make in logs.items()}
        rows = take_turns(ways, repeats)
        show(f"{title}: milliseconds a step", rows, "no reads")
        found[title] = rows
        if SMALL:
            print("(small sizes: no measurement)")
    found["host_us_a_call"] = call_costs()
    print("\nmicroseconds of the host a call")
    for name, spent in found["host_us_a_call"].items():
        print(f"  {name:28} {spent:9.1f}")
    found["beside_a_large_copy"] = beside_a_large_copy()
    print("\nten steps of a millisecond beside a gigabyte on its way home")
    for name, row in found["beside_a_large_copy"].items():
        print(f"  {name:28} {row['ten_steps_ms']:9.3f} ms   the reading came {row['reading_waited_ms']:.3f} ms later")
    write("readback", found)


if __name__ == "__main__":
    main()
