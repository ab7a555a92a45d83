"""Costs: what was measured on an H200, and what must hold for any device."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepbusy.virtual.costs.device import Operand, names, read
from keepbusy.virtual.costs.laws import nothing
from keepbusy.virtual.costs.operator_costs import _TABLE, LAWS, OperatorCosts

US = 1_000
H200 = read("h200")
COSTS = OperatorCosts(H200)


def tensor(*shape: int, dtype: str = "bfloat16") -> Operand:
    strides = list(accumulate((1, *reversed(shape[1:])), lambda one, other: one * other))[::-1]
    return shape, dtype, tuple(strides[: len(shape)])


def turned(one: Operand) -> Operand:
    return one[0][::-1], one[1], one[2][::-1]


def spent(name: str, inputs: list[Operand], outputs: list[Operand], **asked: object) -> float:
    return sum(work for _, work in COSTS.kernels(name, tuple(inputs), tuple(outputs), asked)) / US


@pytest.mark.parametrize(
    ("rows", "columns", "inner", "measured"),
    [
        (32768, 2304, 768, 171.6),
        (8192, 768, 768, 17.2),
        (4096, 512, 512, 6.4),
        (1024, 256, 256, 3.3),
        (768, 768, 8192, 21.2),
    ],
)
def test_products_as_measured(rows: int, columns: int, inner: int, measured: float) -> None:
    weight = turned(tensor(columns, inner))
    inputs = [tensor(columns), tensor(rows, inner), weight]
    assert spent("addmm", inputs, [tensor(rows, columns)]) == pytest.approx(measured, rel=0.12)


def test_a_long_product_meets_the_limit_of_power() -> None:
    square = tensor(8192, 8192)
    assert spent("mm", [square, square], [square]) == pytest.approx(1530, rel=0.1)


def test_batches_vectors_and_linear() -> None:
    one = spent("bmm", [tensor(96, 512, 64), tensor(96, 64, 512)], [tensor(96, 512, 512)])
    assert one > spent("bmm", [tensor(1, 512, 64), tensor(1, 64, 512)], [tensor(1, 512, 512)])
    folded = spent("linear", [tensor(8, 512, 768), tensor(2304, 768)], [tensor(8, 512, 2304)])
    flat = spent("mm", [tensor(4096, 768), turned(tensor(2304, 768))], [tensor(4096, 2304)])
    assert folded == flat
    vector = spent("mv", [tensor(8192, 1024, dtype="float32"), tensor(1024, dtype="float32")], [tensor(8192)])
    assert vector == pytest.approx(12.5, rel=0.3)


def test_float32_products_use_tensor_cores_only_when_told() -> None:
    told: list[bool] = []
    costs, square = OperatorCosts(H200, lambda: bool(told)), tensor(4096, 4096, dtype="float32")
    (before,) = costs.kernels("mm", (square, square), (square,))
    told.append(True)
    (after,) = costs.kernels("mm", (square, square), (square,))
    assert after[1] < before[1] / 4


@pytest.mark.parametrize(
    ("name", "tensors", "measured"),
    [("gelu", 2, 133.2), ("gelu_backward", 3, 179.7), ("native_layer_norm", 0, 93.6)],
)
def test_traffic_as_measured(name: str, tensors: int, measured: float) -> None:
    wide, stream = tensor(32768, 3072), tensor(32768, 768, dtype="float32")
    if not tensors:
        assert spent(name, [stream], [stream]) == pytest.approx(measured, rel=0.12)
    else:
        assert spent(name, [wide] * (tensors - 1), [wide]) == pytest.approx(measured, rel=0.12)


def test_strides_types_and_broadcasts_cost_extra() -> None:
    plain = tensor(4096, 4096)
    base = spent("add", [plain, plain], [plain])
    assert spent("add", [plain, turned(plain)], [plain]) > 1.2 * base
    assert spent("add", [plain, tensor(4096)], [plain]) > base
    assert spent("copy_", [tensor(4096, 4096, dtype="float32"), plain], []) > spent("copy_", [plain, plain], [])
    scalar: Operand = ((), "bfloat16", ())
    assert spent("mul", [plain, scalar], [plain]) < base


def test_copy_neither_reads_nor_counts_its_target_twice() -> None:
    one = tensor(4096, 4096)
    assert spent("copy_", [one, one], []) == spent("copy_", [one], [one]) == spent("clone", [one], [one])


def test_sums_over_rows_need_columns() -> None:
    few, many = tensor(1 << 20, 64), tensor(1 << 14, 4096)
    assert spent("sum", [few], [tensor(64)], dim=[0]) > 1.5 * spent("sum", [many], [tensor(4096)], dim=[0])
    assert spent("sum", [few], [tensor(1)], dim=None) < spent("sum", [few], [tensor(64)], dim=[0])
    assert spent("sum", [many], [tensor(1 << 14)], dim=[-1]) < spent("sum", [many], [tensor(4096)], dim=[0])


def test_multi_tensor_kernels_are_launched_as_cuda_launches_them() -> None:
    width = 768
    biases = [(width,)] * 6 + [(2304,), (3072,)]
    block = [*biases, (2304, width), (width, width), (3072, width), (width, 3072)]
    shapes = [(4096, width), *block * 8, (4096, width), (4096,)]
    weights = tuple(tensor(*shape, dtype="float32") for shape in shapes)
    kernels = COSTS.kernels("_foreach_mul_", weights, (), {"lists": 1})
    assert len(kernels) == 4
    assert sum(work for _, work in kernels) / US == pytest.approx(150, rel=0.1)
    fused = COSTS.kernels("_fused_adamw_", weights * 4, (), {"lists": 4})
    assert len(fused) == 4
    assert sum(work for _, work in fused) / US == pytest.approx(512, rel=0.1)


def test_attention_is_recognised_whole() -> None:
    heads = tensor(64, 12, 512, 64)
    assert spent("scaled_dot_product_attention", [heads] * 3, [heads], is_causal=True) == pytest.approx(100, rel=0.1)
    back = spent("scaled_dot_product_attention_backward", [heads] * 5, [heads] * 3, is_causal=True)
    assert back == pytest.approx(387, rel=0.1)


def test_whole_attention_has_its_projections_with_it() -> None:
    batch = tensor(8, 512, 768)
    kernels = COSTS.kernels("_native_multi_head_attention", (batch, batch, batch), (batch,), {"num_head": 12})
    heads = tensor(96, 512, 64)
    alone = COSTS.kernels("scaled_dot_product_attention", (heads, heads, heads), (heads,))
    into, attention, out = kernels
    assert attention == alone[0]
    assert into[1] / US == spent("mm", [tensor(4096, 768), turned(tensor(2304, 768))], [tensor(4096, 2304)])
    assert out[1] / US == spent("mm", [tensor(4096, 768), turned(tensor(768, 768))], [tensor(4096, 768)])


def test_convolutions_as_measured() -> None:
    def image(channels: int, edge: int) -> Operand:
        return (256, channels, edge, edge), "bfloat16", (channels * edge * edge, 1, edge * channels, channels)

    filters = ((128, 128, 3, 3), "bfloat16", (1152, 1, 384, 128))
    forward = spent("convolution", [image(128, 56), filters], [image(128, 56)], groups=1)
    assert forward == pytest.approx(317, rel=0.1)
    three = [image(128, 56), image(128, 56), filters]
    backward = spent("convolution_backward", three, [image(128, 56), filters], groups=1)
    assert backward == pytest.approx(660, rel=0.1)
    assert spent("convolution_backward", three, [filters], groups=1) < backward
    first = ((128, 3, 7, 7), "bfloat16", (147, 1, 21, 3))
    assert spent("convolution", [image(3, 224), first], [image(128, 56)], groups=1) == pytest.approx(1028, rel=0.15)
    depthwise = ((128, 1, 3, 3), "bfloat16", (9, 9, 3, 1))
    assert len(COSTS.kernels("convolution", (image(128, 56), depthwise), (image(128, 56),), {"groups": 128})) == 1


def test_many_small_kernels() -> None:
    ids, table = tensor(8192, dtype="int64"), tensor(4096, 768, dtype="float32")
    grad = tensor(8192, 768, dtype="float32")
    assert len(COSTS.kernels("embedding_dense_backward", (grad, ids), (table,))) > 20
    few = (tensor(64, 768, dtype="float32"), tensor(64, dtype="int64"))
    assert len(COSTS.kernels("embedding_dense_backward", few, (table,))) == 2
    assert len(COSTS.kernels("nonzero", (tensor(8192, dtype="bool"),))) == 4
    put = (grad, ids, grad)
    assert len(COSTS.kernels("index_put_", put, (), {"accumulate": True})) > 8
    assert len(COSTS.kernels("index_put_", put, (), {"accumulate": False})) == 1
    assert len(COSTS.kernels("sort", (grad,), (grad, ids))) > 4
    cell = (tensor(35, 20, 200), tensor(2, 20, 200), tensor(2, 20, 200), tensor(800, 200), tensor(800, 200))
    assert len(COSTS.kernels("lstm", cell, (tensor(35, 20, 200),))) == 36
    packed = (tensor(700, 200), *cell[1:])
    assert len(COSTS.kernels("lstm", packed, (tensor(700, 200),), {"batch_sizes": 35})) == 36


def test_views_and_nothing_launch_nothing() -> None:
    assert COSTS.kernels("view", (tensor(3),), (tensor(3),)) == ()
    assert COSTS.kernels("whatever", (), ()) == ()


def test_a_law_that_does_not_apply_says_so() -> None:
    flat = tensor(12, 64)
    (kernel,) = COSTS.kernels("scaled_dot_product_attention_backward", (flat, flat, flat), (flat,))
    assert kernel[0] == "elementwise_scaled_dot_product_attention_backward"
    assert COSTS.kernels("mv", (tensor(3),), (tensor(3),)) == (("gemm", 2_500),)
    assert COSTS.kernels("convolution", (flat,), (flat,))[0][0] == "elementwise_convolution"


def test_a_law_that_fails_is_raised_here_and_noted_in_a_run() -> None:
    image, window = tensor(2, 3, 8, 8), {"kernel_size": ["two"]}
    with pytest.raises(TypeError):
        COSTS.kernels("avg_pool2d", (image,), (image,), window)
    notes: list[str] = []
    (kernel,) = OperatorCosts(H200, notes=notes).kernels("avg_pool2d", (image,), (image,), window)
    assert kernel[0] == "elementwise_avg_pool2d"
    assert len(notes) == 1
    assert "avg_pool2d(bfloat16[2, 3, 8, 8]) on the virtual GPU is that of its bytes alone" in notes[0]


def test_every_operator_has_one_law() -> None:
    named = [name for law in _TABLE for name in law.names.split()]
    assert sorted(named) == sorted(LAWS)


PRICED = {name for name, law in LAWS.items() if law.kernels is not nothing}
OPERATORS = tuple(sorted({*PRICED, "mul", "add_", "gelu", "max_pool2d_with_indices", "unknown"}))
SHAPES = st.lists(st.integers(0, 65), max_size=4).map(tuple)


@settings(max_examples=200)
@given(
    st.sampled_from(OPERATORS),
    SHAPES,
    st.sampled_from(["float32", "bfloat16", "int64", "bool", "complex64"]),
    st.sampled_from(names()),
)
def test_anything_has_a_cost_on_any_device(name: str, shape: tuple[int, ...], dtype: str, device: str) -> None:
    one = tensor(*shape, dtype=dtype) if shape else ((), dtype, ())
    kernels = OperatorCosts(read(device)).kernels(name, (one, one), (one,), {"dim": None})
    assert kernels
    assert all(isinstance(work, int) and 0 < work < 10**12 for _, work in kernels)


@settings(max_examples=100)
@given(st.integers(1, 3000), st.integers(1, 3000), st.integers(1, 3000))
def test_twice_the_rows_never_cost_less(rows: int, columns: int, inner: int) -> None:
    def cost(rows: int) -> float:
        return spent("mm", [tensor(rows, inner), tensor(inner, columns)], [tensor(rows, columns)])

    assert cost(2 * rows) >= 0.7 * cost(rows)


@pytest.mark.parametrize(
    ("name", "size", "measured", "tolerance"),
    [
        ("all_reduce", 1 << 26, 324, 0.1),
        ("all_reduce", 1 << 30, 4529, 0.05),
        ("all_gather", 1 << 28, 662, 0.12),
        ("all_gather", 1 << 32, 9402, 0.05),
        ("reduce_scatter", 1 << 24, 65, 0.1),
        ("broadcast", 1 << 30, 2972, 0.05),
        ("all_to_all", 1 << 30, 2378, 0.05),
        ("send", 1 << 30, 2999, 0.1),
    ],
)
def test_collectives_as_measured_on_four(name: str, size: int, measured: float, tolerance: float) -> None:
    assert H200.wire.collective(name, size, 4) / US == pytest.approx(measured, rel=tolerance)


def test_collectives_of_one_and_across_hosts() -> None:
    assert H200.wire.collective("all_reduce", 1 << 30, 1) == H200.wire.latency
    assert H200.wire.collective("all_reduce", 1 << 30, 16) > 5 * H200.wire.collective("all_reduce", 1 << 30, 8)
    assert H200.wire.collective("barrier", 0, 4) < 40 * US
