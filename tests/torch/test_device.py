"""A program asks what it runs on, and hears what it would hear from a GPU."""

from __future__ import annotations

import copy
import io
import os
import pickle
import sys
import threading

import pytest
import torch
from torch import nn

from keepbusy.virtual.pytorch import operators

X = torch.arange(12.0).view(3, 4)


def test_a_tensor_is_a_plain_tensor_of_the_device() -> None:
    x = X.to("cuda")
    assert type(x) is torch.Tensor
    assert (x.device, x.is_cuda, x.get_device()) == (torch.device("cuda", 0), True, 0)
    assert "device='cuda:0'" in repr(x)
    assert x.tolist() == X.tolist()


def test_each_kernel_is_registered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch 2.11 refuses a second one of a name, newer ones do not."""
    registered: list[tuple[str, str]] = []

    class Library:
        def __init__(self, *_: str) -> None:
            pass

        def impl(self, name: str, _: object, key: str) -> None:
            registered.append((name, key))

        def fallback(self, _: object, key: str) -> None:
            registered.append(("", key))

    monkeypatch.setattr(torch.library, "Library", Library)
    operators.register()
    assert len({*registered}) == len(registered) > 1_000


@pytest.mark.parametrize("make", ["zeros", "ones", "empty", "rand", "randn"])
def test_factories(make: str) -> None:
    assert getattr(torch, make)(3, device="cuda").is_cuda
    with torch.device("cuda"):
        assert getattr(torch, make)(3).is_cuda
    assert not getattr(torch, make)(3).is_cuda


def test_there_are_as_many_devices_as_were_asked_for() -> None:
    assert torch.cuda.is_available()
    assert torch.cuda.device_count() == 8
    assert torch.accelerator.current_accelerator() == torch.device("cuda")
    assert torch.cuda.get_device_name() == "NVIDIA H200"
    assert torch.cuda.get_device_capability() == (9, 0)
    assert torch.cuda.is_bf16_supported()
    with pytest.raises((RuntimeError, AssertionError)):
        torch.ones(1, device="cuda:9")


def test_the_current_device_is_the_threads_own() -> None:
    seen = []
    with torch.cuda.device(3):
        assert torch.ones(1, device="cuda").device.index == 3
        thread = threading.Thread(target=lambda: seen.append(torch.ones(1, device="cuda").device.index))
        thread.start()
        thread.join()
    assert seen == [0]
    assert torch.cuda.current_device() == 0


def test_gradients_stay_on_their_device() -> None:
    weight = torch.ones(3, device="cuda:5", requires_grad=True)
    (weight * 2).sum().backward()
    assert weight.grad.device.index == 5


@pytest.mark.parametrize(
    "mixed",
    [
        lambda: X.to("cuda") + X,
        lambda: X.to("cuda") @ X.t(),
        lambda: nn.Linear(4, 2)(X.to("cuda")),
        lambda: X.to("cuda:0") + X.to("cuda:1"),
        lambda: torch.cat([X, X.to("cuda")]),
    ],
)
def test_mixed_devices_fail(mixed) -> None:
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        mixed()


def test_a_scalar_of_the_host_may_join() -> None:
    assert (X.to("cuda") + torch.tensor(1.0)).is_cuda


def test_numpy_needs_a_copy_home() -> None:
    with pytest.raises(TypeError, match="can't convert cuda:0 device type tensor to numpy"):
        X.to("cuda").numpy()


def test_pinned_memory_is_told_apart() -> None:
    pinned = X.pin_memory()
    assert pinned.is_pinned()
    assert not X.is_pinned()
    assert torch.empty(3, pin_memory=True).is_pinned()
    assert pinned.to("cuda").cpu().tolist() == X.tolist()
    with pytest.raises(RuntimeError, match="only dense CPU tensors can be pinned"):
        X.cuda().pin_memory()


def test_saved_tensors_come_back_where_they_are_wanted() -> None:
    buffer = io.BytesIO()
    torch.save(nn.Linear(3, 3).to("cuda").state_dict(), buffer)
    for wanted in ("cuda", "cpu"):
        buffer.seek(0)
        assert torch.load(buffer, map_location=wanted)["weight"].device.type == wanted
    buffer.seek(0)
    assert torch.load(buffer)["weight"].is_cuda


def test_copies_of_python_objects() -> None:
    module = nn.Linear(2, 2).to("cuda")
    assert copy.deepcopy(module).weight.is_cuda
    assert pickle.loads(pickle.dumps(module.weight)).is_cuda


def test_streams_and_events() -> None:
    side, start, end = torch.cuda.Stream(), *(torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    with torch.cuda.stream(side):
        assert torch.cuda.current_stream() == side
        torch.ones(1 << 20, device="cuda").exp()
    torch.cuda.current_stream().wait_stream(side)
    end.record()
    end.synchronize()
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert 0 < start.elapsed_time(end) < 100
    assert end.query()
    assert side.query()
    torch.ones(1, device="cuda").record_stream(side)


def test_memory_is_counted() -> None:
    before = torch.cuda.memory_allocated()
    x = torch.empty(1 << 20, device="cuda")
    assert torch.cuda.memory_allocated() - before == 4 << 20
    view = x[:10]
    del x
    assert torch.cuda.memory_allocated() - before == 4 << 20
    del view
    assert torch.cuda.memory_allocated() == before
    assert torch.cuda.max_memory_allocated() >= before + (4 << 20)
    free, total = torch.cuda.mem_get_info()
    assert 0 < free <= total
    assert "PyTorch CUDA memory summary" in torch.cuda.memory_summary()


def test_a_full_device_says_so() -> None:
    with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        [torch.empty(1 << 30, device="cuda") for _ in range(40)]


def test_results_grow_where_they_are_written() -> None:
    assert torch.add(X.cuda(), 1, out=torch.empty(0, device="cuda")).shape == X.shape
    assert torch.empty(2, device="cuda").resize_(100).shape == (100,)


@pytest.mark.parametrize("size", [(1, 2, 3, 4), (2, 3, 4, 5)])
def test_what_is_resized_has_the_layout_that_was_asked_for(size: tuple[int, ...]) -> None:
    on_host, on_device = (torch.arange(24.0, device=device).view(1, 2, 3, 4) for device in ("cpu", "cuda"))
    for tensor in (on_host, on_device):
        tensor.resize_(size, memory_format=torch.channels_last)
    assert on_device.stride() == on_host.stride()
    assert on_device.as_strided([24], [1]).tolist() == on_host.as_strided([24], [1]).tolist()


@pytest.mark.parametrize(
    ("make", "layout"),
    [
        (lambda: X.cuda().to_sparse_csr(), "sparse"),
        (lambda: torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)], device="cuda") * 2, "nested"),
    ],
)
def test_other_layouts_are_refused_by_name(make, layout: str) -> None:
    with pytest.raises(NotImplementedError, match=layout):
        make()


def test_a_forked_child_has_a_device_of_its_own() -> None:
    child = os.fork()
    if child == 0:
        try:
            os._exit(int((torch.ones(3, device="cuda") * 2).sum().item()))
        except BaseException:
            os._exit(99)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 6


def test_loader_workers_and_their_pinned_batches() -> None:
    data = torch.utils.data.TensorDataset(torch.arange(16.0))
    loader = torch.utils.data.DataLoader(data, 4, num_workers=1, pin_memory=True)
    batches = [batch for (batch,) in loader]
    assert all(batch.is_pinned() for batch in batches)
    assert sum(batch.to("cuda", non_blocking=True).sum().item() for batch in batches) == 120


def test_compiled_code_runs_eagerly_and_says_so_once(machine, capsys: pytest.CaptureFixture[str]) -> None:
    machine.compiled_eagerly = False
    assert (machine.facts()["notes"], machine.facts()["compiled_eagerly"]) == ((), False)
    module = nn.Linear(4, 2).cuda()
    assert torch.compile(module) is module
    assert torch.compile(mode="reduce-overhead")(len) is len
    module.compile()
    assert capsys.readouterr().err.count("torch.compile runs eagerly") == 1
    assert "torch.compile ran eagerly" in machine.facts()["notes"][0]  # what the report begins its notes with
    assert machine.facts()["compiled_eagerly"]


def test_the_build_tells_of_its_cuda() -> None:
    """Libraries look into it while they are imported."""
    told = torch.__config__.show().splitlines()
    at = next(number for number, line in enumerate(told) if "CPU capability" in line)
    assert told[at + 1 : at + 3] == [f"  - CUDA Runtime {torch.version.cuda}", "  - CuDNN 91.0.2"]
    assert "at::get_num_threads()" in torch.__config__.parallel_info()


def test_a_copy_of_a_tensor_has_memory_of_its_own() -> None:
    """Lightning and averaged models copy tensors that are no parameters."""
    whole = torch.arange(6.0, device="cuda:2")
    held = {"whole": whole, "part": whole[2:4], "one": whole.sum()}
    copied = copy.deepcopy(held)
    whole.zero_()
    assert [one.device.index for one in copied.values()] == [2, 2, 2]
    assert [one.tolist() for one in copied.values()] == [list(range(6)), [2, 3], 15]
    copied["part"].fill_(7)
    assert copied["whole"].tolist() == [0, 1, 7, 7, 4, 5]


def test_packages_built_for_the_same_cuda_find_it() -> None:
    """torchvision refuses to be imported beside another major version than its own; PyTorch 2.11 and newer have 13."""
    major = 13 if torch.__version__ >= (2, 11) else 12
    assert torch.version.cuda.split(".")[0] == str(major)
    assert torch._C._cuda_getCompiledVersion() // 1000 == major


def test_the_older_types_of_tensors_make_tensors_of_the_device() -> None:
    kind = torch.cuda.FloatTensor
    made = [kind(2, 3), kind([1.0, 2.0]), kind(torch.Size([2])), kind(), X.type(kind), X.type("torch.cuda.FloatTensor")]
    assert [(list(one.shape), one.type()) for one in made] == [
        (shape, "torch.cuda.FloatTensor") for shape in ([2, 3], [2], [2], [0], [3, 4], [3, 4])
    ]
    assert made[1].tolist() == [1, 2]
    with torch.cuda.device(2):
        assert torch.cuda.LongTensor([3]).device.index == 2
    assert [isinstance(one, kind) for one in (X.cuda(), X, X.cuda().long())] == [True, False, False]


WHOLE = torch.tensor([[1, 2], [4, 5]])


@pytest.mark.parametrize(
    ("compute", "made"),
    [
        (lambda: torch.histc(WHOLE.int().cuda(), 3, 0, 6), torch.tensor([1, 1, 2], dtype=torch.int32)),
        (lambda: torch.histc(WHOLE.cuda().flatten(), bins=2, min=0, max=6), torch.tensor([2, 2])),
        (lambda: (WHOLE.cuda() > 1).abs(), WHOLE > 1),
        (lambda: torch.nn.functional.softsign(WHOLE.cuda() > 1), torch.tensor([[0.0, 0.5], [0.5, 0.5]])),
        (lambda: (WHOLE.cuda() > 1).trace(), torch.tensor(1)),
        (lambda: torch.tensor([1 + 1j, torch.nan]).cuda().nansum(), torch.tensor(1 + 1j)),
    ],
)
def test_types_that_only_cuda_computes(compute, made: torch.Tensor) -> None:
    """Routing of mixtures of experts counts whole numbers by `histc`."""
    result = compute()
    assert result.is_cuda
    assert result.dtype is made.dtype
    assert torch.equal(result.cpu(), made)


@pytest.mark.parametrize(
    ("compute", "kernel"),
    [
        (lambda one: one @ one, "addmm_cuda"),
        (lambda one: one @ one[0], "addmv_impl_cuda"),
        (lambda one: one[None] @ one[None], "baddbmm_cuda"),
        (lambda one: torch.einsum("ij,jk->ik", one, one), "baddbmm_cuda"),
        (lambda one: one[0] @ one[0], "dot"),
        (lambda one: torch.nn.functional.linear(one, one, one[0]), "addmm_cuda"),
        (lambda one: torch.nn.functional.avg_pool2d(one[None], 2), "avg_pool2d_out_cuda_frame"),
        (lambda one: torch.nn.functional.max_pool2d(one[None], 2), "max_pool2d_with_indices_out_cuda_frame"),
        (lambda one: torch.nn.functional.conv2d(one[None, None], one[None, None]), "slow_conv2d_cuda"),
    ],
)
@pytest.mark.parametrize(("dtype", "name"), [(torch.int64, "Long"), (torch.int32, "Int")])
def test_products_of_whole_numbers_are_refused_as_cuda_refuses_them(compute, kernel, dtype, name) -> None:
    """The host computes them, and the program would fail on the first real GPU."""
    for _ in range(2):  # what is known of a call does not let it pass
        with pytest.raises(NotImplementedError, match=f"\"{kernel}\" not implemented for '{name}'"):
            compute(WHOLE.to(dtype).cuda())


def test_the_profiler_does_not_fail_at_each_operator(capfd: pytest.CaptureFixture[str]) -> None:
    kinds = torch.profiler.ProfilerActivity
    x = torch.ones(4, 4, device="cuda")
    with torch.profiler.profile(activities=[kinds.CPU, kinds.CUDA]) as profile:
        (x @ x).sum().item()
    assert {"aten::mm", "aten::sum"} <= {one.key for one in profile.key_averages()}
    assert "Exception raised" not in capfd.readouterr().err


def test_what_the_compiler_imports_of_a_build_with_cuda_is_there() -> None:
    torch._dynamo.reset()
    assert "torch._inductor.cudagraph_trees" in sys.modules


def test_streams_and_events_say_what_they_are() -> None:
    current, side = torch.cuda.current_stream(), torch.cuda.Stream()
    assert current.cuda_stream == 0
    assert side.cuda_stream == side.stream_id == side.native_handle != 0
    assert f"cuda_stream={side.cuda_stream:#x}" in repr(side)
    assert torch.cuda.Stream.priority_range() == (0, -5)
    event = torch.cuda.Event()
    assert "uninitialized" in repr(event)
    torch.cuda._sleep(1_000_000)
    event.record()
    event.wait(side)
    assert "uninitialized" not in repr(event)
    assert event.cuda_event == event.event_id
    assert not side.query()
    with pytest.raises(NotImplementedError, match="no events that processes share"):
        event.ipc_handle()


def test_zeros_that_nobody_reads_are_zeros() -> None:
    assert torch._efficientzerotensor((2, 3), device="cuda").tolist() == [[0.0] * 3] * 2
