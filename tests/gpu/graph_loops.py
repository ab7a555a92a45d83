"""Training loops that a graph must repeat exactly: each makes a step, and what happens around it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from keepbusy.runtime.graph.graphed_step import Graphed, graph

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]
Loop = Callable[[Wrap, int], list[Tensor]]


class Net(nn.Module):
    def __init__(self, dropout: float = 0.0, norm: bool = False) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)
        self.norm = nn.BatchNorm1d(16) if norm else nn.Identity()
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.dropout(self.norm(self.first(x)).relu()))


def net(**options: Any) -> Net:
    torch.manual_seed(0)
    return Net(**options).cuda()


def batches(count: int, size: int = 6, device: str = "cuda") -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        x = torch.randn(size, 8, generator=generator)
        yield x.to(device), torch.randint(0, 4, (size,), generator=generator).to(device)


def whole(model: Net, optimizer: torch.optim.Optimizer) -> Callable[[Tensor, Tensor], Tensor]:
    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return step


def adam(model: nn.Module, **options: Any) -> torch.optim.Adam:
    return torch.optim.Adam(model.parameters(), **{"lr": 1e-2, "capturable": True, **options})


def plain_sgd(wrap: Wrap, count: int) -> list[Tensor]:
    model = net()
    step = wrap(whole(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)))
    return [step(x, y) for x, y in batches(count)] + [*model.parameters()]


def dropout_and_clipping(wrap: Wrap, count: int) -> list[Tensor]:
    model = net(dropout=0.3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-2, device="cuda"), capturable=True)

    def train(x: Tensor, y: Tensor) -> dict[str, Tensor]:
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        return {"loss": loss, "norm": norm}

    step = wrap(train)
    found = [step(x, y) for x, y in batches(count)]
    return [one[name] for one in found for name in ("loss", "norm")] + [
        *model.parameters(),
        torch.rand(3, device="cuda"),
    ]


def scaled_and_clipped(wrap: Wrap, count: int) -> list[Tensor]:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-2, device="cuda"), fused=True, capturable=True)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**30, growth_interval=5)  # some steps overflow

    def train(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        return loss

    step = wrap(train)
    return [step(x, y) for x, y in batches(count)] + [*model.parameters(), torch.tensor(scaler.get_scale())]


def schedule_of_tensors(wrap: Wrap, count: int) -> list[Tensor]:
    """The rate is a tensor on the device, written at each step."""
    model = net()
    optimizer = adam(model, lr=torch.tensor(1e-2, device="cuda"))
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
    step, found = wrap(whole(model, optimizer)), []
    for x, y in batches(count):
        found.append(step(x, y))
        schedule.step()
    return [*found, *model.parameters()]


def schedules_in_the_step(wrap: Wrap, count: int) -> list[Tensor]:
    """Two of them, of which one steps the other two that it is made of."""
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, capturable=True)
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5)
    falling = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    schedules = [
        torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, falling], [5]),
        torch.optim.lr_scheduler.StepLR(optimizer, 4),
    ]

    def train(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        for schedule in schedules:
            schedule.step()
        return loss

    step = wrap(train)
    found = [step(x, y) for x, y in batches(count)]
    return [*found, torch.tensor([optimizer.param_groups[0]["lr"], warm.last_epoch]), *model.parameters()]


def schedule_of_floats(wrap: Wrap, count: int) -> list[Tensor]:
    """The rate is a Python float, new at each step."""
    model = net()
    optimizer = adam(model)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=count)
    step, found = wrap(whole(model, optimizer)), []
    for x, y in batches(count):
        found.append(step(x, y))
        schedule.step()
        assert isinstance(optimizer.param_groups[0]["lr"], float)
    return [*found, *model.parameters()]


def schedule_of_constants(wrap: Wrap, count: int) -> list[Tensor]:
    """SGD takes a rate for a constant, and a tensor where its step is fused: as it is from the first change on."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [count // 3, 2 * count // 3])
    step, found = wrap(whole(model, optimizer)), []
    for x, y in batches(count):
        found.append(step(x, y))
        schedule.step()
    return [*found, *model.parameters()]


def _halves(wrap: Wrap, count: int, clear: Callable[[torch.optim.Optimizer], None], micro: int) -> list[Tensor]:
    model = net(dropout=0.2)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def forward_and_backward(x: Tensor, y: Tensor) -> Tensor:
        loss = cross_entropy(model(x), y) / micro
        loss.backward()
        return loss

    step, found = wrap(forward_and_backward), []
    for number, (x, y) in enumerate(batches(count), 1):
        found.append(step(x, y))
        if number % micro == 0:
            optimizer.step()
            clear(optimizer)
    return [*found, *model.parameters()]


def forward_and_backward(wrap: Wrap, count: int) -> list[Tensor]:
    return _halves(wrap, count, lambda optimizer: optimizer.zero_grad(), 1)


def accumulation(wrap: Wrap, count: int) -> list[Tensor]:
    return _halves(wrap, count, lambda optimizer: optimizer.zero_grad(), 3)


def accumulation_in_place(wrap: Wrap, count: int) -> list[Tensor]:
    return _halves(wrap, count, lambda optimizer: optimizer.zero_grad(set_to_none=False), 3)


def gradients_cleared_last(wrap: Wrap, count: int) -> list[Tensor]:
    model = net()
    optimizer = adam(model)

    def train(x: Tensor, y: Tensor) -> Tensor:
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    step = wrap(train)
    return [step(x, y) for x, y in batches(count)] + [*model.parameters()]


def gradients_applied_first(wrap: Wrap, count: int) -> list[Tensor]:
    """The step begins with the gradients of the one before."""
    model = net()
    optimizer = adam(model)

    def train(x: Tensor, y: Tensor) -> Tensor:
        optimizer.step()
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        return loss

    step = wrap(train)
    return [step(x, y) for x, y in batches(count)] + [*model.parameters()]


def evaluation_between(wrap: Wrap, count: int) -> list[Tensor]:
    model = net(dropout=0.3, norm=True)
    step, found = wrap(whole(model, adam(model))), []
    for number, (x, y) in enumerate(batches(count)):
        found.append(step(x, y))
        if number % 4 == 3:
            model.eval()
            with torch.no_grad():
                found.append(model(x))
            model.train()
    return [*found, *model.parameters(), *model.buffers()]


def two_shapes(wrap: Wrap, count: int) -> list[Tensor]:
    model = net()
    step, found = wrap(whole(model, adam(model))), []
    for number, ((x, y), (small, few)) in enumerate(zip(batches(count), batches(count, size=3), strict=True)):
        found.append(step(small, few) if number % 5 == 4 else step(x, y))
    return [*found, *model.parameters()]


def inputs_of_the_host(wrap: Wrap, count: int) -> list[Tensor]:
    """The loop writes the next batch where the last one was."""
    model = net()
    inner = whole(model, adam(model))

    def train(batch: dict[str, Any], scale: float) -> Tensor:
        return inner(batch["x"].to("cuda") * scale, batch["y"].to("cuda"))

    step, found = wrap(train), []
    x, y = torch.empty(6, 8).pin_memory(), torch.empty(6, dtype=torch.long)
    for new_x, new_y in batches(count, device="cpu"):
        x.copy_(new_x)
        y.copy_(new_y)
        found.append(step({"x": x, "y": y}, 0.5))
    return [*found, *model.parameters()]


def writes_to_its_argument(wrap: Wrap, count: int) -> list[Tensor]:
    model = net()
    inner = whole(model, adam(model))

    def train(x: Tensor, y: Tensor) -> Tensor:
        x.mul_(0.5)
        return inner(x, y)

    step, found = wrap(train), []
    for x, y in batches(count):
        found += [step(x, y), x]
    return found


def autocast_outside(wrap: Wrap, count: int) -> list[Tensor]:
    """Around one call each, as autocast keeps casts of the weights until its end."""
    model = net()
    step, found = wrap(whole(model, adam(model))), []
    for x, y in batches(count):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            found.append(step(x, y))
    return [*found, *model.parameters()]


def checkpoint_in_the_middle(wrap: Wrap, count: int) -> list[Tensor]:
    """Loading gives the optimizer new tensors for its state."""
    model = net()
    optimizer = adam(model)
    step, found, kept = wrap(whole(model, optimizer)), [], {}
    for number, (x, y) in enumerate(batches(count)):
        if number == count // 3:
            kept = {"model": {n: t.clone() for n, t in model.state_dict().items()}, "optimizer": optimizer.state_dict()}
            kept["optimizer"] = torch.utils._pytree.tree_map_only(Tensor, torch.clone, kept["optimizer"])
        if number == 2 * count // 3:
            model.load_state_dict(kept["model"])
            optimizer.load_state_dict(kept["optimizer"])
        found.append(step(x, y))
    return [*found, *model.parameters()]


DRAWING: list[Loop] = [
    dropout_and_clipping,
    forward_and_backward,
    accumulation,
    accumulation_in_place,
    evaluation_between,
]
LOOPS: list[Loop] = [
    plain_sgd,
    scaled_and_clipped,
    schedule_of_tensors,
    schedules_in_the_step,
    schedule_of_constants,
    gradients_cleared_last,
    gradients_applied_first,
    two_shapes,
    inputs_of_the_host,
    writes_to_its_argument,
    autocast_outside,
    checkpoint_in_the_middle,
]


class Kept:
    """Wraps a step and keeps what came of it."""

    graphed: Graphed[..., Any]

    def __call__(self, step: Callable[..., Any]) -> Callable[..., Any]:
        self.graphed = graph(step)
        return self.graphed


def outcome(loop: Loop, wrap: Wrap, count: int) -> list[Any]:
    """Everything that the loop returned, read at its very end: nothing that it kept may have changed since."""
    torch.manual_seed(7)
    return [one.detach().cpu().tolist() for one in loop(wrap, count)]
