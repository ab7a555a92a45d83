"""Ranks over gloo: what `keepbusy.spread` trains in each layout, beside one process, and what it says. Prints JSON."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from spread_models import GPT, HEADS, WIDTH, WORDS, Encoder, Packed, Repeated, ResNet
from torch import Tensor, nn

from keepbusy.runtime.accumulate import accumulate
from keepbusy.runtime.save_later import save_later
from keepbusy.runtime.spread import resume, spread_model, state_of
from keepbusy.runtime.spread.layout import own_part, share
from keepbusy.runtime.spread.spread_model import spread

RANKS = int(os.environ["WORLD_SIZE"])
ROWS = 8
LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    2: {**{f"shard={one}": {"shard": one} for one in range(4)}, "tensor=2": {"tensor": 2}},
    4: {
        "shard=3": {"shard": 3},
        **{f"shard={one}, tensor=2": {"shard": one, "tensor": 2} for one in (0, 2, 3)},
    },
}
MODELS: dict[str, Callable[..., nn.Module]] = {"GPT": GPT, "ResNet": ResNet, "encoder": Encoder}
MODELS |= {"packed": Packed, "repeated": Repeated}
Batch = tuple[Tensor, Tensor]
TOGETHER = None if RANKS == 2 else False
"""Whether gradients are clipped as a list. PyTorch takes ten seconds to find out how, where tensors
lie on two dimensions, for each layout anew; so on four ranks it is done in one of them."""


def made(kind: str, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    """With a group of its own for what has one dimension: another learning rate, and no decay."""
    torch.manual_seed(7)
    model = MODELS[kind](**options)
    flat = [one for one in model.parameters() if one.dim() < 2]
    groups = [{"params": [one for one in model.parameters() if one.dim() > 1]}, {"params": flat, "lr": 3e-3}]
    groups[1]["weight_decay"] = 0.0
    return model, torch.optim.AdamW(groups, lr=1e-3, weight_decay=0.1)


def batch(kind: str, step: int) -> Batch:
    generator = torch.Generator().manual_seed(step)
    if kind == "ResNet":
        return torch.randn(ROWS, 3, 6, 6, generator=generator), torch.randint(10, (ROWS,), generator=generator)
    return tuple(torch.randint(WORDS, (ROWS, 12), generator=generator) for _ in range(2))


def batches(kind: str, first: int = 0, count: int = 3) -> list[Batch]:
    return [batch(kind, step) for step in range(first, first + count)]


def cost(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x).flatten(0, -2), y.flatten())


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, pairs: Iterable[Batch], together: bool | None = TOGETHER
) -> list[float]:
    """A loop that knows nothing of ranks; losses are those of the whole batch."""
    losses = []
    for x, y in pairs:
        loss = cost(model, x, y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=together)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [averaged(one) for one in losses]


def averaged(loss: Tensor) -> float:
    total = loss.clone()
    dist.all_reduce(total)
    return float(total) / RANKS


def layouts_of(kind: str) -> dict[str, Any]:
    found = {"one process": train(*made(kind), batches(kind))}
    for name, layout in LAYOUTS[RANKS].items():
        if kind != "ResNet" or "tensor" not in layout:
            found[name] = train(*spread(*made(kind), batches(kind), example=batch(kind, 9)[0], **layout))
    return found


def llama() -> nn.Module:
    from transformers.models.llama.modeling_llama import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": WIDTH, "intermediate_size": 64, "num_attention_heads": HEADS, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, num_hidden_layers=2, **sizes))


def vision() -> nn.Module:
    from timm.models.vision_transformer import VisionTransformer

    return VisionTransformer(16, 8, num_classes=10, embed_dim=WIDTH, depth=2, num_heads=HEADS)


def public(make: Callable[[], nn.Module], example: Any, rate: Callable[[nn.Module], Tensor]) -> dict[str, Any]:
    """A model of another library, as it comes."""
    found: dict[str, Any] = {}
    for name, layout in {"one process": None, "shard=3": {"shard": 3}, "tensor=2": {"tensor": 2}}.items():
        torch.manual_seed(0)
        try:
            model, optimizer = sgd(make())
        except ImportError as error:
            return {"missing": str(error.name)}
        if layout is not None:
            model, optimizer = spread(model, optimizer, example=example, **layout)
        losses = []
        for _ in range(3):
            loss = rate(model)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(averaged(loss.detach()))
        found[name] = losses
    return found


def public_llama() -> dict[str, Any]:
    words = batch("GPT", 1)[0]
    return public(llama, {"input_ids": words, "labels": words}, lambda model: model(input_ids=words, labels=words).loss)


def public_vision() -> dict[str, Any]:
    pictures = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    return public(vision, pictures, lambda model: model(pictures).square().mean())


def without_an_example() -> dict[str, Any]:
    found = {"one process": train(*made("GPT"), batches("GPT"))}
    for shard in range(4):
        model, optimizer = made("GPT")
        if dist.get_rank():  # other ranks were made with another seed
            nn.init.normal_(model.head.weight)
        found[f"shard={shard}"] = train(*spread(model, optimizer, batches("GPT"), shard=shard))
    return found


def with_states_from_before() -> dict[str, Any]:
    """Momenta, and a schedule that holds the optimizer."""

    def halfway() -> tuple[Any, Any, Any]:
        model, optimizer = made("GPT")
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        train(model, optimizer, batches("GPT", 5, 2))
        schedule.step()
        return model, optimizer, schedule

    found = {}
    for name, layout in {"one process": None, **LAYOUTS[RANKS]}.items():
        model, optimizer, schedule = halfway()
        pairs: Any = batches("GPT")
        if layout is not None:
            model, optimizer, pairs = spread(model, optimizer, pairs, example=batch("GPT", 9)[0], **layout)
        schedule.step()
        together = None if name == "shard=3, tensor=2" else TOGETHER
        losses = train(model, optimizer, pairs, together)
        found[name] = [*losses, *(group["lr"] for group in optimizer.param_groups)]
    return found


class Normed(torch.optim.Optimizer):
    """Takes norms of whole parameters: a slice of one would be stepped too far."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for one in group["params"]:
                one.add_(one.grad / one.grad.norm(), alpha=-group["lr"])


def normed() -> dict[str, Any]:
    found = {}
    for name, layout in {"one process": None, **{f"shard={one}": {"shard": one} for one in (0, 1, 3)}}.items():
        model, _ = made("GPT")
        optimizer = Normed(model.parameters(), {"lr": 1e-2})
        pairs: Any = batches("GPT")
        if layout is not None:
            model, optimizer, pairs = spread(model, optimizer, pairs, **layout)
        found[name] = train(model, optimizer, pairs)
    return found


def accumulated() -> dict[str, Any]:
    found = {}
    for name, layout in {"one process": None, **LAYOUTS[RANKS]}.items():
        model, optimizer = made("GPT")
        pairs: Any = batches("GPT", 0, 4)
        if layout is not None:
            model, optimizer, pairs = spread(model, optimizer, pairs, example=batch("GPT", 9)[0], **layout)
        for micro in accumulate(model, pairs, count=2):
            (cost(model, *micro.batch) * micro.scale).backward()
            if micro.last:
                optimizer.step()
                optimizer.zero_grad()
        found[name] = train(model, optimizer, [])
        found[name] = [averaged(cost(model, *pair).detach()) for pair in pairs]
    return found


def scaled() -> dict[str, Any]:
    """One rank's second step overflows: all must skip it."""
    found = {}
    for name, layout in {"one process": None, **LAYOUTS[RANKS]}.items():
        model, optimizer = made("GPT")
        pairs: Any = batches("GPT")
        if layout is not None:
            model, optimizer, pairs = spread(model, optimizer, pairs, example=batch("GPT", 9)[0], **layout)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        losses = []
        for step, (x, y) in enumerate(pairs):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = cost(model, x, y)
            overflows = step == 1 and (layout is None or dist.get_rank() == RANKS - 1)
            scaler.scale(loss * float("inf") if overflows else loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            losses.append(averaged(loss.detach()))
        found[name] = [*losses, scaler.get_scale() / 1024]
    return found


def trained_and_resumed(kind: str, *names: str) -> dict[str, Any]:
    """In these layouts or in all, and the checkpoint that each of them writes, read by another one."""
    with tempfile.TemporaryDirectory() as mine:
        folder: list[Any] = [mine]
        dist.broadcast_object_list(folder)
        found = _resumed_from(Path(folder[0]), kind, names or (*LAYOUTS[RANKS],))
        dist.barrier()
        return found


def _resumed_from(root: Path, kind: str, names: Sequence[str]) -> dict[str, Any]:
    example = batch(kind, 9)[0]
    model, optimizer = made(kind)
    trained = {"one process": train(model, optimizer, batches(kind, 0, 2))}
    resumed, saving = {"one process": train(model, optimizer, batches(kind, 2, 2))}, None
    for name in names:
        model, optimizer, pairs = spread(*made(kind), batches(kind, 0, 2), example=example, **LAYOUTS[RANKS][name])
        trained[name] = train(model, optimizer, pairs)
        saving = save_later(state_of(model, optimizer), root / name)
    assert saving is not None
    saving.wait()
    dist.barrier()
    for written, read in [*zip(names, [*names[1:], names[0]], strict=True), (names[0], names[-1])]:
        model, optimizer, pairs = spread(*made(kind), batches(kind, 2, 2), example=example, **LAYOUTS[RANKS][read])
        resume(model, optimizer, root / written)
        resumed[f"{written} read as {read}"] = train(model, optimizer, pairs)
    return {"trained": trained, "resumed": resumed}


def packed() -> dict[str, Any]:
    """What trains, which parameters are cut, and what a state says of rows that lie in another order."""
    layout = {"tensor": 2} if RANKS == 2 else {"shard": 3, "tensor": 2}
    model, optimizer, pairs = spread(*made("packed"), batches("packed"), example=batch("packed", 9)[0], **layout)
    state, right = state_of(model)["model"], made("packed")[0].state_dict()
    own = all(torch.equal(state[name].full_tensor(), one) for name, one in right.items())
    cut = [name for name, one in model.named_parameters() if one.placements[-1].is_shard()]
    losses = {"one process": train(*made("packed"), batches("packed")), "packed": train(model, optimizer, pairs)}
    return {"losses": losses, "cut": cut, "own": own}


def sequences() -> dict[str, Any]:
    """Each rank of two holds half of every sequence between layers; also where activations are dropped."""
    layout = {"tensor": 2, "shard": 0 if RANKS == 2 else 3, "plan": "sequence"}
    found: dict[str, Any] = {}
    for kind in ("GPT", "packed"):
        model, optimizer, pairs = spread(*made(kind), batches(kind), example=batch(kind, 9)[0], **layout)
        cut = train(model, optimizer, pairs)
        found[kind] = {"one process": train(*made(kind), batches(kind)), "cut": cut}
    for kind in ("GPT", "repeated"):
        pair = made(kind, dropout=0.5)
        model, optimizer, pairs = spread(*pair, batches("GPT"), example=batch("GPT", 9)[0], **layout)
        torch.manual_seed(5)
        found[f"{kind} that drops"] = train(model, optimizer, pairs)
    return found


def dropped(**layout: int) -> dict[str, Any]:
    """What random numbers outside and inside of regions are, by rank."""
    model, optimizer = made("GPT", dropout=0.5)
    model, _ = spread(model, optimizer, example=batch("GPT", 9)[0], **layout)
    outside, inside = [], []
    model.blocks[0].drop.register_forward_hook(lambda _m, _a, out: outside.append(int((out == 0).sum())))
    model.blocks[0].attention.out.register_forward_pre_hook(lambda _m, args: inside.append(float(args[0].sum())))
    with torch.no_grad():
        model(batch("GPT", 0)[0])
    told: list[Any] = [None] * RANKS
    dist.all_gather_object(told, (outside[0], inside[0]))
    return {"outside": [one for one, _ in told], "inside": [one for _, one in told]}


def loaded() -> dict[str, Any]:
    """Rows that each rank gets of a shuffled `DataLoader`, of one epoch and the next."""
    from keepbusy.runtime.spread.layout import lay_out

    loader = torch.utils.data.DataLoader(torch.arange(18), batch_size=8, shuffle=True)
    shared = share(loader, lay_out(0, None))
    told: list[Any] = [None] * RANKS
    dist.all_gather_object(told, [[one.tolist() for one in shared] for _ in range(2)])
    return {"ranks": told, "length": len(shared)}


def said(does: Callable[[], object]) -> str:
    try:
        does()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


class Halves(nn.Module):
    """Whose loss is not a mean over rows: halves of a batch give other gradients than the whole."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * len(x)


class Twice(nn.Module):
    """A parameter in two blocks that are wrapped apart."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3))
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.layers[2].weight = self.layers[0].weight

    def forward(self, x: Tensor) -> Tensor:
        for one in self.layers:
            x = one(x)
        return x


class Partly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


def sgd(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def calls_the_module_inside() -> None:
    model, optimizer = spread(*sgd(nn.Linear(4, 4)))
    model.module(torch.randn(2, 4)).square().sum().backward()
    optimizer.step()


def shares_what_is_shared() -> None:
    sampler = torch.utils.data.DistributedSampler(range(8))
    spread(*sgd(nn.Linear(4, 4)), torch.utils.data.DataLoader(range(8), 4, sampler=sampler))


def reads_other_batches() -> None:
    model, optimizer = spread(*made("GPT"), tensor=2, example=batch("GPT", 9)[0])
    train(model, optimizer, [batch("GPT", dist.get_rank())])


class Reaching(nn.Module):
    """Reads a parameter of a block that it does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for one in self.layers[:2]:
            x = one(x)
        return nn.functional.linear(x, self.layers[2].weight)


class Borrowing(GPT):
    """Its head is not a module: it reads the embedding."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.blocks[0](self.words(tokens))
        return nn.functional.linear(x, self.words.weight)


def reads_what_another_holds() -> None:
    spread(*sgd(Borrowing()), tensor=2, example=batch("GPT", 9)[0])


def trains_another_model() -> None:
    spread(nn.Linear(4, 4), sgd(nn.Linear(4, 4))[1])


def weighs_rows_by_the_batch() -> None:
    spread(*sgd(Halves()), shard=3, example=torch.randn(4, WIDTH))


def is_compiled() -> None:
    spread(*sgd(torch.compile(nn.Linear(4, 4), backend="eager")))


def has_hooks_that_would_stay_behind() -> None:
    model = nn.Linear(4, 4)
    model.weight.register_hook(lambda gradient: gradient.clamp(-1, 1))
    spread(*sgd(model), shard=3)


def thaws_what_ddp_does_not_know() -> None:
    model = Partly()
    model.used.requires_grad_(False)
    model, optimizer = spread(*sgd(model))
    model.used.requires_grad_(True)
    model.module(torch.randn(4, 4)).square().sum().backward()
    optimizer.step()


def made_an_optimizer_afterwards() -> None:
    for shard in (0, 3):
        model, _ = spread(GPT(), shard=shard, example=batch("GPT", 9)[0])
        before = [own_part(one).detach().clone() for one in model.parameters()]
        train(model, torch.optim.SGD(model.parameters(), lr=0.1), batches("GPT", 0, 1))
        after = [own_part(one).detach() for one in model.parameters()]
        pairs = zip(model.named_parameters(), before, after, strict=True)
        kept = [name for (name, _), old, new in pairs if torch.equal(old, new)]
        assert all(name.endswith("key.bias") for name in kept), kept  # which the softmax cancels


def rounds_as_bfloat16_does() -> None:
    for shard in (0, 2):
        spread(*sgd(GPT().bfloat16()), shard=shard, example=batch("GPT", 9)[0])


def wraps_twice() -> None:
    spread(*spread(*sgd(nn.Linear(4, 4))))


def cuts_what_cannot_be() -> None:
    spread(*sgd(nn.Linear(4, 4)), tensor=2, example=torch.randn(2, 4))


def cuts_sequences_that_are_read_whole() -> None:
    spread(*made("encoder"), tensor=2, plan="sequence", example=batch("encoder", 9)[0])


def cuts_sequences_that_do_not_divide() -> None:
    spread(*made("GPT"), tensor=2, plan="sequence", example=batch("GPT", 9)[0][:, :11])


def cuts_without_an_example() -> None:
    spread(*sgd(nn.Linear(4, 4)), tensor=2)


def divides_badly() -> None:
    spread(*sgd(nn.Linear(4, 4)), tensor=3, example=torch.randn(2, 4))


def has_no_values() -> None:
    spread(nn.Linear(4, 4, device="meta"))


def resumes_from_nothing() -> None:
    resume(*sgd(nn.Linear(4, 4)), "/nowhere/at/all")


def reached(kind: type[nn.Module]) -> dict[str, Any]:
    """Parameters that another module reads, or holds too."""
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    found = {}
    for name, layout in {"one process": None, "shard=3": {"shard": 3, "example": x}}.items():
        torch.manual_seed(0)
        model, optimizer = sgd(kind())
        if layout is not None:
            model, optimizer = spread(model, optimizer, **layout)
        losses = []
        for _ in range(3):
            loss = model(x).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss))
        found[name] = losses
    return found


def unused_parameters() -> list[float]:
    """Found in the example; without it DDP would fail at the second step."""
    model, optimizer = spread(*sgd(Partly()), example=torch.randn(4, 4))
    for _ in range(3):
        model(torch.ones(4, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [float(one.detach().sum()) for one in model.used.parameters()]


def kept_whole() -> list[str]:
    """A plan that names what is not to be cut."""
    model, _ = spread(*made("GPT"), tensor=2, plan={"*.attention": "whole"}, example=batch("GPT", 9)[0])
    return sorted({name for name, one in model.named_parameters() if any(p.is_shard() for p in one.placements)})


RUNS: dict[str, Callable[[], Any]] = {
    "GPT": lambda: trained_and_resumed("GPT"),
    "states from before": with_states_from_before,
    "packed": packed,
    "sequences": sequences,
    "dropout": lambda: dropped(tensor=2) if RANKS > 2 else dropped(),
}
AMONG_TWO: dict[str, Callable[[], Any]] = {
    "ResNet": lambda: layouts_of("ResNet"),
    "encoder": lambda: layouts_of("encoder"),
    "packed layers": lambda: trained_and_resumed("packed", "shard=0", "shard=3", "tensor=2"),
    "norms of the optimizer": normed,
    "accumulate": accumulated,
    "scaler": scaled,
    "without an example": without_an_example,
    "transformers": public_llama,
    "timm": public_vision,
    "loader": loaded,
    "tied over blocks": lambda: reached(Twice),
    "read by another": lambda: reached(Reaching),
    "unused": unused_parameters,
    "kept whole": kept_whole,
    "dropout of ranks that share layers": lambda: dropped(tensor=2),
    "errors": lambda: {one.__name__: said(one) for one in ERRORS},
}
ERRORS = [
    calls_the_module_inside,
    reads_other_batches,
    shares_what_is_shared,
    reads_what_another_holds,
    trains_another_model,
    weighs_rows_by_the_batch,
    is_compiled,
    has_hooks_that_would_stay_behind,
    thaws_what_ddp_does_not_know,
    made_an_optimizer_afterwards,
    rounds_as_bfloat16_does,
    wraps_twice,
    cuts_what_cannot_be,
    cuts_without_an_example,
    cuts_sequences_that_are_read_whole,
    cuts_sequences_that_do_not_divide,
    divides_badly,
    has_no_values,
    resumes_from_nothing,
]


if __name__ == "__main__":
    import time

    spread_model.LARGE = 1 << 12  # so that small models have large parameters, too

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = {}
    for name, run in (RUNS | (AMONG_TWO if RANKS == 2 else {})).items():
        if len(sys.argv) > 1 and name not in sys.argv[1:]:
            continue
        began = time.perf_counter()
        found[name] = run()
        if dist.get_rank() == 0:
            sys.stderr.write(f"{name}: {time.perf_counter() - began:.1f} s\n")
    if dist.get_rank() == 0:
        os.write(1, json.dumps(found).encode() + b"\n")
    dist.destroy_process_group()
