"""`torch.nn.DataParallel` and what it is made of: several devices of one process."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.cuda import comm

X = torch.arange(24.0).view(6, 4)


@pytest.mark.parametrize("devices", [[0], [0, 1], [2, 0, 5]])
def test_it_computes_what_the_module_computes(devices: list[int]) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8, affine=False).eval(), nn.ReLU(), nn.Linear(8, 2))
    split = nn.DataParallel(copy.deepcopy(plain).to(f"cuda:{devices[0]}"), device_ids=devices)
    for module, x in ((plain, X), (split, X.to(f"cuda:{devices[0]}")), (split, X)):
        out = module(x)
        module.zero_grad()
        out.sum().backward()
        if module is split:
            assert out.device.index == devices[0]
            torch.testing.assert_close(out.cpu(), plain(X))
    for ours, theirs in zip(split.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.cpu(), theirs.grad)


def test_parts_lie_where_they_were_sent() -> None:
    parts = comm.scatter(X, [1, 0, 3])
    assert [part.device.index for part in parts] == [1, 0, 3]
    assert torch.equal(comm.gather(parts, destination=2).cpu(), X)
    assert torch.equal(comm.gather(parts, destination="cpu"), X)
    uneven = comm.scatter(X, [0, 1], chunk_sizes=[1, 3], dim=1, streams=[None, torch.cuda.Stream(1)])
    assert [tuple(part.shape) for part in uneven] == [(6, 1), (6, 3)]
    out = torch.empty_like(X, device="cuda")
    assert torch.equal(comm.gather(uneven, dim=1, out=out).cpu(), X)
    for target in comm.scatter(X, out=[torch.empty(3, 4, device="cuda:1"), torch.empty(3, 4, device="cuda:2")]):
        assert target.sum() > 0


def test_all_devices_hear_the_same() -> None:
    tensors = [X.cuda(), torch.arange(3).cuda(), X.cuda() + 1]
    for device, heard in enumerate(comm.broadcast_coalesced(tensors, [0, 1, 2])):
        assert [one.device.index for one in heard] == [device] * 3
        assert all(torch.equal(one.cpu(), told.cpu()) for one, told in zip(heard, tensors, strict=True))
    assert [one.device.index for one in comm.broadcast(tensors[0], [0, 4])] == [0, 4]
    (out,) = comm.broadcast(tensors[0], out=[torch.empty_like(X, device="cuda:3")])
    assert torch.equal(out.cpu(), X)
    total = comm.reduce_add([X.to("cuda:0"), X.to("cuda:1")], destination=0)
    assert torch.equal(total.cpu(), X * 2)
