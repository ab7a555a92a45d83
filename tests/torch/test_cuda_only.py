"""What PyTorch has for CUDA alone: a way, or a refusal by name."""

from __future__ import annotations

import copy
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional


@pytest.mark.parametrize("kind", [nn.GRUCell, nn.LSTMCell])
@pytest.mark.parametrize("bias", [True, False])
def test_cells_of_recurrent_networks_give_what_the_cpu_gives(kind: type[nn.Module], bias: bool) -> None:
    host = kind(4, 5, bias=bias)  # type: ignore[call-arg]
    device, x = copy.deepcopy(host).cuda(), torch.randn(3, 4)
    given = [x.clone().requires_grad_(), x.cuda().requires_grad_()]
    for module, one in zip((host, device), given, strict=True):
        state = None
        for _ in range(2):
            state = module(one, state)
        (state if isinstance(state, Tensor) else state[0] + state[1]).square().sum().backward()
    torch.testing.assert_close(given[1].grad.cpu(), given[0].grad)
    for one, other in zip(host.parameters(), device.parameters(), strict=True):
        torch.testing.assert_close(other.grad.cpu(), one.grad)


@pytest.mark.parametrize("softmax", [torch.softmax, torch.log_softmax, functional.softmax, functional.log_softmax])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_softmax_of_sixteen_bits_gives_thirty_two(softmax: Any, dtype: torch.dtype) -> None:
    x = torch.randn(3, 5).to(dtype)
    given = x.cuda().requires_grad_()
    found = softmax(given, dim=-1, dtype=torch.float32)
    host = x.float().requires_grad_()
    expected = softmax(host, dim=-1)
    weights = torch.arange(5.0)
    (found * weights.cuda()).sum().backward()
    (expected * weights).sum().backward()
    assert found.dtype is torch.float32
    assert given.grad.dtype is dtype
    assert torch.equal(found.detach().cpu(), expected.detach())
    assert torch.equal(given.grad.cpu(), host.grad.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_losses_under_autocast(dtype: torch.dtype) -> None:
    module, x = nn.Linear(8, 5).cuda(), torch.randn(3, 8, device="cuda")
    with torch.autocast("cuda", dtype=dtype):
        logits = module(x)
        loss = functional.cross_entropy(logits, torch.tensor([0, 3, 1], device="cuda"))
        loss = loss + logits.softmax(-1).square().sum() + logits.log_softmax(-1, dtype=torch.float32).mean()
    loss.backward()
    assert logits.dtype is dtype
    assert loss.dtype is torch.float32
    assert bool(module.weight.grad.isfinite().all())


def test_halves_of_synchronized_batch_norm_make_a_whole() -> None:
    """Two ranks' statistics, gathered as `nn.SyncBatchNorm` does, against one batch norm over both."""
    x, gradient = torch.randn(6, 3, 4, device="cuda"), torch.randn(6, 3, 4, device="cuda")
    weight, bias = torch.randn(3, device="cuda"), torch.randn(3, device="cuda")
    parts, counts = x.chunk(2), torch.tensor([12, 12], device="cuda", dtype=torch.int32)
    means, scales = zip(*(torch.batch_norm_stats(one, 1e-5) for one in parts), strict=True)
    running = [torch.zeros(3, device="cuda"), torch.ones(3, device="cuda")]
    mean, scale = torch.batch_norm_gather_stats_with_counts(
        x, torch.stack(means), torch.stack(scales), *running, 0.1, 1e-5, counts.float()
    )
    found = torch.batch_norm_elemt(x, weight, bias, mean, scale, 1e-5)

    whole, given = nn.BatchNorm1d(3).cuda(), x.clone().requires_grad_()
    whole.weight.data, whole.bias.data = weight.clone(), bias.clone()
    expected = whole(given)
    expected.backward(gradient)
    torch.testing.assert_close(found, expected)
    for one, other in zip(running, (whole.running_mean, whole.running_var), strict=True):
        torch.testing.assert_close(one, other)
    reduced = torch.batch_norm_backward_reduce(gradient, x, mean, scale, weight, True, True, True)
    of_input = torch.batch_norm_backward_elemt(gradient, x, mean, scale, weight, reduced[0], reduced[1], counts)
    for one, other in zip(
        (of_input, reduced[2], reduced[3]), (given.grad, whole.weight.grad, whole.bias.grad), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_products_of_sixteen_bits_give_thirty_two() -> None:
    one, other = torch.randn(2, 3).half().cuda(), torch.randn(3, 2).half().cuda()
    found = torch.mm(one, other, out_dtype=torch.float32)
    assert torch.equal(found, one.float() @ other.float())


@pytest.mark.parametrize(
    "name", ["_flash_attention_forward", "_efficient_attention_forward", "_scaled_grouped_mm", "cudnn_batch_norm"]
)
def test_what_has_no_way_is_refused_in_one_sentence(name: str) -> None:
    overload = getattr(torch.ops.aten, name).default
    x = torch.ones(2, 2, device="cuda")
    by_type = {"Tensor": x, "int": 1, "SymInt": 1, "float": 1.0, "bool": False}
    given = [by_type.get(str(one.type)) for one in overload._schema.arguments if not one.kwarg_only]
    with pytest.raises(NotImplementedError) as caught:
        overload(*given)
    assert str(caught.value) == f"keepbusy's virtual GPU cannot run aten::{name}: PyTorch has it for CUDA alone."


TRITON = """
import torch, triton
import triton.language as tl

def add_kernel(x, count, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(x + at, tl.load(x + at) + 1)

plain = triton.jit(add_kernel)
tuned = triton.autotune(configs=[triton.Config({"BLOCK": 16}), triton.Config({"BLOCK": 32})], key=["count"])(plain)
x = torch.zeros(16, device="cuda")
for launch in (lambda: plain[(1,)](x, 16, BLOCK=16), lambda: plain.run(x, 16, BLOCK=16), lambda: tuned[(1,)](x, 16)):
    try:
        launch()
    except NotImplementedError as error:
        print(error)
"""
MADE_UP = {
    "triton/__init__.py": "from triton.runtime.jit import jit\nfrom triton.runtime.autotuner import autotune, Config\n",
    "triton/language.py": "constexpr = int\n",
    "triton/runtime/__init__.py": "",
    "triton/runtime/jit.py": """
class KernelInterface:
    def __getitem__(self, grid):
        return lambda *args, **kwargs: self.run(*args, grid=grid, **kwargs)

class JITFunction(KernelInterface):
    def __init__(self, fn): self.fn, self.__name__ = fn, fn.__name__
    def run(self, *args, **kwargs): raise AssertionError("no driver")

jit = JITFunction
""",
    "triton/runtime/autotuner.py": """
from triton.runtime.jit import KernelInterface

def Config(meta): return meta

class Autotuner(KernelInterface):
    def __init__(self, fn): self.fn, self.base_fn = fn, fn.fn
    def run(self, *args, **kwargs): raise AssertionError("no driver")

def autotune(configs, key): return Autotuner
""",
}
"""As much of it as is patched, where it is not installed."""


def test_triton_imports_and_its_kernels_are_refused_by_name(run, tmp_path) -> None:
    """Training stacks import it for kernels that they may never launch."""
    for name, text in ({} if find_spec("triton") else MADE_UP).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    done = run(TRITON)
    assert done.stdout.count("keepbusy's virtual GPU runs no kernels written in Triton (add_kernel).\n") == 3, (
        done.stderr
    )
