"""torchrun: a GPT-2 under DDP; the norm of each parameter's gradient is averaged over the ranks and noted, every step."""
import torch
import torch.distributed as dist
from setting import DEVICE, run, size, turns
from torch.nn.parallel import DistributedDataParallel
from transformers import GPT2Config, GPT2LMHeadModel

BATCH, LENGTH, VOCAB = size(8, 2), size(512, 16), size(32000, 64)


def norms_one_by_one(model):
    noted = {}
    for name, parameter in model.named_parameters():
        norm = parameter.grad.norm()
        dist.all_reduce(norm)
        noted[name] = norm.item() / dist.get_world_size()
    return noted


def norms_at_once(model):
    norms = torch.stack(torch._foreach_norm([parameter.grad for parameter in model.parameters()]))
    dist.all_reduce(norms)
    return norms / dist.get_world_size()


def main(variant):
    config = GPT2Config(vocab_size=VOCAB, n_positions=LENGTH, n_embd=size(1024, 32), n_layer=size(16, 2), n_head=size(16, 2),
                        use_cache=False, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    model = DistributedDataParallel(GPT2LMHeadModel(config).to(DEVICE), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=DEVICE == "cuda")
    history = []
    for step in range(turns(150, 3)):
        tokens = torch.randint(0, VOCAB, (BATCH, LENGTH), device=DEVICE)
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            loss = model(tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        history.append(norms_at_once(model.module) if variant == "fixed" else norms_one_by_one(model.module))
        optimizer.step()
    if variant == "fixed":
        history = torch.stack(history).tolist()
    if dist.get_rank() == 0:
        print(f"{len(history)} steps noted, loss {loss.item():.3f}")


if __name__ == "__main__":
    run(main)
