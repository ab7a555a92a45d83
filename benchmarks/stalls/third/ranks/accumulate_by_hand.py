"""torchrun: eight micro-batches, after each of which the ranks average their gradients by hand."""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from script import DEVICE, run, turns

from models import TextClassifier, size

MICRO, BATCH, LENGTH, VOCAB = size(8, 2), size(16, 2), size(128, 8), size(60000, 64)


def average(gradients):
    flat = torch._utils._flatten_dense_tensors(gradients)
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for gradient, mean in zip(gradients, torch._utils._unflatten_dense_tensors(flat, gradients)):
        gradient.copy_(mean)


def main(tick, fixed=False):
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = TextClassifier(vocab=VOCAB, width=1024, layers=8, heads=16)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=DEVICE == "cuda")
    for step in range(turns(60, 2)):
        sums = None
        for micro in range(MICRO):
            x = torch.randint(0, VOCAB, (BATCH, LENGTH), device=DEVICE)
            with torch.autocast(DEVICE, dtype=torch.bfloat16):
                loss = F.cross_entropy(model(x), x[:, 0] % 20) / MICRO
            gradients = list(torch.autograd.grad(loss, parameters))
            if not fixed:
                average(gradients)  # STALL: exposed_collective
            sums = gradients if sums is None else torch._foreach_add(sums, gradients)
        if fixed:
            average(sums)
        for parameter, gradient in zip(parameters, sums):
            parameter.grad = gradient
        optimizer.step()
        tick()


if __name__ == "__main__":
    run(main)
