"""Calls whose kernels run long enough that the device sets the time."""

from collections.abc import Iterator

import torch
import torch.nn as nn
import torch.nn.functional as F

from calls import FULL, HALF, Call, below, both, new


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
