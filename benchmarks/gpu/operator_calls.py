"""What `operator_costs.py` measures: operators at plain shapes, chosen before anything was measured and for no program.

A call is a label and a function that prepares its tensors and returns what to time. The same calls
run on the virtual GPU, so what it takes for them can be held against what an H200 took.
"""

import time
from collections.abc import Callable, Iterator

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

Prepare = Callable[[], Callable[[], object]]
Call = tuple[str, Prepare]
HALF, FULL = torch.bfloat16, torch.float32


def new(*shape: int, dtype: torch.dtype = FULL, grad: bool = False) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype).requires_grad_(grad)


def below(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, high, shape, device="cuda")


def both(label: str, make: Callable[[], tuple[Callable[[], torch.Tensor], list[torch.Tensor]]]) -> Iterator[Call]:
    """Forward, and the gradient of its result with respect to its leaves."""

    def backward() -> Callable[[], object]:
        does, leaves = make()
        result = does()
        grad = torch.ones_like(result)
        return lambda: torch.autograd.grad(result, leaves, grad, retain_graph=True)

    yield label, lambda: make()[0]
    yield f"{label} backward", backward


# kernels: long enough that the device sets the time


def products() -> Iterator[Call]:
    shapes = [
        (128, 128, 128), (512, 512, 512), (1024, 1024, 1024), (2048, 2048, 2048), (4096, 4096, 4096),
        (8192, 1024, 1024), (8192, 4096, 1024), (8192, 1024, 4096), (1024, 4096, 8192), (256, 1000, 2048),
        (64, 4096, 4096), (16, 8192, 8192), (32768, 512, 512), (512, 512, 32768), (100000, 64, 256),
        (4096, 50000, 768), (3000, 700, 300), (640, 640, 10240),
    ]  # fmt: skip
    for rows, columns, inner in shapes:
        for dtype in (HALF, FULL):
            name = str(dtype).removeprefix("torch.")

            def make(shape: tuple[int, int, int] = (rows, columns, inner), dtype: torch.dtype = dtype):
                a, b = new(shape[0], shape[2], dtype=dtype), new(shape[1], shape[2], dtype=dtype)
                return lambda: a @ b.t()

            yield f"mm {rows}x{columns}x{inner} {name}", make
    for batch, rows, columns, inner in [(64, 256, 256, 64), (512, 128, 64, 128), (16, 1024, 1024, 128)]:
        for dtype in (HALF, FULL):
            name = str(dtype).removeprefix("torch.")

            def make(shape=(batch, rows, columns, inner), dtype=dtype):
                a, b = new(shape[0], shape[1], shape[3], dtype=dtype), new(shape[0], shape[3], shape[2], dtype=dtype)
                return lambda: torch.bmm(a, b)

            yield f"bmm {batch}x{rows}x{columns}x{inner} {name}", make


def convolutions() -> Iterator[Call]:
    shapes = [  # images, channels in, edge, channels out, window, stride, groups
        (32, 3, 224, 64, 7, 2, 1), (64, 64, 56, 64, 3, 1, 1), (64, 64, 56, 256, 1, 1, 1), (64, 128, 28, 128, 3, 1, 1),
        (64, 256, 14, 256, 3, 1, 1), (64, 512, 7, 512, 3, 1, 1), (64, 256, 28, 512, 1, 2, 1),
        (128, 3, 32, 64, 3, 1, 1), (256, 32, 32, 64, 3, 1, 1), (64, 1, 28, 32, 3, 1, 1), (64, 32, 26, 64, 3, 1, 1),
        (32, 96, 56, 96, 7, 1, 96), (32, 144, 56, 144, 3, 1, 144), (8, 128, 64, 128, 3, 1, 1),
        (8, 512, 32, 512, 3, 1, 1),
    ]  # fmt: skip
    for shape in shapes:
        for dtype, last in ((FULL, False), (HALF, False), (HALF, True)):

            def make(shape=shape, dtype=dtype, last=last):
                n, c, edge, out, window, stride, groups = shape
                layout = torch.channels_last if last else torch.contiguous_format
                x = new(n, c, edge, edge, dtype=dtype).contiguous(memory_format=layout).requires_grad_(c > 3)
                w = new(out, c // groups, window, window, dtype=dtype).contiguous(memory_format=layout).requires_grad_()
                leaves = [x, w] if c > 3 else [w]
                return lambda: F.conv2d(x, w, None, stride, window // 2, 1, groups), leaves

            kind = f"{str(dtype).removeprefix('torch.')}{' channels last' if last else ''}"
            yield from both("conv " + "x".join(map(str, shape)) + " " + kind, make)


def attentions() -> Iterator[Call]:
    shapes = [  # batch, heads, queries, keys, width, causal
        (8, 12, 256, 256, 64, True), (8, 12, 1024, 1024, 64, True), (2, 16, 4096, 4096, 64, True),
        (4, 32, 2048, 2048, 128, True), (16, 8, 128, 128, 64, False), (32, 8, 196, 196, 64, False),
        (8, 8, 1024, 77, 64, False), (8, 16, 1, 1024, 64, False), (64, 4, 64, 64, 32, False),
    ]  # fmt: skip
    for shape in shapes:
        for dtype in (HALF, FULL):

            def make(shape=shape, dtype=dtype):
                batch, heads, queries, keys, width, causal = shape
                q = new(batch, heads, queries, width, dtype=dtype, grad=True)
                k, v = (new(batch, heads, keys, width, dtype=dtype, grad=True) for _ in range(2))
                return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal), [q, k, v]

            yield from both(f"attention {'x'.join(map(str, shape))} {str(dtype).removeprefix('torch.')}", make)


def norms() -> Iterator[Call]:
    for rows, width in [(2048, 512), (16384, 1024), (65536, 256)]:
        for dtype in (HALF, FULL):

            def make(rows=rows, width=width, dtype=dtype):
                x, w, b = new(rows, width, dtype=dtype, grad=True), *(new(width, dtype=dtype, grad=True) for _ in "wb")
                return lambda: F.layer_norm(x, (width,), w, b), [x, w, b]

            yield from both(f"layer_norm {rows}x{width} {str(dtype).removeprefix('torch.')}", make)
    for n, c, edge in [(64, 64, 112), (64, 256, 14), (64, 1024, 14), (32, 128, 32), (256, 32, 16)]:
        for dtype, last in ((FULL, False), (HALF, False), (HALF, True)):

            def make(n=n, c=c, edge=edge, dtype=dtype, last=last):
                layout = torch.channels_last if last else torch.contiguous_format
                x = new(n, c, edge, edge, dtype=dtype).contiguous(memory_format=layout).requires_grad_()
                norm = nn.BatchNorm2d(c, device="cuda")
                return lambda: norm(x), [x, norm.weight, norm.bias]

            kind = f"{str(dtype).removeprefix('torch.')}{' channels last' if last else ''}"
            yield from both(f"batch_norm {n}x{c}x{edge} {kind}", make)
    for n, c, edge in [(16, 320, 32), (8, 128, 64)]:

        def make(n=n, c=c, edge=edge):
            x, norm = new(n, c, edge, edge, dtype=HALF, grad=True), nn.GroupNorm(32, c, device="cuda", dtype=HALF)
            return lambda: norm(x), [x, norm.weight, norm.bias]

        yield from both(f"group_norm {n}x{c}x{edge}", make)


def traffic() -> Iterator[Call]:
    for count in (1 << 12, 1 << 16, 1 << 20, 1 << 23, 1 << 26):
        for dtype in (HALF, FULL):
            name = f"{count} {str(dtype).removeprefix('torch.')}"
            other = FULL if dtype is HALF else HALF
            for verb, does in {
                "add": lambda x: x + x,
                "mul_": lambda x: x.mul_(1.0),
                "relu": torch.relu,
                "exp": torch.exp,
                "gelu": F.gelu,
                "sigmoid": torch.sigmoid,
                "cast": lambda x, other=other: x.to(other),
                "clone": torch.clone,
                "compare": lambda x: x > 0,
                "sum": torch.sum,
                "norm": torch.linalg.vector_norm,
                "fill": lambda x: x.fill_(1.0),
                "isnan": lambda x: torch.isnan(x).any(),
                "cumsum": lambda x: x.cumsum(0),
                "normal": lambda x: x.normal_(),
                "uniform": lambda x: x.uniform_(),
                "dropout": lambda x: F.dropout(x, 0.1),
                "sort": lambda x: x.sort(),
            }.items():
                if verb in ("cumsum", "sort") and count > 1 << 23:
                    continue

                def make(count=count, dtype=dtype, does=does):
                    x = new(count, dtype=dtype)
                    return lambda: does(x)

                yield f"{verb} {name}", make


def shaped() -> Iterator[Call]:
    """Reductions, softmaxes, transposes and broadcasts of a table."""
    for rows, width in [(256, 1000), (4096, 1024), (32768, 256), (8192, 32000), (1000, 100000)]:
        for dtype in (HALF, FULL):
            verbs = {
                "softmax": lambda x: x.softmax(-1),
                "log_softmax": lambda x: x.log_softmax(-1),
                "sum rows": lambda x: x.sum(-1),
                "sum columns": lambda x: x.sum(0),
                "mean columns": lambda x: x.mean(0),
                "argmax": lambda x: x.argmax(-1),
                "amax": lambda x: x.amax(-1),
                "var": lambda x: x.var(-1),
                "transposed": lambda x: x.t().contiguous(),
                "broadcast": lambda x: x + x[0],
                "narrow": lambda x: x * x[:, :1],
                "cat": lambda x: torch.cat([x, x], 1),
                "topk": lambda x: x.topk(8),
                "masked_fill": lambda x: x.masked_fill(x > 0, 0.0),
                "where": lambda x: torch.where(x > 0, x, 0.0),
                "tril": torch.tril,
            }
            for verb, does in verbs.items():

                def make(rows=rows, width=width, dtype=dtype, does=does):
                    x = new(rows, width, dtype=dtype)
                    return lambda: does(x)

                yield f"{verb} {rows}x{width} {str(dtype).removeprefix('torch.')}", make

        def losses(rows=rows, width=width):
            x, y = new(rows, width, grad=True), below(width, rows)
            return lambda: F.cross_entropy(x, y), [x]

        yield from both(f"cross_entropy {rows}x{width}", losses)


def indexed() -> Iterator[Call]:
    for rows, width, picks in [(1000, 64, 1000), (50000, 256, 8192), (50000, 256, 100000), (1000000, 64, 65536)]:
        size = f"{rows}x{width} by {picks}"

        def embed(rows=rows, width=width, picks=picks):
            table, index = new(rows, width, grad=True), below(rows, picks)
            return lambda: F.embedding(index, table), [table]

        yield from both(f"embedding {size}", embed)
        for verb, does in {
            "index": lambda x, i, y, m: x[i],
            "index_select": lambda x, i, y, m: x.index_select(0, i),
            "gather": lambda x, i, y, m: x.gather(0, i[:, None].expand(-1, x.shape[1])),
            "scatter_add": lambda x, i, y, m: x.scatter_add_(0, i[:, None].expand(-1, x.shape[1]), y),
            "index_add": lambda x, i, y, m: x.index_add_(0, i, y),
            "index_put": lambda x, i, y, m: x.index_put_((i,), y),
            "index_put accumulate": lambda x, i, y, m: x.index_put_((i,), y, accumulate=True),
            "mask": lambda x, i, y, m: x[m],
            "mask_put": lambda x, i, y, m: x.__setitem__(m, 0.0),
            "nonzero": lambda x, i, y, m: m.nonzero(),
            "masked_select": lambda x, i, y, m: x[:, 0].masked_select(m),
            "unique": lambda x, i, y, m: i.unique(),
            "bincount": lambda x, i, y, m: i.bincount(),
            "one_hot": lambda x, i, y, m: F.one_hot(i[:4096] % 1000, 1000),
        }.items():

            def make(rows=rows, width=width, picks=picks, does=does):
                x, i, y = new(rows, width), below(rows, picks), new(picks, width)
                mask = below(2, rows) > 0
                return lambda: does(x, i, y, mask)

            yield f"{verb} {size}", make


def images() -> Iterator[Call]:
    for n, c, edge in [(64, 64, 112), (256, 32, 26)]:
        for dtype, last in ((FULL, False), (HALF, True)):
            for verb, does in {
                "max_pool": lambda x: F.max_pool2d(x, 2),
                "avg_pool": lambda x: F.avg_pool2d(x, 3, 1, 1),
                "global_pool": lambda x: F.adaptive_avg_pool2d(x, 1),
                "nearest": lambda x: F.interpolate(x, scale_factor=2.0),
                "bilinear": lambda x: F.interpolate(x.float(), scale_factor=0.5, mode="bilinear"),
                "pad": lambda x: F.pad(x, (1, 1, 1, 1)),
                "flip": lambda x: x.flip(-1),
            }.items():

                def make(n=n, c=c, edge=edge, dtype=dtype, last=last, does=does):
                    layout = torch.channels_last if last else torch.contiguous_format
                    x = new(n, c, edge, edge, dtype=dtype).contiguous(memory_format=layout).requires_grad_()
                    return lambda: does(x), [x]

                yield from both(f"{verb} {n}x{c}x{edge} {'half, channels last' if last else 'full'}", make)


def recurrent() -> Iterator[Call]:
    for kind in (nn.LSTM, nn.GRU):
        for steps, batch, width, layers in [(32, 64, 256, 1), (100, 32, 512, 2), (64, 128, 1024, 2)]:

            def make(kind=kind, steps=steps, batch=batch, width=width, layers=layers):
                net, x = kind(width, width, layers).cuda(), new(steps, batch, width)
                return lambda: net(x)[0], list(net.parameters())

            yield from both(f"{kind.__name__} {steps}x{batch}x{width}x{layers}", make)


def optimizers() -> Iterator[Call]:
    for sizes, name in [([1 << 20] * 40, "40x1M"), ([256, 65536] * 50, "100 small"), ([512] * 200, "200 tiny")]:
        for label, kind, options in [
            ("adamw foreach", torch.optim.AdamW, dict(foreach=True)),
            ("adamw fused", torch.optim.AdamW, dict(fused=True)),
            ("sgd momentum", torch.optim.SGD, dict(momentum=0.9, foreach=True)),
        ]:

            def make(sizes=sizes, kind=kind, options=options):
                ones = [new(size, grad=True) for size in sizes]
                for one in ones:
                    one.grad = torch.zeros_like(one)
                return kind(ones, lr=1e-3, **options).step

            yield f"{label} {name}", make

        def clip(sizes=sizes):
            ones = [new(size, grad=True) for size in sizes]
            for one in ones:
                one.grad = torch.zeros_like(one)
            return lambda: nn.utils.clip_grad_norm_(ones, 1.0)

        yield f"clip_grad_norm {name}", clip


def kernels() -> Iterator[Call]:
    for family in (
        products,
        convolutions,
        attentions,
        norms,
        traffic,
        shaped,
        indexed,
        images,
        recurrent,
        optimizers,
    ):
        yield from family()


# the host: kernels so short that they never matter


def chain(make: Callable[[], tuple[Callable[[], torch.Tensor], list[torch.Tensor]]], count: int = 20) -> Prepare:
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


# what the program itself may do on the host: how quick its processor is


def work() -> Iterator[Call]:
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
