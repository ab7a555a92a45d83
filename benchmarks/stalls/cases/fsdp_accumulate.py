"""torchrun: FSDP2 with four micro-batches, whose gradients are reduced and whose weights are gathered anew for each."""
import torch
import torch.nn.functional as F
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from models import STEPS, TextClassifier, run, size

MICRO = 4


def main(tick, fixed=False):
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = TextClassifier(width=2048, layers=3, heads=16)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.body.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    y = torch.randint(0, 20, (size(4, 2),), device="cuda")
    for step in range(STEPS):
        for micro in range(MICRO):
            if fixed:
                model.set_requires_gradient_sync(micro == MICRO - 1)
                model.set_reshard_after_backward(micro == MICRO - 1)
            x = torch.randint(0, 8192, (size(4, 2), size(256, 8)), device="cuda")
            loss = F.cross_entropy(model(x).float(), y) / MICRO
            loss.backward()  # STALL: exposed_collective
        optimizer.step()
        optimizer.zero_grad()
        tick()


if __name__ == "__main__":
    run(main)
