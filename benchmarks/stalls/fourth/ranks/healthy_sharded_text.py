"""torchrun: a language model sharded by FSDP2, large enough to hide its gathering; losses are summed over the ranks every 50 steps."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from script import DEVICE, run, turns
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from models import encoder, size

BATCH, LENGTH, VOCAB = size(16, 2), size(1024, 8), size(16384, 64)


class Language(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = encoder(1536, layers=10, heads=12)
        width = self.body.layers[0].linear1.in_features
        self.embed, self.head = nn.Embedding(VOCAB, width), nn.Linear(width, VOCAB)
        self.register_buffer("later", torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1))

    def forward(self, tokens):
        return self.head(self.body(self.embed(tokens), mask=self.later, is_causal=True))


def main(tick, fixed=False):
    torch.manual_seed(0)
    mesh = init_device_mesh(DEVICE, (dist.get_world_size(),))
    with torch.device(DEVICE):
        model = Language()
        tokens = torch.randint(0, VOCAB, (4, BATCH, LENGTH + 1))
    shape = dict(mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    for layer in model.body.layers:
        fully_shard(layer, **shape)
    fully_shard(model, **shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    losses = torch.zeros((), device=DEVICE)
    for step in range(turns(90, 2)):
        batch = tokens[step % 4]
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses += loss.detach()
        if step % 50 == 49 and not fixed:
            dist.all_reduce(losses)
            assert losses.item() > 0
            losses.zero_()
        tick()


if __name__ == "__main__":
    run(main)
