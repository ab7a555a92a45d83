"""`keepbusy.prefetch` in a loop: the batches it gives, their order, their errors, and what is left behind."""

from __future__ import annotations

import copy
import gc
import multiprocessing
import threading
import traceback
import weakref
from collections import OrderedDict, namedtuple
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import register_pytree_node
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import keepbusy
from keepbusy.timeline.model import Direction, Kind

Pair = namedtuple("Pair", "first second")


@dataclass(frozen=True)
class Example:
    image: Tensor
    label: str
    extra: Any = field(default=None, init=False)


class Named(dict):
    """A dict with something of its own."""

    source = "here"


class Graph:
    """Moves itself, as batches of graphs and texts do: in place, and something is computed on the way."""

    def __init__(self, nodes: Tensor) -> None:
        self.nodes, self.name = nodes, "graph"

    def to(self, device: Any) -> Graph:
        self.nodes = self.nodes.to(device)
        self.double = self.nodes * 2
        return self


def numbers(count: int) -> list[Tensor]:
    return [torch.full((64, 33), index) for index in range(count)]


def read(batches: Any) -> list[int]:
    return [int(batch.flatten()[0]) for batch in batches]


# what comes out


def test_every_batch_comes_in_turn_on_the_device() -> None:
    batches = list(keepbusy.prefetch(numbers(7)))
    assert [str(batch.device) for batch in batches] == ["cuda:0"] * 7
    assert read(batches) == list(range(7))


@pytest.mark.parametrize("depth", [1, 2, 5, 20])
def test_any_depth_gives_the_same(depth: int) -> None:
    assert read(keepbusy.prefetch(iter(numbers(7)), depth=depth)) == list(range(7))


def test_an_empty_loader() -> None:
    assert list(keepbusy.prefetch([])) == []


def test_the_kinds_of_batch() -> None:
    x = torch.arange(6.0)
    batch = {
        "list": [x, (x, None)],
        "named": Pair(x, "text"),
        "ordered": OrderedDict(b=x, a=3),
        "record": Example(x, "cat"),
        "kind of dict": Named(x=x),
        "record in record": Example(Pair(x, x), "dog"),
        "numbers": (1, 2.5, b"bytes"),
    }
    (got,) = keepbusy.prefetch([batch])
    seen: list[Tensor] = [*got["list"][:1], got["list"][1][0], got["named"].first, got["ordered"]["b"]]
    seen += [got["record"].image, got["kind of dict"]["x"], *got["record in record"].image]
    assert all(one.is_cuda and torch.equal(one.cpu(), x) for one in seen)
    assert [type(one) for one in got.values()] == [type(one) for one in batch.values()]
    assert (got["named"].second, got["record"].label, got["record"].extra) == ("text", "cat", None)
    assert got["kind of dict"].source == "here"
    assert list(got["ordered"]) == ["b", "a"]
    assert got["numbers"] == (1, 2.5, b"bytes")
    assert not x.is_cuda
    assert batch["record"].image is x


def test_what_moves_itself_does_so() -> None:
    graph = Graph(torch.arange(5.0))
    packed = nn.utils.rnn.pack_sequence([torch.ones(3), torch.zeros(4)], enforce_sorted=False)
    got, sequence = next(iter(keepbusy.prefetch([(graph, packed)])))
    assert got is graph
    assert got.double.is_cuda
    assert got.double.tolist() == [0, 2, 4, 6, 8]
    assert sequence.data.is_cuda
    assert sequence.sorted_indices.is_cuda
    assert not sequence.batch_sizes.is_cuda  # its rule, which a plain walk over the tuple would break


class Table:
    """PyTorch can open it, and it knows its device, like a TensorDict."""

    def __init__(self, columns: dict[str, Tensor], device: str = "cpu") -> None:
        self.columns, self.device = columns, device

    def to(self, device: Any) -> Table:
        return Table({name: column.to(device) for name, column in self.columns.items()}, str(device))


register_pytree_node(Table, lambda table: ([table.columns], table.device), lambda parts, device: Table(*parts, device))


def test_what_pytorch_can_open_travels_as_one_and_knows_its_device(machine: Any) -> None:
    table = Table({str(index): torch.ones(9) for index in range(50)})
    with Watched(machine) as watched:
        got, _ = next(iter(keepbusy.prefetch([(table, "text")])))
    assert len(watched.copies()) == 1
    assert got.device == "cuda:0"
    assert all(column.is_cuda for column in got.columns.values())


def test_tensors_of_unusual_kinds() -> None:
    weight = nn.Parameter(torch.ones(3))
    there = torch.ones(2, device="cuda")
    conjugate = torch.tensor([1 + 2j]).conj()
    got = next(iter(keepbusy.prefetch([[weight, there, conjugate]])))
    assert got[0].is_cuda
    assert got[0].requires_grad
    assert got[1] is there
    assert got[2].tolist() == [1 - 2j]


def test_then_works_on_the_device_on_the_stream_of_the_copies() -> None:
    streams = []

    def normalise(batch: dict[str, Tensor]) -> dict[str, Tensor]:
        streams.append(torch.cuda.current_stream())
        return {**batch, "x": batch["x"].float() / 255}

    loader = [{"x": torch.full((8,), 51, dtype=torch.uint8), "y": torch.tensor(index)} for index in range(3)]
    got = list(keepbusy.prefetch(loader, then=normalise))
    assert [batch["x"][0].item() for batch in got] == [pytest.approx(0.2)] * 3
    assert len(set(streams)) == 1
    assert streams[0] != torch.cuda.current_stream()


def test_then_may_give_what_moves_itself() -> None:
    graphs = keepbusy.prefetch(numbers(3), then=lambda batch: Graph(batch + 1))
    assert [int(graph.nodes[0, 0]) for graph in graphs] == [1, 2, 3]


def test_another_device() -> None:
    assert {str(batch.device) for batch in keepbusy.prefetch(numbers(3), device="cuda:5")} == {"cuda:5"}
    with torch.cuda.device(3):
        assert {str(batch.device) for batch in keepbusy.prefetch(numbers(3), device="cuda")} == {"cuda:3"}


def test_the_last_batch_may_be_smaller() -> None:
    loader = DataLoader(torch.arange(10), batch_size=4)
    assert [batch.tolist() for batch in keepbusy.prefetch(loader)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_a_loader_may_use_the_memory_of_its_batches_again() -> None:
    """As soon as it is asked for the next one, like any iterator."""

    def loader(size: int) -> Iterator[Tensor]:
        buffer = torch.zeros(size, dtype=torch.int64)
        for index in range(9):
            yield buffer.fill_(index)

    for size in (9, 1 << 18):
        assert read(keepbusy.prefetch(loader(size))) == list(range(9))


def test_batches_of_any_size_in_any_order() -> None:
    sizes = [3, 70_000, 0, 1, 9_000, 70_000, 2]
    got = list(keepbusy.prefetch([torch.full((size,), size) for size in sizes]))
    assert [batch.numel() for batch in got] == sizes
    assert all((batch == size).all() for batch, size in zip(got, sizes, strict=True))


# what the device does


def test_five_hundred_tensors_are_one_copy(machine: Any) -> None:
    batch = {f"feature {index}": torch.full((7, 3), index) for index in range(500)}
    with Watched(machine) as watched:
        got = next(iter(keepbusy.prefetch([batch])))
    assert [watched.direction(row) for row in watched.copies()] == [Direction.HOST_TO_DEVICE]
    assert all((got[f"feature {index}"] == index).all() for index in range(500))


def test_a_large_pinned_tensor_is_not_packed(machine: Any) -> None:
    large, small = torch.ones(1 << 20).pin_memory(), torch.ones(5)
    with Watched(machine) as watched:
        got = next(iter(keepbusy.prefetch([(large, small)])))
    assert sorted(watched.sizes(watched.copies())) == [512, large.nbytes]
    assert got[0].sum() == 1 << 20


def test_bytes_travel_as_bytes(machine: Any) -> None:
    images = torch.zeros(16, 3, 64, 64, dtype=torch.uint8)
    with Watched(machine) as watched:
        next(iter(keepbusy.prefetch([images], then=lambda batch: batch.float())))
    assert watched.sizes(watched.copies()) == [images.nbytes]


def test_copies_run_beside_the_compute(machine: Any) -> None:
    with Watched(machine) as watched:
        for _ in keepbusy.prefetch([torch.zeros(1 << 20) for _ in range(6)]):
            compute(machine, 300_000)
    copies = watched.copies()
    kernels = [row for row in watched.rows(Kind.KERNEL) if watched.lane(row) != watched.lane(copies[0])]
    beside = [any(watched.overlap(copy, kernel) for kernel in kernels) for copy in copies[2:]]
    assert beside == [True] * 4


def test_the_host_never_waits_for_the_device(machine: Any) -> None:
    """But for pinned memory, and for that by its event."""
    with Watched(machine) as watched:
        for batch in keepbusy.prefetch([torch.zeros(1 << 16) for _ in range(8)]):
            batch.sum()
    assert {watched.name(row) for row in watched.rows(Kind.SYNC)} <= {"cudaEventSynchronize"}


def test_one_tensor_changed_in_place_does_not_disturb_the_others() -> None:
    """They lie in one piece of memory; autograd must not take a change of one for a change of all."""
    batch = next(iter(keepbusy.prefetch([{"x": torch.ones(4), "ids": torch.zeros(4)}])))
    weight = torch.ones(4, device="cuda", requires_grad=True)
    loss = (weight * batch["x"]).sum()
    batch["ids"] += 1
    loss.backward()
    assert weight.grad.tolist() == [1] * 4
    assert not batch["x"]._is_view()


def test_losses_are_those_of_the_plain_loop_bit_for_bit() -> None:
    def losses(prefetched: bool) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 1)).cuda()
        optimizer = torch.optim.Adam(model.parameters())
        loader = DataLoader(torch.randn(90, 12), batch_size=8, shuffle=True)
        found = []
        for batch in keepbusy.prefetch(loader) if prefetched else loader:
            loss = model(batch if prefetched else batch.cuda()).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    assert losses(True) == losses(False)


# errors of the loader and of `then`


class Broken(Dataset):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Tensor:
        if index == 3:
            raise LookupError("the fourth sample is damaged")
        return torch.tensor(index)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_comes_where_its_batch_would_have(workers: int) -> None:
    batches = iter(keepbusy.prefetch(DataLoader(Broken(), batch_size=None, num_workers=workers)))
    assert [int(next(batches)) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(LookupError, match="the fourth sample is damaged") as caught:
        next(batches)
    assert "__getitem__" in "".join(traceback.format_exception(caught.value))
    assert [int(batch) for batch in batches] == [4, 5]  # a DataLoader goes on after an error; so do we


def test_after_its_error_a_generator_is_over() -> None:
    def loader() -> Iterator[Tensor]:
        yield torch.tensor(0)
        raise ValueError("no more")

    batches = iter(keepbusy.prefetch(loader()))
    assert int(next(batches)) == 0
    with pytest.raises(ValueError, match="no more") as caught:
        next(batches)
    assert caught.traceback[-1].name == "loader"
    assert list(batches) == []


def test_an_error_of_then_comes_in_turn() -> None:
    def third_fails(batch: Tensor) -> Tensor:
        if len(seen) == 2:
            seen.append(None)
            raise ValueError("cannot augment this")
        seen.append(batch)
        return batch

    seen: list[Any] = []
    batches = iter(keepbusy.prefetch(numbers(5), depth=3, then=third_fails))
    assert read([next(batches), next(batches)]) == [0, 1]
    with pytest.raises(ValueError, match="cannot augment this"):
        next(batches)
    assert read(batches) == [3, 4]


def test_an_interrupt_is_not_kept_back() -> None:
    def loader() -> Iterator[Tensor]:
        yield torch.tensor(0)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        next(iter(keepbusy.prefetch(loader())))


# leaving early


def left_by(how: str, loader: Any) -> None:
    batches = keepbusy.prefetch(loader)
    if how == "break":
        for _ in batches:
            break
    elif how == "del":
        iterator = iter(batches)
        next(iterator)
        del iterator
    elif how == "error":
        with pytest.raises(ZeroDivisionError):
            [int(batch.flatten()[0]) / 0 for batch in batches]
    else:
        list(batches)


def test_a_loader_that_is_interrupted_loses_no_batch() -> None:
    class Interrupted:
        asked = 0

        def __iter__(self) -> Interrupted:
            return self

        def __next__(self) -> Tensor:
            self.asked += 1
            if self.asked == 5:
                raise KeyboardInterrupt
            if self.asked > 9:
                raise StopIteration
            return torch.full((4,), self.asked)

    batches, found = iter(keepbusy.prefetch(Interrupted())), []
    with pytest.raises(KeyboardInterrupt):
        found.extend(int(batch[0]) for batch in batches)
    assert found + read(batches) == [1, 2, 3, 4, 6, 7, 8, 9]


@pytest.mark.parametrize("how", ["break", "del", "error", "end"])
def test_leaving_closes_the_loader(how: str) -> None:
    def loader() -> Iterator[Tensor]:
        try:
            yield from numbers(9)
        finally:
            closed.append(True)

    closed: list[bool] = []
    left_by(how, loader())
    assert closed == [True]


@pytest.mark.parametrize("how", ["break", "del", "error", "end"])
def test_leaving_gives_pinned_memory_back(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made, empty = [], torch.empty

    def remember(*size: Any, **options: Any) -> Tensor:
        tensor = empty(*size, **options)
        if options.get("pin_memory"):
            made.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr(torch, "empty", remember)
    gc.disable()
    try:
        left_by(how, numbers(9))
        assert made
        assert [one() for one in made if one() is not None] == []
    finally:
        gc.enable()


@pytest.mark.parametrize("how", ["break", "del", "error", "end"])
def test_no_thread_of_python_packs(how: str) -> None:
    before = threading.active_count()
    seen: list[int] = []

    def loader() -> Iterator[Tensor]:
        for index in range(9):
            seen.append(threading.active_count())
            yield torch.full((1 << 18,), index)

    left_by(how, loader())
    assert {*seen, threading.active_count()} == {before}


class Columns(Dataset):
    """Samples of many small tensors, with a large one, a text, and what moves itself."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> dict[str, Any]:
        small = {f"column {number}": torch.full((3, 2 + number % 2), 100.0 * index + number) for number in range(20)}
        small |= {f"count {number}": torch.tensor(index + number) for number in range(10)}
        return small | {
            "large": torch.full((1 << 18,), index),
            "name": f"sample {index}",
            "graph": Graph(torch.ones(2)),
        }


def untouched(sample: Any) -> Any:
    return sample


def first(samples: list[Any]) -> Any:
    return samples[0]


@pytest.mark.parametrize("options", [{}, {"pin_memory": True}, {"persistent_workers": True}])
def test_small_tensors_are_joined_in_the_workers(options: dict[str, Any]) -> None:
    loader = DataLoader(Columns(), num_workers=2, collate_fn=first, **options)
    batches = keepbusy.prefetch(loader)
    for _ in range(2):
        for index, batch in enumerate(batches):
            expected = Columns()[index]
            assert list(batch) == list(expected)
            assert batch.pop("name") == expected.pop("name")
            assert batch.pop("graph").double.sum() == 4
            assert expected.pop("graph").name == "graph"
            for name, tensor in expected.items():
                assert batch[name].is_cuda
                assert batch[name].dtype == tensor.dtype
                assert torch.equal(batch[name].cpu(), tensor)
        assert index == 5
    assert loader.collate_fn is first  # others get what they are used to
    assert isinstance(next(iter(loader)), dict)


def test_from_a_worker_small_tensors_come_as_one(machine: Any) -> None:
    loader = DataLoader([{f"column {number}": torch.ones(2) for number in range(64)}], num_workers=1)
    with Watched(machine) as watched:
        (batch,) = keepbusy.prefetch(loader)
    assert sum(tensor.sum() for tensor in batch.values()) == 128
    assert len({tensor.untyped_storage().data_ptr() for tensor in batch.values()}) == 1
    assert watched.sizes(watched.copies()) == [64 * 512]


def test_the_device_copies_from_where_the_worker_wrote(machine: Any) -> None:
    """Nothing is packed anew, though the loader does not pin its memory."""
    loader = DataLoader([torch.full((1 << 18,), float(index)) for index in range(4)], num_workers=1)
    batches = keepbusy.prefetch(loader)
    with Watched(machine) as watched:
        assert [int(batch[0, 0]) for batch in batches] == [0, 1, 2, 3]
    there = [row for row in watched.copies() if watched.direction(row) == Direction.HOST_TO_DEVICE]
    assert watched.sizes(there) == [1 << 20] * 4
    assert batches.report().packed == 0


def test_leaving_ends_the_workers() -> None:
    for _ in keepbusy.prefetch(DataLoader(torch.arange(100), batch_size=2, num_workers=2)):
        assert multiprocessing.active_children()
        break
    assert multiprocessing.active_children() == []


def test_a_batch_outlives_the_loop() -> None:
    kept = list(keepbusy.prefetch(numbers(20), depth=1))
    assert read(kept) == list(range(20))


def test_passes_repeat() -> None:
    batches = keepbusy.prefetch(numbers(4))
    assert [read(batches) for _ in range(3)] == [[0, 1, 2, 3]] * 3
    assert read(zip_first(batches, batches)) == [0, 0, 1, 1, 2, 2, 3, 3]


def zip_first(one: Any, other: Any) -> Iterator[Tensor]:
    for pair in zip(one, other, strict=True):
        yield from pair


# going on later


class Stateful:
    """A loader that keeps its own place, as torchdata's do."""

    def __init__(self, count: int) -> None:
        self.count, self.at = count, 0

    def __iter__(self) -> Iterator[Tensor]:
        while self.at < self.count:
            self.at += 1
            yield torch.tensor(self.at - 1)
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def test_it_resumes_at_the_first_batch_the_loop_has_not_had(loader: Any, stop: int, depth: int) -> None:
    """However far ahead it fetched."""
    batches = keepbusy.prefetch(loader(), depth=depth)
    had = [int(batch) for batch in islice(batches, stop)]
    again = keepbusy.prefetch(loader(), depth=depth)
    again.load_state_dict(batches.state_dict())
    assert again.state_dict() == batches.state_dict()
    assert had + [int(batch) for batch in again] == list(range(8))


LOADERS = {
    "stateful": lambda: Stateful(8),
    "counted": lambda: [torch.tensor(index) for index in range(8)],
    "DataLoader": lambda: DataLoader(torch.arange(8), batch_size=None),
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "stop" in metafunc.fixturenames:
        metafunc.parametrize("loader", LOADERS.values(), ids=LOADERS)
        metafunc.parametrize(("stop", "depth"), [(0, 2), (1, 2), (3, 1), (3, 4), (7, 2), (8, 2)])


def test_state_within_the_loop_and_after_it() -> None:
    batches = keepbusy.prefetch(Stateful(3))
    assert [batches.state_dict()["delivered"] for _ in batches] == [1, 2, 3]
    assert batches.state_dict() == {"delivered": 0, "loader": {"at": 0}}  # a pass that is over begins anew


def test_a_state_may_be_loaded_into_a_loop_that_runs() -> None:
    batches = keepbusy.prefetch(numbers(5))
    for batch in batches:
        if int(batch[0, 0]) == 1:
            break
    state = batches.state_dict()
    assert read(batches) == [0, 1, 2, 3, 4]
    batches.load_state_dict(state)
    assert read(batches) == [2, 3, 4]
    assert read(batches) == [0, 1, 2, 3, 4]


# the loader shows through


def test_the_loader_shows_through() -> None:
    sampler = DistributedSampler(range(10), num_replicas=2, rank=0)
    loader = DataLoader(torch.arange(10), batch_size=2, sampler=sampler)
    batches = keepbusy.prefetch(loader)
    assert len(batches) == 3
    assert batches.sampler is sampler
    assert batches.dataset is loader.dataset
    assert batches.batch_sampler is loader.batch_sampler
    batches.sampler.set_epoch(4)
    assert sampler.epoch == 4
    with pytest.raises(AttributeError, match="nonsense"):
        batches.nonsense  # noqa: B018
    with pytest.raises(TypeError):
        len(keepbusy.prefetch(iter([])))
    assert len(copy.copy(batches)) == 3


# misuse


def test_a_loader_that_tells_of_its_last_batch_is_not_fetched_ahead() -> None:
    """Accelerate's: the accelerator would cut or join the results of the wrong batches."""

    class DataLoaderShard(list[Tensor]):
        end_of_dataloader = False

    with pytest.raises(ValueError, match=r"^prefetch got a loader that `accelerator.prepare` made, "):
        keepbusy.prefetch(DataLoaderShard())


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"depth": 0}, "prefetch got depth=0 but needs at least one batch ahead: give depth=1 or more."),
        ({"depth": True}, "prefetch got depth=True but needs"),
        ({"depth": 1.5}, "prefetch got depth=1.5 but needs"),
        ({"device": "cpu"}, "prefetch got device='cpu' but copies to CUDA devices: give device='cuda' or none."),
        ({"device": torch.device("meta")}, "prefetch got device='meta' but"),
    ],
)
def test_misuse_is_told_at_once(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        keepbusy.prefetch([], **options)


@pytest.mark.parametrize("device", [None, "cpu", "cuda"])
def test_without_cuda_it_is_a_plain_iterator(device: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    pulled = []

    def loader() -> Iterator[Tensor]:
        for index, batch in enumerate(numbers(4)):
            pulled.append(index)
            yield batch

    batches = keepbusy.prefetch(loader(), device=device, then=lambda batch: batch * 2)
    iterator = iter(batches)
    assert read([next(iterator)]) == [0]
    assert pulled == [0]
    assert batches.state_dict() == {"delivered": 1}
    assert read(iterator) == [2, 4, 6]
    assert "Nothing was measured" in str(batches.report())


# it knows itself


def test_the_report_of_copies_that_the_compute_hides(machine: Any) -> None:
    batches = keepbusy.prefetch([torch.zeros(1 << 20).pin_memory() for _ in range(9)])
    for _ in batches:
        compute(machine, 300_000)
    torch.cuda.synchronize()
    report = batches.report()
    assert (report.batches, report.size) == (8, 8 << 22)
    assert report.hidden == 1
    assert str(report).startswith("100.0% of the copies were hidden (8 batches, ")


def test_the_report_of_copies_that_outlast_the_compute(machine: Any) -> None:
    batches = keepbusy.prefetch([torch.zeros(1 << 22).pin_memory() for _ in range(9)])
    for _ in batches:
        compute(machine, 20_000)
    torch.cuda.synchronize()
    assert batches.report().hidden < 0.2
    assert "which outlast the work beside them" in str(batches.report())


def compute(machine: Any, time: int) -> None:
    machine.clock.launch(machine.stream(0), [("compute", time)])


class Watched:
    """What the machine does inside: its rows, and questions about them."""

    def __init__(self, machine: Any) -> None:
        self._clock = machine.clock

    def __enter__(self) -> Watched:
        self._from = self._clock.rows.spans.count
        return self

    def __exit__(self, *error: object) -> None:
        self._timeline = self._clock.timeline()
        self._until = self._clock.rows.spans.count

    def rows(self, kind: Kind) -> list[int]:
        return [row for row in range(self._from, self._until) if self._timeline.spans.kind[row] == kind]

    def copies(self) -> list[int]:
        return self.rows(Kind.COPY)

    def lane(self, row: int) -> int:
        return int(self._timeline.spans.lane[row])

    def name(self, row: int) -> str:
        return self._timeline[row].name

    def sizes(self, rows: list[int]) -> list[int]:
        return [int(self._timeline.spans.size[row]) for row in rows]

    def direction(self, row: int) -> int:
        return int(self._timeline.spans.direction[row])

    def overlap(self, one: int, other: int) -> bool:
        first, second = self._timeline[one], self._timeline[other]
        return first.start < second.end and second.start < first.end
