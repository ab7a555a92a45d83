"""The device has random numbers of its own."""

from __future__ import annotations

import pytest
import torch

from keepbusy.virtual.pytorch.randomness import DEFAULTS


@pytest.fixture(autouse=True)
def own_generators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DEFAULTS, "shared", False)
    monkeypatch.setattr(torch.cuda, "default_generators", DEFAULTS.all())


def draw(device: str = "cuda") -> list[float]:
    return torch.rand(4, device=device).tolist()


def test_a_seed_repeats_the_draws() -> None:
    torch.manual_seed(7)
    first = draw()
    assert draw() != first
    torch.manual_seed(7)
    assert draw() == first
    torch.cuda.manual_seed(7)
    assert draw() == first


def test_the_host_and_each_device_draw_apart() -> None:
    torch.manual_seed(7)
    expected = draw("cpu")
    torch.manual_seed(7)
    draw(), draw("cuda:1")
    torch.nn.functional.dropout(torch.ones(9, device="cuda"))
    assert draw("cpu") == expected


def test_a_state_is_put_back() -> None:
    state = torch.cuda.get_rng_state()
    first = draw()
    torch.cuda.set_rng_state(state)
    assert draw() == first
    with torch.random.fork_rng():
        draw()
    torch.cuda.set_rng_state(state)
    assert draw() == first


def test_a_state_is_a_seed_and_an_offset_as_on_a_gpu() -> None:
    """Sharded tensors draw by offsets of their own: programs take states apart and put them together."""
    torch.cuda.manual_seed(7)
    state = torch.cuda.get_rng_state()
    assert (state.dtype, state.device.type) == (torch.uint8, "cpu")
    assert state.view(torch.int64).tolist() == [7, 0]
    first, second = draw(), draw()
    after = torch.cuda.get_rng_state().view(torch.int64)[1].item()
    assert after > 0
    assert after % 4 == 0
    state[8:] = torch.tensor([after // 2], dtype=torch.int64).view(torch.uint8)
    torch.cuda.set_rng_state(state)
    assert draw() == second != first
    with pytest.raises(RuntimeError, match="RNG state is wrong size"):
        torch.cuda.set_rng_state(torch.get_rng_state())


def test_a_generator_says_its_seed_and_its_offset() -> None:
    generator = torch.Generator(device="cuda").manual_seed(-1)
    assert (generator.initial_seed(), generator.get_offset()) == ((1 << 64) - 1, 0)
    generator.set_offset(8)
    assert generator.clone_state().get_offset() == 8
    assert torch.cuda.initial_seed() == torch.cuda.default_generators[0].initial_seed()


def test_a_generator_of_the_device() -> None:
    generator = torch.Generator(device="cuda").manual_seed(3)
    assert isinstance(generator, torch.Generator)
    assert generator.device == torch.device("cuda", 0)
    first = torch.randn(3, device="cuda", generator=generator)
    again = torch.randn(3, device="cuda", generator=torch.Generator("cuda").manual_seed(3))
    assert torch.equal(first, again)
    assert torch.randperm(5, device="cuda", generator=generator).is_cuda
