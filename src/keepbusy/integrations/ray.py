"""Ray: a training whose workers are all recorded, on real GPUs or virtual ones, and traces that a cluster reads."""

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
    """A train loop in whose place it stands: each worker is recorded, and the driver has one report of them all.

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
        """In a worker. What it leaves goes to the driver before Ray ends it, also where the loop fails."""
        rank, training = ray.train.get_context().get_world_rank(), WatchedTraining()
        training.begin()
        try:
            return self._train_loop(*config)
        finally:
            try:
                seen = training.leave()
                left: bytes | str = to_bytes(seen) if seen else "it has no GPU"
            except Exception as why:  # which is no reason for a training to fail
                left = str(why)
            ray.get(self._kept.keep.remote(rank, left))

    @property
    def timeline(self) -> Timeline:
        """Of all ranks; of one that was started again, the last time."""
        left = ray.get(self._kept.left.remote())
        seen = [from_bytes(one) for _, one in sorted(left.items()) if isinstance(one, bytes)]
        why = [f"Rank {rank} is missing from this report: {one}" for rank, one in left.items() if isinstance(one, str)]
        if not seen:
            raise BadInput(why[0] if why else "no worker of this training has come to its end yet.")
        whole = without_first_steps(merge([one for one in seen if len(one)] or seen[:1]))
        source = Path(inspect.getfile(self._train_loop)).name
        return whole.change_facts(source=source, sources=(), notes=(*whole.facts.notes, *why))

    def explain(self) -> Any:
        """A `Diagnosis`: why the GPUs wait, and who waits for whom."""
        import keepbusy

        return keepbusy.explain(self.timeline)


class KeptRanks:
    """An actor: what the workers left, by rank."""

    def __init__(self) -> None:
        self._left: dict[int, bytes | str] = {}

    def keep(self, rank: int, left: bytes | str) -> None:
        self._left[rank] = left

    def left(self) -> dict[int, bytes | str]:
        return self._left


# A cluster without GPUs: ray.init(num_gpus=4), ScalingConfig(use_gpu=True), and these


class VirtualGpus(TorchConfig):
    """`TorchTrainer(..., torch_config=VirtualGpus("h200"))`: each worker has virtual GPUs, as under `keepbusy run`."""

    def __init__(self, on: str = "h200", clock: Literal["measured", "modelled"] = "measured", **options: Any) -> None:
        super().__init__(**options)
        self.on, self.clock = on, clock

    @property
    def backend_cls(self) -> type[Backend]:
        return _VirtualBackend


class _VirtualBackend(TorchConfig().backend_cls):  # type: ignore[misc]
    """Before PyTorch's process group is made, whose links are virtual, too."""

    def on_start(self, worker_group: Any, backend_config: VirtualGpus) -> None:
        worker_group.execute(_take_virtual_gpus, backend_config.on, backend_config.clock == "measured")
        super().on_start(worker_group, backend_config)


def _take_virtual_gpus(on: str, measured: bool) -> None:
    from keepbusy.virtual.virtual_run import Options, start

    worker = ray.train.get_context()
    start(Options(on, worker.get_local_world_size(), measured), worker.get_world_rank())


# Very many ranks' traces, on files that all nodes see


def each_on_ray(
    names: list[str], made: Callable[[str], Any], on_progress: Callable[[str, float], Any] | None = None
) -> Iterator[tuple[int, Any]]:
    """What is made of each file, as it comes; of no more files at a time than the cluster has processors."""
    ray.init(ignore_reinit_error=True, log_to_driver=False)
    task, left = ray.remote(tried), iter(enumerate(names))
    cores = int(ray.cluster_resources().get("CPU", 1))
    waits = {task.remote(name, made): index for index, name in islice(left, cores)}
    for done in range(1, len(names) + 1):
        (ended,), _ = ray.wait(list(waits), num_returns=1)
        yield waits.pop(ended), ray.get(ended)
        if on_progress:
            on_progress(f"reading {len(names)} traces on Ray", done / len(names))
        waits |= {task.remote(name, made): index for index, name in islice(left, 1)}
