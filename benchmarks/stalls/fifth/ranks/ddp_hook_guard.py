"""torchrun: a GPT-2 under DDP with a communication hook that guards against gradients that are not finite."""
import torch
import torch.distributed as dist
from guards import averaged, guarded
from setting import DEVICE, run, size, turns
from torch.nn.parallel import DistributedDataParallel
from transformers import GPT2Config, GPT2LMHeadModel

BATCH, LENGTH, VOCAB = size(6, 2), size(512, 16), size(32000, 64)


def main(variant):
    config = GPT2Config(vocab_size=VOCAB, n_positions=LENGTH, n_embd=size(1280, 32), n_layer=size(24, 2), n_head=size(20, 2), use_cache=False)
    model = DistributedDataParallel(GPT2LMHeadModel(config).to(DEVICE), gradient_as_bucket_view=True)
    model.register_comm_hook(None, averaged if variant == "fixed" else guarded)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=DEVICE == "cuda")
    finite = torch.ones((), dtype=torch.bool, device=DEVICE)
    for step in range(turns(130, 3)):
        tokens = torch.randint(0, VOCAB, (BATCH, LENGTH), device=DEVICE)
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            loss = model(tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        if variant == "fixed":
            finite &= torch.stack(torch._foreach_norm([parameter.grad for parameter in model.parameters()])).isfinite().all()
        optimizer.step()
    if not finite.item():
        raise FloatingPointError("a gradient is not finite")
    if dist.get_rank() == 0:
        print(f"loss {loss.item():.3f}")


if __name__ == "__main__":
    run(main)
