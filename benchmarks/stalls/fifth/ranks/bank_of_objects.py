"""torchrun: a contrastive ViT with a bank of all ranks' features, exchanged as Python objects; crops are cut on the host."""
import numpy as np
import timm
import torch
import torch.distributed as dist
import torch.nn.functional as F
from setting import DEVICE, run, size, turns
from torch.nn.parallel import DistributedDataParallel

BATCH, EDGE, BANK = size(192, 2), size(224, 32), size(65536, 16)


def crops(pictures, rng):
    out = torch.empty(BATCH, EDGE, EDGE, 3, dtype=torch.uint8, pin_memory=DEVICE == "cuda")
    for crop in out.numpy():
        row, column = rng.integers(0, 32, 2)
        crop[:] = pictures[rng.integers(len(pictures)), row : row + EDGE, column : column + EDGE]
    return (out.to(DEVICE, non_blocking=True).permute(0, 3, 1, 2).float() / 255 - 0.5) * 4


def everybody(features, as_tensors):
    if as_tensors:
        out = features.new_empty(dist.get_world_size() * len(features), features.shape[1])
        dist.all_gather_into_tensor(out, features)
        return out
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, features.cpu().numpy())
    return torch.from_numpy(np.concatenate(parts)).to(DEVICE)


def main(variant):
    """`variant` may also be "gather" or "read", to mend one of the two alone."""
    rng = np.random.default_rng(dist.get_rank())
    pictures = rng.integers(0, 256, (size(512, 4), EDGE + 32, EDGE + 32, 3), dtype=np.uint8)
    net = timm.create_model("vit_tiny_patch16_224" if EDGE == 32 else "vit_small_patch16_224", img_size=EDGE, num_classes=128)
    model = DistributedDataParallel(net.to(DEVICE))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=DEVICE == "cuda")
    bank, place, losses = F.normalize(torch.randn(BANK, 128, device=DEVICE), dim=1), 0, []
    for step in range(turns(170, 3)):
        one = crops(pictures, rng)
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            a = F.normalize(model(one).float(), dim=1)
        b = a.detach().roll(1, 0)
        logits = torch.cat([(a * b).sum(1, keepdim=True), a @ bank.T], 1) / 0.1
        loss = F.cross_entropy(logits, torch.zeros(BATCH, dtype=torch.long, device=DEVICE))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        new = everybody(a.detach(), variant in ("fixed", "gather"))
        bank[place : place + len(new)] = new[: BANK - place]
        place = (place + len(new)) % BANK
        losses.append(loss.detach() if variant in ("fixed", "read") else loss.item())
    if dist.get_rank() == 0:
        print(f"mean loss {sum(float(loss) for loss in losses) / len(losses):.4f}")


if __name__ == "__main__":
    run(main)
