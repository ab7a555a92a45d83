"""Calls whose kernels are so short that they never matter: what they cost the host. And work of the host alone."""

import time
from collections.abc import Callable, Iterator

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

from calls import FULL, HALF, Call, Make, Prepare, below, both, new


def chain(make: Make, count: int = 20) -> Prepare:
    """So many gradients in one pass of the engine, which is what a model is; called once, it counts as `count`."""

    def prepare() -> Callable[[], object]:
        does, leaves = make()
        losses = [does() for _ in range(count)]
        grads = [torch.ones_like(one) for one in losses]
        return lambda: torch.autograd.backward(losses, grads, retain_graph=True, inputs=leaves)

    return prepare


def simple() -> Iterator[Call]:
    def on(does: Callable[[torch.Tensor], object], grad: bool = False, dtype: torch.dtype = FULL) -> Prepare:
        def prepare() -> Callable[[], object]:
            x = new(64, 64, dtype=dtype, grad=grad)
            return lambda: does(x)

        return prepare

    index, mask = below(64, 64), below(2, 64) > 0
    verbs: dict[str, Callable[[torch.Tensor], object]] = {
        "add": lambda x: x + x,
        "add number": lambda x: x + 1.0,
        "mul_": lambda x: x.mul_(1.0),
        "relu": torch.relu,
        "gelu": F.gelu,
        "exp": torch.exp,
        "cast": lambda x: x.to(HALF),
        "clone": torch.clone,
        "copy_": lambda x: x.copy_(x),
        "contiguous": lambda x: x.t().contiguous(),
        "compare": lambda x: x > 0,
        "where": lambda x: torch.where(x > 0, x, 0.0),
        "masked_fill": lambda x: x.masked_fill(x > 0, 0.0),
        "sum": torch.sum,
        "mean rows": lambda x: x.mean(-1),
        "norm": lambda x: x.norm(),
        "argmax": lambda x: x.argmax(-1),
        "max": lambda x: x.max(-1),
        "isnan": torch.isnan,
        "softmax": lambda x: x.softmax(-1),
        "mm": lambda x: x @ x,
        "addmm": lambda x: torch.addmm(x, x, x),
        "linear": lambda x: F.linear(x, x, x[0]),
        "bmm": lambda x: torch.bmm(x[None], x[None]),
        "einsum": lambda x: torch.einsum("ij,jk->ik", x, x),
        "cat": lambda x: torch.cat([x, x]),
        "stack": lambda x: torch.stack([x, x]),
        "index": lambda x: x[index],
        "index_select": lambda x: x.index_select(0, index),
        "gather": lambda x: x.gather(0, index[None]),
        "scatter_add": lambda x: x.scatter_add_(0, index[None], x),
        "index_put": lambda x: x.index_put_((index,), x),
        "embedding": lambda x: F.embedding(index, x),
        "layer_norm": lambda x: F.layer_norm(x, (64,)),
        "dropout": lambda x: F.dropout(x, 0.1),
        "attention": lambda x: F.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None]),
        "cross_entropy": lambda x: F.cross_entropy(x, index),
        "mse_loss": lambda x: F.mse_loss(x, x),
        "cumsum": lambda x: x.cumsum(0),
        "sort": lambda x: x.sort(),
        "topk": lambda x: x.topk(4),
        "tril": torch.tril,
        "fill": lambda x: x.fill_(0.0),
        "normal": lambda x: x.normal_(),
        "randn": lambda x: torch.randn(64, 64, device="cuda"),
        "randint": lambda x: torch.randint(0, 9, (64,), device="cuda"),
        "zeros": lambda x: torch.zeros(64, device="cuda"),
        "zeros_like": torch.zeros_like,
        "arange": lambda x: torch.arange(64, device="cuda"),
        "empty": lambda x: torch.empty(64, device="cuda"),
        "empty_like": torch.empty_like,
        "view": lambda x: x.view(-1),
        "t": lambda x: x.t(),
        "select": lambda x: x[0],
        "chunk": lambda x: x.chunk(3),
        "permute": lambda x: x.view(4, 16, 64).permute(2, 0, 1),
        "unsqueeze": lambda x: x.unsqueeze(0),
        "detach": lambda x: x.detach(),
        # these wait
        "item": lambda x: x[0, 0].item(),
        "bool": lambda x: bool((x > 0).any()),
        "cpu": lambda x: x.cpu(),
        "tolist": lambda x: x[0].tolist(),
        "mask": lambda x: x[mask],
        "nonzero": lambda x: x.nonzero(),
        "synchronize": lambda x: torch.cuda.synchronize(),
        "unique": lambda x: index.unique(),
    }
    for label, does in verbs.items():
        yield label, on(does)
    for label in ("add", "gelu", "cast", "mm", "linear", "view", "select", "sum", "cat", "attention", "cross_entropy"):
        yield f"{label} recorded", on(verbs[label], grad=True)
    ones, event, side = torch.ones(64), torch.cuda.Event(), torch.cuda.Stream()
    pinned = ones.pin_memory()
    yield "to device", lambda: lambda: ones.to("cuda")
    yield "to device pinned", lambda: lambda: pinned.to("cuda", non_blocking=True)
    yield "tensor", lambda: lambda: torch.tensor([1.0, 2.0], device="cuda")
    yield "record", lambda: lambda: event.record()
    yield "wait_stream", lambda: lambda: side.wait_stream(torch.cuda.current_stream())

    def switch() -> Callable[[], object]:
        def switched() -> None:
            with torch.cuda.stream(side):
                pass

        return switched

    yield "stream context", switch


def gradients() -> Iterator[Call]:
    def leaf(does: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype = FULL) -> Prepare:
        def make() -> tuple[Callable[[], torch.Tensor], list[torch.Tensor]]:
            x = new(64, 64, dtype=dtype, grad=True)
            return lambda: does(x), [x]

        return chain(make)

    index = below(64, 64)
    for label, does in {
        "add": lambda x: x + 1.0,
        "mul": lambda x: x * x,
        "gelu": F.gelu,
        "relu": torch.relu,
        "cast": lambda x: x.to(HALF),
        "mm": lambda x: x @ x,
        "linear": lambda x: F.linear(x, x, x[0]),
        "sum": torch.sum,
        "view": lambda x: x.view(-1),
        "select": lambda x: x[0],
        "cat": lambda x: torch.cat([x, x]),
        "softmax": lambda x: x.softmax(-1),
        "layer_norm": lambda x: F.layer_norm(x, (64,), x[0], x[0]),
        "embedding": lambda x: F.embedding(index, x),
        "index": lambda x: x[index],
        "dropout": lambda x: F.dropout(x, 0.1),
        "attention": lambda x: F.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None]),
        "cross_entropy": lambda x: F.cross_entropy(x, index),
    }.items():
        yield f"20 {label} backward", leaf(does)


def modules() -> Iterator[Call]:
    """Layers as a training step calls them: under autocast, with gradients; and steps of optimizers."""

    def layer(build: Callable[[], nn.Module], *shape: int, half: bool = True) -> Callable[[], tuple]:
        def make() -> tuple[Callable[[], torch.Tensor], list[torch.Tensor]]:
            net, x = build().cuda(), new(*shape, grad=True)

            def forward() -> torch.Tensor:
                with torch.autocast("cuda", dtype=HALF, enabled=half):
                    return net(x)

            return forward, [x, *net.parameters()]

        return make

    for name, build, shape in [
        ("identities", lambda: nn.Sequential(*[nn.Identity() for _ in range(10)]), (8, 64)),
        ("linears", lambda: nn.Sequential(*[nn.Linear(64, 64) for _ in range(10)]), (8, 64)),
        ("layer norms", lambda: nn.Sequential(*[nn.LayerNorm(64) for _ in range(10)]), (8, 64)),
        ("relus", lambda: nn.Sequential(*[nn.ReLU() for _ in range(10)]), (8, 64)),
        ("encoder layer", lambda: nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), (2, 16, 64)),
        ("lstm", lambda: _First(nn.LSTM(64, 64)), (8, 4, 64)),
        ("convolutions", lambda: nn.Sequential(*[nn.Conv2d(8, 8, 3, 1, 1) for _ in range(10)]), (2, 8, 8, 8)),
        ("batch norms", lambda: nn.Sequential(*[nn.BatchNorm2d(8) for _ in range(10)]), (2, 8, 8, 8)),
    ]:
        for half in (True, False):
            yield from both(f"{name}{' half' if half else ''}", layer(build, *shape, half=half))

    def parameters() -> list[torch.Tensor]:
        ones = [new(64, 64, grad=True) for _ in range(50)]
        for one in ones:
            one.grad = torch.zeros_like(one)
        return ones

    for label, step in {
        "adamw foreach": lambda ones: torch.optim.AdamW(ones, foreach=True).step,
        "adamw fused": lambda ones: torch.optim.AdamW(ones, fused=True).step,
        "adamw one by one": lambda ones: torch.optim.AdamW(ones, foreach=False).step,
        "sgd": lambda ones: torch.optim.SGD(ones, 0.1).step,
        "sgd momentum": lambda ones: torch.optim.SGD(ones, 0.1, 0.9).step,
        "zero in place": lambda ones: lambda: torch.optim.SGD(ones, 0.1).zero_grad(set_to_none=False),
        "clip_grad_norm": lambda ones: lambda: nn.utils.clip_grad_norm_(ones, 1.0),
    }.items():
        yield f"{label} of 50", lambda step=step: step(parameters())


class _First(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)[0]


def host() -> Iterator[Call]:
    yield from simple()
    yield from gradients()
    yield from modules()


def work() -> Iterator[Call]:
    """What the program itself may do on the host: how quick its processor is."""
    x, small = torch.rand(1 << 20), torch.rand(64, 64)
    image = torch.rand(3, 224, 224)
    numbers = x[: 1 << 16].tolist()
    bytes_ = torch.randint(0, 255, (1 << 24,), dtype=torch.uint8)
    for label, does in {
        "randn 1M": lambda: torch.randn(1 << 20),
        "rand 1M": lambda: torch.rand(1 << 20),
        "randint 1M": lambda: torch.randint(0, 9, (1 << 20,)),
        "argmax 8192x128": lambda: x.view(8192, 128).argmax(-1),
        "exp 1M": lambda: x.exp(),
        "sort 1M": lambda: x.sort(),
        "avg_pool2d 3x224": lambda: F.avg_pool2d(image[None], 3, 1, 1),
        "interpolate 3x224": lambda: F.interpolate(image[None], scale_factor=0.5, mode="bilinear"),
        "stack 64 images": lambda: torch.stack([image] * 64),
        "clone 4 MB": lambda: x.clone(),
        "bytes to float 16M": lambda: bytes_.float(),
        "mm 512": lambda: x[: 1 << 18].view(512, 512) @ x[: 1 << 18].view(512, 512),
        "add small x 100": lambda: [small + small for _ in range(100)],
        "python loop": lambda: sum(i * i for i in range(100_000)),
        "python sort": lambda: sorted(numbers),
        "python dict": lambda: {i: str(i) for i in range(20_000)},
        "python objects": lambda: [[i] for i in range(50_000)],
        "sleep 1 ms": lambda: time.sleep(0.001),
        "pin 4 MB": lambda: x.pin_memory(),
        "loader of 64 x 64": lambda: next(iter(DataLoader(TensorDataset(small), batch_size=64))),
    }.items():
        yield label, lambda does=does: does
