"""Two ranks over gloo: what `keepbusy.accumulate` defers, counted, and what it says when that fails. Prints JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel

from keepbusy.runtime.accumulate import accumulate


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def ddp(**options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(net(), bucket_cap_mb=1e-5, **options)


def fsdp(shape: tuple[int, ...] = (2,), **options: Any) -> nn.Sequential:
    model, mesh = net(), init_device_mesh("cpu", shape, mesh_dim_names=("replica", "shard")[-len(shape) :])
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def batches(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    return [torch.randn(3, 4, generator=generator) for _ in range(count)]


def sequence() -> int:
    """Collectives that this rank has issued in the default group."""
    return dist.distributed_c10d._get_default_group()._get_sequence_number_for_group()


def whole(values: Any) -> list[Any]:
    return [(one.full_tensor() if hasattr(one, "full_tensor") else one).tolist() for one in values]


def train(model: nn.Module, optimizer: Any, count: int, number: int = 8, **options: Any) -> dict[str, Any]:
    """What each micro-batch sent, and the weights in the end."""
    counts: list[dict[str, int]] = []
    for micro in accumulate(model, batches(number), count=count, **options):
        before = sequence()
        with CommDebugMode() as seen:
            (model(micro.batch).square().sum() * micro.scale).backward()
        counts.append({"all": sequence() - before} | {str(k): v for k, v in seen.get_comm_counts().items()})
        if micro.last:
            optimizer.step()
            optimizer.zero_grad()
    return {"counts": counts, "weights": whole(model.parameters())}


def naive(model: nn.Module, count: int, number: int = 8) -> list[Any]:
    """Every micro-batch sends its gradients."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for place, batch in enumerate(batches(number), 1):
        group = min(count, number - (place - 1) // count * count)
        (model(batch).square().sum() / group).backward()
        if place % count == 0 or place == number:
            optimizer.step()
            optimizer.zero_grad()
    return whole(model.parameters())


def trained(make: Callable[[], nn.Module], count: int = 4, number: int = 8, **options: Any) -> dict[str, Any]:
    model = make()
    found = train(model, torch.optim.SGD(model.parameters(), lr=0.1), count, number, **options)
    return found | {"naive": naive(make(), count, number)}


def said(does: Callable[[], object]) -> str:
    try:
        does()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def loop(model: nn.Module, body: Callable[[Any], None], count: int = 2, **options: Any) -> None:
    for micro in accumulate(model, batches(4), count=count, **options):
        body(micro)


def calls_the_inner_module() -> None:
    model = ddp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def body(micro: Any) -> None:
        model.module(micro.batch).sum().backward()
        if micro.last:
            optimizer.step()

    loop(model, body)


def passes_the_inner_module() -> None:
    model = ddp()
    loop(model.module, lambda micro: model(micro.batch).sum().backward())


def runs_forward_before() -> None:
    model = ddp()
    ahead = [model(batch).sum() for batch in batches(1)] * 4

    def body(micro: Any) -> None:
        ahead.pop().backward(retain_graph=True)

    loop(model, body)


def steps_each_time() -> None:
    model = ddp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def body(micro: Any) -> None:
        model(micro.batch).sum().backward()
        optimizer.step()

    loop(model, body)


def turns_sync_on_again() -> None:
    model = ddp()

    def body(micro: Any) -> None:
        model.require_backward_grad_sync = True
        model(micro.batch).sum().backward()

    loop(model, body)


def turns_sharded_sync_on_again() -> None:
    model = fsdp()

    def body(micro: Any) -> None:
        model.set_requires_gradient_sync(True)
        model(micro.batch).sum().backward()

    loop(model, body)


def makes_the_optimizer_first() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))

    def body(micro: Any) -> None:
        model(micro.batch).sum().backward()
        if micro.last:
            optimizer.step()

    loop(model, body)


def forgets_backward() -> None:
    loop(fsdp(), lambda micro: None)


def keeps_sharded_what_is_not() -> None:
    loop(fsdp(), lambda micro: None, keep_sharded=True)


def leaves_early() -> dict[str, Any]:
    """After a break, and after an error, the model is as it was."""
    model, flags = ddp(), []
    for _ in accumulate(model, batches(4), count=4):
        break
    flags.append(model.require_backward_grad_sync)
    said(lambda: loop(model, lambda micro: 1 / 0))
    flags.append(model.require_backward_grad_sync)
    sharded = fsdp()
    for _ in accumulate(sharded, batches(4), count=4):
        break
    sharded(batches(1)[0]).sum().backward()
    return {"ddp": flags, "fsdp": all(one.grad is not None for one in sharded.parameters())}


def evaluates_between() -> dict[str, Any]:
    """Whole weights of an evaluation just before, and one in the loop."""
    model = fsdp()
    with torch.no_grad():
        model(batches(1)[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for micro in accumulate(model, batches(4), count=2):
        (model(micro.batch).square().sum() * micro.scale).backward()
        if micro.last:
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                model(batches(1)[0])
    return {"weights": whole(model.parameters()), "naive": naive(fsdp(), 2, 4)}


def compiled() -> dict[str, Any]:
    model = torch.compile(ddp(), backend="eager")
    found = [train(model, torch.optim.SGD(model.parameters(), lr=0.0), 4)["counts"] for _ in range(2)]
    return {"counts": [one["all"] for one in found[0] + found[1]]}


RUNS: dict[str, Callable[[], Any]] = {
    "ddp": lambda: trained(ddp),
    "ddp of a static graph": lambda: trained(lambda: ddp(static_graph=True)),
    "ddp with unused parameters": lambda: trained(lambda: ddp(find_unused_parameters=True)),
    "ddp, short last group": lambda: trained(ddp, 4, 6),
    "fsdp": lambda: trained(fsdp),
    "fsdp, kept whole": lambda: trained(lambda: fsdp(reshard_after_forward=False)),
    "hsdp of replicas": lambda: trained(lambda: fsdp((2, 1))),
    "hsdp of replicas, kept sharded": lambda: trained(lambda: fsdp((2, 1)), keep_sharded=True),
    "hsdp of shards": lambda: trained(lambda: fsdp((1, 2))),
    "hsdp of shards, kept sharded": lambda: trained(lambda: fsdp((1, 2)), keep_sharded=True),
    "held in another module": lambda: trained(lambda: nn.Sequential(ddp())),
    "evaluates between": evaluates_between,
    "leaves early": leaves_early,
    "compiled": compiled,
}
ERRORS = [
    calls_the_inner_module,
    passes_the_inner_module,
    runs_forward_before,
    steps_each_time,
    turns_sync_on_again,
    turns_sharded_sync_on_again,
    makes_the_optimizer_first,
    forgets_backward,
    keeps_sharded_what_is_not,
]


if __name__ == "__main__":
    dist.init_process_group("gloo")
    found = {name: run() for name, run in RUNS.items()}
    found["errors"] = {one.__name__: said(one) for one in ERRORS}
    if dist.get_rank() == 0:
        os.write(1, json.dumps(found).encode() + b"\n")
    dist.destroy_process_group()
