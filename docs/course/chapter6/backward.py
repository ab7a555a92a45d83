"""The backward pass needs a sum, too: each rank knows only its columns' part of the input's gradient."""

import os

import torch
import torch.distributed as dist
from torch.nn.functional import gelu

RANKS = 2
SUMMED = True  # whether the parts of the input's gradient are

rank = int(os.environ["RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl")
ranks = dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(4, 32).cuda().requires_grad_()
first, second = torch.randn(32, 128).cuda() / 6, torch.randn(128, 32).cuda() / 11
gelu(x @ first).matmul(second).square().sum().backward()
expected, x.grad = x.grad, None


class Enter(torch.autograd.Function):
    """Forward nothing; backward a sum over the ranks."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous()
        if SUMMED:
            dist.all_reduce(gradient)
        return gradient


class Leave(torch.autograd.Function):
    """Forward a sum over the ranks; backward nothing."""

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient


hidden = gelu(Enter.apply(x) @ first.chunk(ranks, dim=1)[rank])
y = Leave.apply(hidden @ second.chunk(ranks, dim=0)[rank])
y.square().sum().backward()
off = (x.grad - expected).abs().max().item()
print(f"rank {rank}: the gradient is that of one GPU, up to {'rounding' if off < 1e-4 else 'more than rounding'}")
assert (off < 1e-4) == SUMMED
dist.destroy_process_group()
