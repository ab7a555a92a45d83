"""Sparse gradients (COO), and the optimizers that take them, on the virtual GPU as on the CPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn, optim

OPTIMIZERS: dict[str, Callable[..., optim.Optimizer]] = {
    "sgd": lambda p: optim.SGD(p, lr=0.1),
    "sgd_foreach": lambda p: optim.SGD(p, lr=0.1, foreach=True),
    "sgd_momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9),
    "sparse_adam": lambda p: optim.SparseAdam(list(p), lr=0.1),
    "adagrad": lambda p: optim.Adagrad(p, lr=0.1),
}
TABLES: dict[str, Callable[[], nn.Module]] = {
    "bag": lambda: nn.EmbeddingBag(20, 4, sparse=True, mode="sum"),
    "embedding": lambda: nn.Embedding(20, 4, sparse=True),
}


def trained(device: str, table: str, optimizer: str, set_to_none: bool) -> Tensor:
    torch.manual_seed(0)
    module = TABLES[table]().to(device)
    steps = OPTIMIZERS[optimizer](module.parameters())
    for number in range(3):
        steps.zero_grad(set_to_none=set_to_none)
        index = torch.tensor([[1, 2, 3], [3, 3, number + 5]], device=device)
        for _ in range(2):  # the second pass adds to the first one's gradient
            module(index).square().sum().backward()
        assert module.weight.grad.layout is torch.sparse_coo
        assert module.weight.grad.device.type == device
        steps.step()
    return module.weight.detach().cpu()


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_table_is_trained_as_on_the_cpu(table: str, optimizer: str, set_to_none: bool) -> None:
    found, expected = (trained(device, table, optimizer, set_to_none) for device in ("cuda", "cpu"))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_sparse_tensors_move_and_become_dense() -> None:
    host = torch.tensor([[0.0, 2.0], [3.0, 0.0]])
    sparse = host.cuda().to_sparse()
    assert sparse.device == torch.device("cuda", 0)
    assert sparse._nnz() == 2
    assert torch.equal(sparse.to_dense().cpu(), host)
    assert torch.equal(sparse.cpu().to_dense(), host)
    assert torch.equal(host.to_sparse().cuda().to_dense().cpu(), host)
    assert torch.equal((sparse @ host.cuda()).cpu(), host @ host)
    assert "device='cuda:0'" in repr(sparse)


def test_memory_of_a_sparse_gradient_is_given_back() -> None:
    before = torch.cuda.memory_allocated()
    module = nn.Embedding(50, 64, sparse=True).cuda()
    table = torch.cuda.memory_allocated() - before
    module(torch.arange(10, device="cuda")).sum().backward()
    assert torch.cuda.memory_allocated() - before >= table + 10 * 64 * 4
    module.weight.grad = None
    assert torch.cuda.memory_allocated() - before < table + 10 * 64 * 4


def test_coalescing_makes_the_host_wait(machine) -> None:
    indices = torch.tensor([[0, 0, 2]], device="cuda")
    sparse = torch.sparse_coo_tensor(indices, torch.ones(3, device="cuda"), (4,), check_invariants=False)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchronizing CUDA operation"):
            sparse.coalesce()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert sparse.coalesce()._nnz() == 2


def test_other_layouts_are_refused_in_a_sentence() -> None:
    with pytest.raises(NotImplementedError, match=r"virtual GPU cannot run aten::\w+ on compressed sparse tensors"):
        torch.eye(3, device="cuda").to_sparse_csr()
    with pytest.raises(NotImplementedError, match=r"virtual GPU cannot run aten::\w+ on quantized tensors"):
        torch.quantize_per_tensor(torch.ones(3, device="cuda"), 0.1, 0, torch.qint8)
