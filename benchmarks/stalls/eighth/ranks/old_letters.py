"""A language model of old letters, its weights shared out by FSDP2, two pieces to a step; at times the model is saved."""
import shutil
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from job import CUDA, DEVICE, run
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

LETTERS = 4096


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.heads = max(1, width // 128)
        self.norm1, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm2, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Letters(nn.Module):
    def __init__(self, width, layers, length):
        super().__init__()
        self.words, self.places = nn.Embedding(LETTERS, width), nn.Parameter(torch.zeros(length, width))
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, LETTERS, bias=False)

    def forward(self, tokens):
        x = self.words(tokens) + self.places[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def sharded(model):
    mesh = init_device_mesh(DEVICE.type, (dist.get_world_size(),))
    how = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32) if CUDA else MixedPrecisionPolicy()}
    for layer in model.layers:
        fully_shard(layer, **how)
    return fully_shard(model, **how)


class Saving:
    """The whole model in one file, which the first rank writes."""

    def __init__(self, model, folder):
        self.model, self.folder = model, folder

    def save(self, step):
        whole = get_model_state_dict(self.model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if dist.get_rank() == 0:
            torch.save(whole, Path(self.folder, f"{step}.pt"))
        dist.barrier()

    def done(self):
        pass


class SavingBeside(Saving):
    """Each rank's part, copied away at once and written while the steps go on."""

    def __init__(self, model, folder):
        super().__init__(model, folder)
        self.group, self.asked = dist.new_group(backend="gloo"), None

    def save(self, step):
        self.done()
        self.asked = dcp.async_save({"model": get_model_state_dict(self.model)}, checkpoint_id=str(Path(self.folder, str(step))), process_group=self.group)

    def done(self):
        if self.asked:
            self.asked.result()


def main(args):
    model = sharded(Letters(args.width, args.layers, args.length).to(DEVICE))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=CUDA)
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder, src=0)
    saving = (SavingBeside if args.fixed else Saving)(model, folder[0])
    chance = torch.Generator(DEVICE).manual_seed(dist.get_rank())
    total = torch.zeros((), device=DEVICE)
    for step in range(1, args.steps + 1):
        for piece in range(2):
            model.set_requires_gradient_sync(piece == 1)
            tokens = torch.randint(0, LETTERS, (args.batch, args.length + 1), device=DEVICE, generator=chance)
            loss = F.cross_entropy(model(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten()) / 2
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        if step % args.every == 0:
            saving.save(step)
    saving.done()
    dist.all_reduce(total)
    if dist.get_rank() == 0:
        print(f"mean loss {total.item() / args.steps / dist.get_world_size():.4f}")
        shutil.rmtree(folder[0])


if __name__ == "__main__":
    run(main, steps=52, every=15, batch=8, length=1024, width=1536, layers=10)
