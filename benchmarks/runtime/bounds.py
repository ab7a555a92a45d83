"""What the runtime still costs over what the machine can do, part by part. Needs a GPU, and two minutes.

    PYTHONPATH=src python benchmarks/runtime/bounds.py                     # writes bounds.json to $OUT as it goes
    PYTHONPATH=src python benchmarks/runtime/bounds.py --only readback graph images features    # without save_later
    STALLBENCH_SMALL=1 keepbusy run benchmarks/runtime/bounds.py           # whether it runs; its times mean nothing

- `features`: batches of 500, 5,000 and 50 small tensors at a copy/compute ratio of 0.5, from ready batches in the
  loop's own process, packed by 16, 4 and 8 tasks, and from workers, which join them. `nothing sent`: what it costs to
  be told by workers that a batch is there.
- `images`: 77 MB of pageable memory a batch, at ratios of 1.0 and 1.5, without workers and with; and how fast threads
  fill pinned memory with it, alone and while the device copies from there.
- `readback`, `graph`: microseconds of the host, of a call and of each thing that it does. A graph is called with one
  tensor, with 50, and with 50 in a batch of lists and dicts.
- `save_later`: 0.76 GB after the third of 25 steps. Of each step how much longer it took than without a checkpoint.

Bounds and controls stand in the same rounds as what is measured; figures are medians, with the least and the most.
"""

from __future__ import annotations

import argparse
import cProfile
import io
import pstats
import resource
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import torch
from prefetch import WARM_UP, Ready, Work, copy_time, non_blocking, step_time
from rounds import show, take_turns, write
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

import keepbusy
from keepbusy.runtime import readback
from keepbusy.runtime.prefetch import prefetch_iterator

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "stalls"))
from models import SMALL, size

STEPS, AHEAD = size(30, 3), 40
FIRST = size(60, 6)
WORKERS = size(8, 1)


def features(count: int) -> list[Any]:
    """27 MB in 500 columns of ids and values; fewer or more columns hold as much each."""
    rows = size(8192, 64)
    column = (lambda: torch.randint(0, 99, (rows,)), lambda: torch.randn(rows), lambda: torch.randn(rows, 2))
    return [{f"feature {index}": column[index % 3]() for index in range(count)} for _ in range(2)]


def first(samples: list[Any]) -> Any:
    return samples[0]


def loader(batches: list[Any], **options: Any) -> DataLoader:
    """One that waits no more than a minute: a worker that has no file left loses its batch without a word."""
    patience = 60 if "num_workers" in options else 0
    return DataLoader(Ready(batches, FIRST + WARM_UP + STEPS + AHEAD), collate_fn=first, timeout=patience, **options)


def packed_by(tasks: int) -> Callable[[DataLoader], Iterator[Any]]:
    """`prefetch` that packs by so many tasks."""

    def batches_of(batches: DataLoader) -> Iterator[Any]:
        usual, prefetch_iterator.PACKING_TASKS = prefetch_iterator.PACKING_TASKS, tasks
        try:
            yield from keepbusy.prefetch(batches)
        finally:
            prefetch_iterator.PACKING_TASKS = usual

    return batches_of


def milliseconds_a_step(batches: Any, work: Work, before: int = 0) -> float:
    """After so many steps more to warm up: workers have sent batches ahead, and fill their first buffers."""
    batches = iter(batches)
    for batch in islice(batches, before):
        work(batch)
    return step_time(batches, work, STEPS) * 1e3


def measure_features(found: dict[str, Any]) -> None:
    work = Work(SMALL)
    for count in (size(500, 24), size(5000, 48), size(50, 12)):
        made = features(count)
        pinned = [{name: one.pin_memory() for name, one in batch.items()} for batch in made]
        resident = [{name: one.cuda() for name, one in batch.items()} for batch in made]
        work.lasting(2 * copy_time(made[0]))
        bytes_under_way = 5 * WORKERS * sum(one.nbytes for one in made[0].values())
        workers = WORKERS if bytes_under_way < shutil.disk_usage("/dev/shm").free else 2
        ways: dict[str, Callable[[], float]] = {
            "copy in one piece": lambda made=made: copy_time(made[0]) * 1e3,
            "compute alone": lambda here=resident: milliseconds_a_step(loader(here), work),
            "pinned, non_blocking": lambda pinned=pinned: milliseconds_a_step(non_blocking(loader(pinned)), work),
            "keepbusy": lambda made=made: milliseconds_a_step(keepbusy.prefetch(loader(made)), work),
            "keepbusy, pinned": lambda pinned=pinned: milliseconds_a_step(keepbusy.prefetch(loader(pinned)), work),
            **{
                f"keepbusy, {tasks} tasks": lambda made=made, tasks=tasks: milliseconds_a_step(
                    packed_by(tasks)(loader(made)), work
                )
                for tasks in (4, 8)
            },
            f"{workers} workers, nothing sent": lambda workers=workers, here=resident: milliseconds_a_step(
                (here[0] for _ in loader([0], num_workers=workers)), work, FIRST
            ),
            f"{workers} workers, keepbusy": lambda made=made, workers=workers: milliseconds_a_step(
                keepbusy.prefetch(loader(made, num_workers=workers)), work, FIRST
            ),
        }
        title = f"features, {count} tensors, copy/compute 0.5: milliseconds a step"
        keep(found, title, take_turns(ways, 2), "compute alone")
        for options in ({}, {"num_workers": workers}):
            profiled(
                lambda made=made, options=options: milliseconds_a_step(
                    keepbusy.prefetch(loader(made, **options)), work, FIRST if options else 0
                )
            )


def keep(found: dict[str, Any], title: str, rows: dict[str, list[float]], bound: str) -> None:
    """Print a table and write it down, so that a run that is cut off keeps what it has."""
    show(title, rows, bound)
    found[title] = rows
    write("bounds", found)


def profiled(does: Callable[[], Any]) -> None:
    """Where the loop's thread spends its time; a profiler makes small functions dearer."""
    profile = cProfile.Profile()
    profile.runcall(does)
    said = io.StringIO()
    pstats.Stats(profile, stream=said).sort_stats("tottime").print_stats(14)
    print("\n".join(line[:110] for line in said.getvalue().splitlines() if line.strip())[:2400])


def measure_images(found: dict[str, Any]) -> None:
    batches = [(torch.randn(size(128, 2), 3, 224, 224), torch.zeros(8, dtype=torch.int64)) for _ in range(3)]
    pinned = [tuple(one.pin_memory() for one in batch) for batch in batches]
    resident = [tuple(one.cuda() for one in batch) for batch in batches]
    work = Work(SMALL)
    for ratio in (1.0, 1.5):
        work.lasting(copy_time(batches[0]) / ratio)
        rows = take_turns(
            {
                "copy in one piece": lambda: copy_time(batches[0]) * 1e3,
                "compute alone": lambda: milliseconds_a_step(loader(resident), work),
                "keepbusy, pinned": lambda: milliseconds_a_step(keepbusy.prefetch(loader(pinned)), work),
                "keepbusy, pageable": lambda: milliseconds_a_step(keepbusy.prefetch(loader(batches)), work),
                "keepbusy, pageable, 8 tasks": lambda: milliseconds_a_step(packed_by(8)(loader(batches)), work),
                f"{WORKERS} workers, keepbusy": lambda: milliseconds_a_step(
                    keepbusy.prefetch(loader(batches, num_workers=WORKERS)), work, FIRST
                ),
            },
            3,
        )
        keep(found, f"images of 77 MB, copy/compute {ratio}: milliseconds a step", rows, "copy in one piece")
    profiled(lambda: milliseconds_a_step(keepbusy.prefetch(loader(batches)), work))
    host_copies(found, [batch[0] for batch in batches], pinned[0][0])


def host_copies(found: dict[str, Any], sources: list[torch.Tensor], target: torch.Tensor) -> None:
    """Into pinned memory, by a thread of Python's and by PyTorch's; alone, and while the device reads pinned memory."""
    thread, script = ThreadPoolExecutor(1), prefetch_iterator._script()
    device, side = torch.empty_like(target, device="cuda"), torch.cuda.Stream()
    also = torch.empty_like(target).pin_memory()

    def timed(copy: Callable[[torch.Tensor], Any], beside: bool) -> float:
        if beside:
            with torch.cuda.stream(side):
                for _ in range(12):
                    device.copy_(also, non_blocking=True)
        begin = time.perf_counter()
        for index in range(6):
            copy(sources[index % len(sources)])
        spent = (time.perf_counter() - begin) / 6 * 1e3
        torch.cuda.synchronize()
        return spent

    ways: dict[str, Callable[[torch.Tensor], Any]] = {
        "copy_ in this thread": target.copy_,
        "copy_ in another thread": lambda source: thread.submit(target.copy_, source).result(),
    }
    for tasks in (1, 4, 8, 16, 32):
        ways[f"{tasks} tasks"] = lambda source, tasks=tasks: script.begin(
            [], [], [prefetch_iterator._elements(target, source)], tasks
        ).wait()
    rows = take_turns(
        {
            f"{name}{', device reading' if beside else ''}": lambda copy=copy, beside=beside: timed(copy, beside)
            for name, copy in ways.items()
            for beside in (False, True)
        },
        3,
    )
    keep(found, "77 MB from pageable to pinned memory: milliseconds", rows, "copy_ in this thread")


def measure_readback(found: dict[str, Any]) -> None:
    loss, running = torch.ones((), device="cuda"), torch.zeros((), device="cuda")
    slot, event = readback._take(loss.device), torch.cuda.Event()
    stream, double = torch.cuda.current_stream(), slot.double(0)
    same, half = torch.zeros((), device="cuda"), loss.requires_grad_(False)
    event.record()

    parts: dict[str, Callable[[], Any]] = {
        "loss.item()": loss.item,
        "readback(loss)": lambda: keepbusy.readback(loss),
        "readback of four": lambda: keepbusy.readback([loss, loss, loss, loss]),
        "a kernel: running += loss": lambda: running.add_(loss),
        "a kernel: loss as double, home": lambda: double.copy_(loss),
        "a kernel: torch.add, home": lambda: torch.add(loss, 0, out=double),
        "a copy on the device": lambda: same.copy_(half),
        "event.record(stream)": lambda: event.record(stream),
        "event.query()": event.query,
        "a new Event": torch.cuda.Event,
        "is capturing": torch.cuda.is_current_stream_capturing,
        "current stream, ours": lambda: readback.current_stream(loss.device),
        "slot.on_host.tolist()": slot.on_host.tolist,
        "nothing at all": lambda: None,
    }
    keep_calls(found, "readback", parts)


def keep_calls(found: dict[str, Any], what: str, calls: dict[str, Callable[[], Any]], count: int = 300) -> None:
    """Microseconds of the host that each of these takes."""

    def microseconds(call: Callable[[], Any]) -> float:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(count):
            call()
        spent = (time.perf_counter() - begin) / count * 1e6
        torch.cuda.synchronize()
        return spent

    rows = take_turns({name: lambda call=call: microseconds(call) for name, call in calls.items()}, 7)
    print(f"\n{what}, microseconds of the host a call while the device is idle")
    for name, times in rows.items():
        print(f"  {name:44} {statistics.median(times):7.2f}   {min(times):7.2f} to {max(times):7.2f}")
    found[f"{what}, microseconds"] = rows
    write("bounds", found)


def measure_graph(found: dict[str, Any]) -> None:
    """A step of one kernel: what is left is what a call takes. `bare`: PyTorch's calls that it cannot do without."""
    inputs = [torch.ones(64, device="cuda") for _ in range(50)]
    batch = {"ids": inputs[:20], "values": {str(index): one for index, one in enumerate(inputs[20:])}}
    running, calls = torch.zeros(64, device="cuda"), dict[str, Callable[[], Any]]()

    def step(first: Any, *_others: Any) -> Any:
        while not isinstance(first, torch.Tensor):
            first = first["ids"] if isinstance(first, dict) else first[0]
        return running.add_(first)

    for name, arguments in {"1 tensor": inputs[:1], "50 tensors": inputs, "50 tensors in a batch": [batch]}.items():
        graphed = keepbusy.graph(step)
        for _ in range(6):
            graphed(*arguments)
        assert graphed.replays, graphed.report()
        (captured,) = graphed._graphs._captured.values()
        calls[f"graph, {name}"] = lambda graphed=graphed, arguments=arguments: graphed(*arguments)
        count = min(len(tree_leaves(arguments)), len(inputs))
        there, here = [torch.empty_like(one) for one in inputs[:count]], inputs[:count]

        def bare(graph: Any = captured._graph, there: Any = there, here: Any = here) -> torch.Tensor:
            torch._foreach_copy_(there, here)
            graph.replay()
            return running.clone()

        calls[f"bare, {name}: copy, replay, clone"] = bare
    calls["a replay"] = captured._graph.replay
    keep_calls(found, "graph", calls, 100)


def measure_save_later(found: dict[str, Any]) -> None:
    import save_later as saving

    training, folder = saving.Training(), Path(tempfile.mkdtemp(dir="/dev/shm"))
    state = {"model": training.model.state_dict(), "optimizer": training.optimizer.state_dict()}
    flat = torch.empty(int(training.gigabytes() * 1e9), dtype=torch.uint8, device="cuda")
    home = torch.empty(flat.shape, dtype=torch.uint8, pin_memory=True)

    class SetAside(saving.Save):
        """What the device must do at least: a copy of as many bytes."""

        def save(self, _: dict[str, Any]) -> None:
            self.copy = flat.clone()

    class BroughtHome(SetAside):
        """And bring it home, into memory that is there."""

        def save(self, state: dict[str, Any]) -> None:
            super().save(state)
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                home.copy_(self.copy, non_blocking=True)

    class Unwritten(saving.Later):
        """Everything but the file."""

        def save(self, state: dict[str, Any]) -> None:
            writing, keepbusy_save._write_file = keepbusy_save._write_file, lambda *_: None
            try:
                super().save(state)
                self.saving.wait()
            finally:
                keepbusy_save._write_file = writing

    keepbusy_save = import_module("keepbusy.runtime.save_later")
    ways = {
        "no checkpoint": saving.Save(folder),
        "set aside alone": SetAside(folder),
        "and brought home": BroughtHome(folder),
        "save_later": saving.Later(folder),
        "save_later, waited for": Unwritten(folder),
        "save_later, no room": saving.LaterWithoutRoom(folder),
    }
    del state
    try:
        steps: dict[str, list[list[float]]] = {name: [] for name in ways}
        rows = take_turns(
            {name: lambda name=name, way=way: timed_steps(training, way, steps[name]) for name, way in ways.items()}, 5
        )
    finally:
        shutil.rmtree(folder)
    show(f"25 steps, {training.gigabytes():.2f} GB saved after the third: milliseconds in all", rows, "no checkpoint")
    usual = [statistics.median(one) for one in zip(*steps["no checkpoint"][1:], strict=True)]
    print("\nof each step, milliseconds over the same step without a checkpoint (medians); and of the call")
    for name, way in ways.items():
        over = [
            statistics.median(one) - base for one, base in zip(zip(*steps[name][1:], strict=True), usual, strict=True)
        ]
        calls = statistics.median(way.calls[1:])
        print(f"  {name:26} {' '.join(f'{one:5.1f}' for one in over)}   call {calls:.1f}")
    found["save_later"] = {"in all": rows, "steps": steps, "calls": {name: way.calls for name, way in ways.items()}}
    write("bounds", found)


def timed_steps(training: Any, way: Any, steps: list[list[float]]) -> float:
    """One run; `steps` gets how long the device took from the end of each step to that of the next."""
    marks: list[torch.cuda.Event] = []

    def before_update() -> None:
        marks.append(torch.cuda.Event(enable_timing=True))
        marks[-1].record()

    way.before_update = before_update
    spent = training.run(way)
    steps.append([one.elapsed_time(other) for one, other in pairwise(marks)])
    return spent


MEASURES = {
    "readback": measure_readback,
    "graph": measure_graph,
    "images": measure_images,
    "features": measure_features,
    "save_later": measure_save_later,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=MEASURES, default=list(MEASURES))
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    found: dict[str, Any] = {}
    for name in parser.parse_args().only:
        begin = time.perf_counter()
        MEASURES[name](found)
        print(f"({name}: {time.perf_counter() - begin:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
