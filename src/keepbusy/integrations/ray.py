"""Ray: records all workers of a training, on real or virtual GPUs, and reads traces on a cluster."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import ray
from ray.train.backend import Backend
from ray.train.torch import TorchConfig

from keepbusy.integrations import WatchedTraining
from keepbusy.timeline.busy_file import from_bytes, to_bytes
from keepbusy.timeline.files import BadInput
from keepbusy.timeline.model import Timeline
from keepbusy.timeline.ranks import merge
from keepbusy.timeline.steps import without_first_steps
from keepbusy.traces.trace_file import tried


class RayRecording:
    """Takes the place of a train loop: each worker is recorded, and the driver has one report of all.

    recording = RayRecording(train_loop)
    TorchTrainer(recording, scaling_config=ScalingConfig(num_workers=4, use_gpu=True)).fit()
    print(keepbusy.render(recording.explain()))
    """

    def __init__(self, train_loop: Callable[..., Any]) -> None:
        self._train_loop = train_loop
        self._kept = ray.remote(num_cpus=0)(KeptRanks).remote()
        self.__signature__ = inspect.signature(train_loop)  # Ray asks whether it takes a config
        self.__name__ = getattr(train_loop, "__name__", "train_loop")

    def __call__(self, *config: Any) -> Any:
        """Run the loop in a worker, and send its timeline to the driver before Ray ends the worker, even on failure."""
        rank, training = ray.train.get_context().get_world_rank(), WatchedTraining()
        training.begin()
        try:
            return self._train_loop(*config)
        finally:
            try:
                timeline = training.leave()
                result: bytes | str = to_bytes(timeline) if timeline else "it has no GPU"
            except Exception as error:  # recording must not make a training fail
                result = str(error)
            ray.get(self._kept.keep.remote(rank, result))

    @property
    def timeline(self) -> Timeline:
        """The timeline of all ranks. A rank that was started again counts with its last run."""
        timelines, missing = list[Timeline](), list[str]()
        for rank, result in sorted(ray.get(self._kept.results.remote()).items()):
            if isinstance(result, bytes):
                timelines.append(from_bytes(result))
            else:
                missing.append(f"Rank {rank} is missing from this report: {result}")
        if not timelines:
            raise BadInput(missing[0] if missing else "no worker of this training has come to its end yet.")
        run = without_first_steps(merge([timeline for timeline in timelines if len(timeline)] or timelines[:1]))
        source = Path(inspect.getfile(self._train_loop)).name
        return run.change_facts(source=source, sources=(), notes=(*run.facts.notes, *missing))

    def explain(self) -> Any:
        """A `Diagnosis`: why the GPUs wait, and who waits for whom."""
        import keepbusy

        return keepbusy.explain(self.timeline)


class KeptRanks:
    """An actor that keeps the result of each rank: its timeline as bytes, or why there is none."""

    def __init__(self) -> None:
        self._results: dict[int, bytes | str] = {}

    def keep(self, rank: int, result: bytes | str) -> None:
        self._results[rank] = result

    def results(self) -> dict[int, bytes | str]:
        return self._results


# A cluster without GPUs, with ray.init(num_gpus=4) and ScalingConfig(use_gpu=True)


class VirtualGpus(TorchConfig):
    """`TorchTrainer(..., torch_config=VirtualGpus("h200"))`: each worker has virtual GPUs, as under `keepbusy run`."""

    def __init__(self, on: str = "h200", clock: Literal["measured", "modelled"] = "measured", **options: Any) -> None:
        super().__init__(**options)
        self.on, self.clock = on, clock

    @property
    def backend_cls(self) -> type[Backend]:
        return _VirtualBackend


class _VirtualBackend(TorchConfig().backend_cls):  # type: ignore[misc]
    """Starts the virtual GPUs before PyTorch's process group is made, whose links are virtual, too."""

    def on_start(self, worker_group: Any, backend_config: VirtualGpus) -> None:
        worker_group.execute(_take_virtual_gpus, backend_config.on, backend_config.clock == "measured")
        super().on_start(worker_group, backend_config)


def _take_virtual_gpus(on: str, measured: bool) -> None:
    from keepbusy.virtual.virtual_run import Options, start

    worker = ray.train.get_context()
    start(Options(on, worker.get_local_world_size(), measured), worker.get_world_rank())


# Traces of very many ranks, in files that all nodes can read


def each_on_ray(
    names: list[str], made: Callable[[str], Any], on_progress: Callable[[str, float], Any] | None = None
) -> Iterator[tuple[int, Any]]:
    """What is made of each file, in the order of completion. So many files are read at a time as there are cores."""
    ray.init(ignore_reinit_error=True, log_to_driver=False)
    task, unread = ray.remote(tried), iter(enumerate(names))
    cores = int(ray.cluster_resources().get("CPU", 1))
    waits = {task.remote(name, made): index for index, name in islice(unread, cores)}
    for done in range(1, len(names) + 1):
        (ended,), _ = ray.wait(list(waits), num_returns=1)
        yield waits.pop(ended), ray.get(ended)
        if on_progress:
            on_progress(f"reading {len(names)} traces on Ray", done / len(names))
        waits |= {task.remote(name, made): index for index, name in islice(unread, 1)}
