"""Values that come home later: right whatever happens to their tensors meanwhile, and nobody waits."""

from __future__ import annotations

import json
import math
from collections import namedtuple
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import keepbusy
from keepbusy.runtime import Readings
from keepbusy.runtime import readback as reading
from keepbusy.runtime.readback import SLOT_DOUBLES, PinnedSlot, Reading, ScalarReadback, TensorReadback

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.uint8, torch.complex64)


def test_a_reading_is_the_value_at_the_call() -> None:
    loss = torch.tensor(0.625, device="cuda")
    reading = keepbusy.readback(loss)
    loss.fill_(7)
    assert (float(reading), int(reading), bool(reading), reading.item()) == (0.625, 0, True, 0.625)
    assert reading.tensor.device.type == "cpu"


def test_a_reading_prints_like_its_number() -> None:
    reading = keepbusy.readback(torch.tensor(0.625, device="cuda"))
    assert f"{reading:.2f} {reading:6.3f} {reading}" == "0.62  0.625 0.625"
    assert f"{reading}|%.1f" % reading == "0.625|0.6"
    assert repr(reading) == "Reading(0.625)"


def test_what_is_not_there_yet_is_not_waited_for_to_be_shown() -> None:
    one = torch.tensor(1.0, device="cuda")
    torch.cuda._sleep(10_000_000)
    reading = keepbusy.readback(one + 1)
    assert not reading.ready
    assert repr(reading) == "Reading(on its way)"
    assert float(reading) == 2.0
    assert reading.ready


def test_reading_a_value_does_not_wait_for_what_was_launched_after_it() -> None:
    reading = keepbusy.readback(torch.ones((), device="cuda"))
    torch.cuda._sleep(1_000_000_000)
    done = torch.cuda.Event()
    done.record()
    assert float(reading) == 1.0
    assert not done.query()


def test_trees_keep_their_shape_and_travel_as_one() -> None:
    pair = namedtuple("pair", "loss others")
    given = pair(torch.tensor(1.5, device="cuda"), {"a": [torch.arange(6, device="cuda").view(2, 3), 4], "b": 0.5})
    home = keepbusy.readback(given)
    assert isinstance(home, pair)
    assert float(home.loss) == 1.5
    assert home.others["a"][0].tensor.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert (home.others["a"][1], home.others["b"]) == (4, 0.5)
    assert home.loss._sent is home.others["a"][0]._sent


SCALARS = {
    torch.float32: (0.1, -0.0, math.inf, 3.4e38, 1e-45),
    torch.bfloat16: (0.1, -3e38, 1e-40),
    torch.float16: (0.1, 65504.0, 6e-8),
    torch.float64: (0.1, -0.0, 1.7e308, 5e-324, math.nan),
    torch.int64: (2**63 - 1, -(2**63), -1, 2**53 + 1),
    torch.int32: (2**31 - 1, -(2**31)),
    torch.int16: (-(2**15),),
    torch.int8: (-128,),
    torch.uint8: (255,),
    torch.bool: (True, False),
}


class OneSlot:
    """Memory of the host in place of pinned memory that the device writes to: the virtual GPU has no such thing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        memory = torch.full((SLOT_DOUBLES,), math.nan, dtype=torch.float64)
        self.slot, self.given_back = PinnedSlot(memory, memory), 0
        monkeypatch.setattr(reading, "_take", lambda _device: self.slot)
        monkeypatch.setattr(reading, "_give_back", self.give_back)

    def give_back(self, _device: torch.device, slot: PinnedSlot) -> None:
        self.given_back += 1
        slot.on_host.fill_(math.nan)  # it is another's from here on


@pytest.mark.parametrize("dtype", SCALARS, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_a_scalar_comes_home_bit_for_bit(
    dtype: torch.dtype, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, device = OneSlot(monkeypatch), torch.device("cuda", 0)
    tensors = [torch.tensor(value, dtype=dtype).reshape(shape) for value in SCALARS[dtype]]
    if dtype.is_floating_point:
        tensors[0].requires_grad_()
    sent = ScalarReadback.send(tensors, device)
    assert sent is not None
    for place, tensor in enumerate(tensors):
        home = sent.open(place)
        assert (home.dtype, home.shape, home.requires_grad) == (dtype, tensor.shape, False)
        assert torch.equal(home.reshape(1).view(torch.uint8), tensor.detach().reshape(1).view(torch.uint8))
        assert repr(reading.Reading(sent, place).item()) == repr(tensor.item())
    assert memory.given_back == 1


def test_scalars_of_all_types_travel_together(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = OneSlot(monkeypatch)
    tensors = [torch.tensor(values[0], dtype=dtype) for dtype, values in SCALARS.items()]
    sent = ScalarReadback.send(tensors, torch.device("cuda", 0))
    assert sent is not None
    sent.land()
    sent.land()
    assert [sent.open(place).item() for place in range(len(tensors))] == [one.item() for one in tensors]
    assert memory.given_back == 1


@pytest.mark.parametrize(
    "tensors",
    [
        [torch.zeros(2)],
        [torch.zeros((), dtype=torch.complex64)],
        [torch.zeros(()) for _ in range(SLOT_DOUBLES + 1)],
        [torch.zeros((), dtype=torch.int64) for _ in range(SLOT_DOUBLES // 2 + 1)],
        [torch.zeros((), dtype=torch.complex128).conj().imag],
    ],
    ids=["two numbers", "complex", "too many", "too many of two halves", "negated"],
)
def test_what_is_no_scalar_takes_no_slot(tensors: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    memory = OneSlot(monkeypatch)
    assert ScalarReadback.send(tensors, torch.device("cuda", 0)) is None
    assert memory.given_back == 0


@settings(max_examples=40)
@given(st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 3), max_size=3)), min_size=1, max_size=6))
def test_whatever_travels_together_arrives_bit_for_bit(looks: list[tuple[torch.dtype, list[int]]]) -> None:
    tensors = [torch.randn(shape).mul(100).to(dtype) for dtype, shape in looks]
    parcel = TensorReadback([tensor.cuda() for tensor in tensors]).send()
    for tensor, home in zip(tensors, map(parcel.open, range(len(tensors))), strict=True):
        assert (home.dtype, home.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(home, tensor)


@pytest.mark.parametrize("spoil", ["transposed", "expanded", "conjugate", "requires_grad", "large"])
def test_views_and_large_tensors_arrive_as_they_look(spoil: str) -> None:
    tensor = {
        "transposed": torch.randn(3, 4).cuda().t(),
        "expanded": torch.randn(3, 1).cuda().expand(3, 4),
        "conjugate": torch.randn(3, dtype=torch.complex64).cuda().conj(),
        "requires_grad": torch.randn(3).cuda().requires_grad_(),
        "large": torch.randn(600, 600).cuda().t(),
    }[spoil]
    small = torch.ones(2, device="cuda")
    home = keepbusy.readback([small, tensor, tensor])
    assert torch.equal(home[1].tensor, tensor.detach().cpu())
    assert torch.equal(home[2].tensor, tensor.detach().cpu())
    assert not home[1].tensor.requires_grad


def test_tensors_of_several_devices_and_of_the_host() -> None:
    home = keepbusy.readback([torch.tensor(float(n), device=f"cuda:{n}") for n in range(3)] + [torch.tensor(3.0)])
    assert [float(reading) for reading in home] == [0, 1, 2, 3]


def test_the_host_needs_no_way_home() -> None:
    value = torch.tensor(2.0)
    reading = keepbusy.readback(value)
    value.fill_(3)
    assert reading.ready
    assert float(reading) == 2.0


def test_kept_readings_hold_no_memory_of_the_device() -> None:
    loss = torch.ones((), device="cuda")
    before = torch.cuda.memory_allocated()
    kept = [keepbusy.readback(loss + step) for step in range(60)]
    torch.cuda.synchronize()
    keepbusy.readback(loss)  # it puts away what has arrived
    assert torch.cuda.memory_allocated() - before <= 1024
    assert [int(reading) for reading in kept] == list(range(1, 61))
    assert not any(reading.tensor.is_pinned() for reading in kept)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("loss", "but was given a str"),
        (None, "but was given None"),
        ({"name": "loss"}, "but was given a dict"),
        (object(), "but was given a object"),
    ],
)
def test_what_holds_no_tensors_is_refused(value: object, says: str) -> None:
    with pytest.raises(TypeError, match=says):
        keepbusy.readback(value)


def test_several_values_are_no_number() -> None:
    reading = keepbusy.readback(torch.ones(2, 3, device="cuda"))
    with pytest.raises(ValueError, match=r"holds 6 values of shape \(2, 3\), not one number; take its \.tensor"):
        float(reading)
    assert str(reading) == str(torch.ones(2, 3))


def test_under_autocast_values_keep_their_type() -> None:
    with torch.autocast("cuda", dtype=torch.bfloat16):
        product = torch.ones(2, 2, device="cuda") @ torch.ones(2, 2, device="cuda")
        home = keepbusy.readback([product, torch.ones(3, device="cuda"), torch.tensor(1, device="cuda")])
    assert [reading.tensor.dtype for reading in home] == [torch.bfloat16, torch.float32, torch.int64]


class TestReadings:
    def test_means_are_one_step_late_and_then_complete(self) -> None:
        readings, seen = Readings(), []
        for step in range(4):
            readings.add(
                loss=torch.tensor(float(step), device="cuda"), accuracy=torch.tensor(step % 2, device="cuda:1")
            )
            seen.append(readings.means())
        assert seen == [
            {},
            {"loss": 0.0, "accuracy": 0.0},
            {"loss": 0.5, "accuracy": 0.5},
            {"loss": 1.0, "accuracy": 1 / 3},
        ]
        assert readings.means(last=True) == {"loss": 1.5, "accuracy": 0.5}

    def test_numbers_readings_and_host_tensors_stand_beside_tensors_of_the_device(self) -> None:
        readings = Readings()
        readings.add(rate=0.25, loss=torch.tensor([3.0]), norm=keepbusy.readback(torch.tensor(4, device="cuda")))
        assert readings.means(last=True) == {"rate": 0.25, "loss": 3.0, "norm": 4.0}

    def test_a_name_that_comes_now_and_then_has_a_mean_of_its_own(self) -> None:
        readings = Readings()
        for step in range(4):
            readings.add(loss=step, **({"validation": 10 + step} if step % 2 else {}))
        assert readings.means(last=True) == {"loss": 1.5, "validation": 12.0}

    def test_the_step_that_is_under_way_belongs_to_the_next_window(self) -> None:
        readings = Readings()
        for step in (1.0, 2.0, 3.0):
            readings.add(loss=step)
        readings.reset()
        readings.add(loss=5.0)
        assert readings.means(last=True) == {"loss": 4.0}

    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    def test_what_is_not_finite_is_named_a_step_later(self, bad: float) -> None:
        readings, seen = Readings(), []
        for value in (1.0, bad, 1.0, 1.0):
            readings.add(loss=torch.tensor(value, device="cuda"), norm=1.0)
            seen.append(readings.nonfinite())
        assert seen == [[], [], ["loss"], ["loss"]]
        readings.reset()
        readings.add(loss=1.0)
        assert readings.nonfinite() == []

    def test_sums_keep_double_precision(self) -> None:
        readings = Readings()
        for _ in range(10):
            readings.add(loss=torch.tensor(0.1, dtype=torch.float64, device="cuda"), count=2**53 + 1)
        assert readings.means(last=True)["loss"] == 0.09999999999999999  # added up one by one

    @pytest.mark.parametrize(
        ("value", "says"),
        [(torch.ones(8, 10), r"add\(x=...\) was given a tensor of shape \(8, 10\)"), ("1", "was given a str")],
    )
    def test_only_single_numbers_have_a_mean(self, value: object, says: str) -> None:
        with pytest.raises(ValueError, match=says):
            Readings().add(x=value)


LOOP = """\
import torch
import keepbusy
from keepbusy.runtime import Readings

layers = [torch.nn.Linear(256, 256) for _ in range(24)] + [torch.nn.Linear(256, 4096), torch.nn.Linear(4096, 4096)]
model = torch.nn.Sequential(*layers).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
readings, log, shown = Readings(), [], []
x = torch.randn(1600, 256, device="cuda")
for step in range(10):
    loss = model(x).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    {reads}
"""
READS = {
    "none": "pass",
    "item": "log.append(loss.item())",
    "later": """log.append(keepbusy.readback(loss))
    readings.add(loss=loss, largest=x.max())
    shown += [readings.means(), readings.nonfinite(), f"{log[step // 2]:.3f}"]""",
}


def explained(run, reads: str) -> dict:
    """Of a loop that is nearly GPU-bound: who stops it each step loses the host's lead."""
    done = run(LOOP.replace("{reads}", reads), before=("--clock", "modelled", "--values", "none", "--json"))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_no_sync_stands_in_a_loop_that_reads_later(run) -> None:
    told = {name: explained(run, reads) for name, reads in READS.items()}
    named = {name: {cause["cause"] for cause in [*one["causes"], *one["harmless"]]} for name, one in told.items()}
    assert "host_sync" in named["item"]
    assert [name for name, causes in named.items() if "host_sync" in causes] == ["item"]
    step = {name: one["plain_step"] for name, one in told.items()}
    assert step["item"] > 1.05 * step["none"]
    assert step["later"] < 1.01 * step["none"]


def test_losses_are_those_of_the_plain_loop() -> None:
    def losses(read: Callable[[torch.Tensor], object]) -> list[float]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 1)).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        found = []
        for _ in range(6):
            loss = model(torch.randn(4, 8).cuda()).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(read(loss))
        return [float(loss) for loss in found]

    assert losses(keepbusy.readback) == losses(torch.Tensor.item)


def test_the_type_is_there_for_annotations() -> None:
    assert isinstance(keepbusy.readback(torch.zeros(())), Reading)
