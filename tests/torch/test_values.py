"""Whatever runs on the virtual GPU gives what a plain run on the CPU gives, bit for bit in float32."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)

LABELS = torch.tensor([1, 0, 2, 1, 2, 0, 1, 1])


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project, self.norm = nn.Linear(16, 48), nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(self.norm(x)).view(2, 4, 3, 2, 8).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(8, 16)[:, :3]


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.cells = kind(16, 3, num_layers=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.cells(x)[0].flatten(0, 1)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(6, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 3)), (8, 6)),
    "conv": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=8), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(8 * 4 * 4, 3),
        ),
        (8, 3, 12, 12),
    ),
    "attention": (Attention, (2, 4, 16)),
    "lstm": (lambda: Recurrent(nn.LSTM), (4, 2, 16)),
    "gru": (lambda: Recurrent(nn.GRU), (4, 2, 16)),
    "dropout": (lambda: nn.Sequential(nn.Linear(6, 32), nn.Dropout(0.3), nn.Linear(32, 3)), (8, 6)),
    "encoder": (
        lambda: nn.Sequential(nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True), nn.Linear(16, 3),
                              nn.Flatten(0, 1)),
        (2, 4, 16),
    ),
}  # fmt: skip
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
}


def losses(device: str, model: str, optimizer: str = "sgd") -> list[float]:
    torch.manual_seed(0)
    make, shape = MODELS[model]
    module = make().to(device)
    steps, x = OPTIMIZERS[optimizer](module.parameters()), torch.randn(shape)
    found = []
    for _ in range(4):
        loss = F.cross_entropy(module(x.to(device)), LABELS.to(device))
        steps.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        steps.step()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("model", MODELS)
def test_models_train_alike(model: str) -> None:
    assert losses("cuda", model) == losses("cpu", model)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizers_step_alike(optimizer: str) -> None:
    assert losses("cuda", "mlp", optimizer) == losses("cpu", "mlp", optimizer)


def test_a_masked_attention_is_alike() -> None:
    def grads(device: str) -> list[Tensor]:
        torch.manual_seed(1)
        q, k, v = (torch.randn(1, 2, 5, 8).to(device).requires_grad_() for _ in range(3))
        mask = torch.ones(5, 5, dtype=torch.bool).tril().to(device)
        for dropout in (0.0, 0.2):
            torch.manual_seed(2)
            F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout).pow(2).sum().backward()
        return [one.grad.cpu() for one in (q, k, v)]

    assert all(torch.equal(one, other) for one, other in zip(grads("cuda"), grads("cpu"), strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_products_of_sixteen_bits_are_summed_in_float_and_rounded_once(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("keepbusy.virtual.pytorch.kernels._slow_types", lambda: {dtype})
    torch.manual_seed(3)
    images, filters = (torch.randn(size).to(dtype) for size in ((2, 8, 9, 9), (4, 8, 3, 3)))
    left, right, bias = (torch.randn(size).to(dtype) for size in ((33, 65), (65, 17), (17,)))

    def made(on: str, of: torch.dtype) -> list[Tensor]:
        x, w, a, b, c = (one.to(on, of).requires_grad_() for one in (images, filters, left, right, bias))
        out = [F.conv2d(x, w), a @ b, torch.addmm(c, a, b)]
        grads = torch.autograd.grad([one.sum() for one in out], [x, w, a, b])
        assert all(one.dtype is of for one in (*out, *grads))
        return [one.cpu().to(dtype) for one in out]

    for _ in range(2):  # new calls, then known ones
        assert all(map(torch.equal, made("cuda", dtype), made("cpu", torch.float32)))
    into = torch.zeros(33, 17, device="cuda", dtype=dtype)
    torch.mm(left.cuda(), right.cuda(), out=into)
    assert torch.equal(into.cpu(), (left.float() @ right.float()).to(dtype))


def test_an_autocast_step_with_a_scaler() -> None:
    scaler = torch.amp.GradScaler("cuda")
    module = nn.Linear(3, 3).to("cuda")
    steps = torch.optim.SGD(module.parameters(), lr=0.1)
    before = module.weight.detach().clone()
    with torch.autocast("cuda", dtype=torch.float16):
        out = module(torch.ones(2, 3, device="cuda"))
    scaler.scale(out.float().mean()).backward()
    scaler.step(steps)
    scaler.update()
    assert out.dtype is torch.float16
    assert not torch.equal(before, module.weight)
    assert scaler.get_scale() == 65536.0


def test_gradients_with_a_second_derivative() -> None:
    def second(device: str) -> Tensor:
        x = torch.linspace(0.1, 1, 5).to(device).requires_grad_()
        (first,) = torch.autograd.grad((x.sin() * x.exp()).sum(), x, create_graph=True)
        return torch.autograd.grad(first.sum(), x)[0].cpu()

    assert torch.equal(second("cuda"), second("cpu"))


def test_checkpointing_draws_the_same_mask_again() -> None:
    from torch.utils.checkpoint import checkpoint

    module = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)).to("cuda")
    x = torch.ones(4, 8, device="cuda", requires_grad=True)
    torch.manual_seed(3)
    plain = torch.autograd.grad(module(x).sum(), x)[0]
    torch.manual_seed(3)
    again = torch.autograd.grad(checkpoint(module, x, use_reentrant=False).sum(), x)[0]
    assert torch.equal(plain, again)


def _saves_products(_: object, operator: object, *__: object, **___: object) -> CheckpointPolicy:
    saved = operator is torch.ops.aten.mm.default
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize("selective", [False, True])
def test_an_operator_that_is_taken_apart_on_the_host_may_stand_in_a_checkpoint(selective: bool) -> None:
    """As in public training stacks: RMSNorm and attention within a block of which only the products are kept."""
    contexts = partial(create_selective_checkpoint_contexts, _saves_products) if selective else noop_context_fn
    gradients = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        x, w = (torch.randn(size, 8).to(device).requires_grad_() for size in (4, 8))
        done = checkpoint(
            lambda x, w: F.rms_norm(x @ w, (8,), w[0]) @ w, x, w, use_reentrant=False, context_fn=contexts
        )
        done.sum().backward()
        gradients += [x.grad.cpu(), w.grad.cpu()]
    assert torch.equal(gradients[0], gradients[2])
    assert torch.equal(gradients[1], gradients[3])


def test_functional_transforms() -> None:
    x = torch.arange(6.0, device="cuda").view(2, 3)
    assert torch.func.grad(lambda a: (a * a).sum())(x).tolist() == (2 * x).tolist()
    assert torch.func.vmap(lambda a: a.sum())(x).tolist() == [3.0, 12.0]


def test_a_dropout_that_keeps_nothing_passes_no_gradient_on() -> None:
    gradient, mask = torch.ones(4, device="cuda"), torch.ones(4, dtype=torch.bool, device="cuda")
    assert torch.ops.aten.native_dropout_backward(gradient, mask, 0.0).tolist() == [0.0] * 4


def test_results_that_are_too_small_grow_and_the_others_are_written() -> None:
    x, right, small = torch.tensor([[1.0, 5.0], [7.0, 2.0]]).cuda(), torch.zeros(2).cuda(), torch.empty(0).long().cuda()
    torch.max(x, 1, out=(right, small))
    assert (right.tolist(), small.tolist()) == ([5.0, 7.0], [1, 0])


def test_what_the_host_has_no_kernel_for_is_written_where_it_was_asked_for() -> None:
    counts = torch.zeros(2, dtype=torch.int64).cuda()
    torch.histc(torch.tensor([1, 2, 7]).cuda(), 2, 0, 8, out=counts)
    assert counts.tolist() == [2, 1]


def test_an_encoder_layer_at_inference_is_taken_apart() -> None:
    torch.manual_seed(0)
    layer, x = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval(), torch.randn(3, 5, 16)
    with torch.no_grad():
        assert torch.allclose(layer(x), layer.cuda()(x.cuda()).cpu(), atol=1e-6)
