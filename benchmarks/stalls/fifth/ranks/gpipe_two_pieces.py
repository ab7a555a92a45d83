"""torchrun: a transformer in as many stages as ranks, by torch.distributed.pipelining."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from setting import DEVICE, run, size, turns
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

BATCH, LENGTH, WIDE, LAYERS, VOCAB = size(64, 16), size(512, 8), size(2048, 32), size(8, 1), size(256, 32)


def make_stage(rank, world):
    layers = [nn.TransformerEncoderLayer(WIDE, size(16, 2), 4 * WIDE, 0.0, "gelu", batch_first=True, norm_first=True) for _ in range(LAYERS)]
    if rank == 0:
        layers.insert(0, nn.Embedding(VOCAB, WIDE))
    if rank == world - 1:
        layers.append(nn.Linear(WIDE, VOCAB))
    return nn.Sequential(*layers).to(DEVICE, torch.bfloat16 if DEVICE == "cuda" else torch.float32)


def loss_of(logits, tokens):
    return F.cross_entropy(logits.float().flatten(0, 1), tokens.flatten())


def main(variant):
    rank, world = dist.get_rank(), dist.get_world_size()
    module = make_stage(rank, world)
    stage = PipelineStage(module, rank, world, torch.device(DEVICE, rank) if DEVICE == "cuda" else torch.device("cpu"))
    schedule = ScheduleGPipe(stage, n_microbatches=16 if variant == "fixed" else 2, loss_fn=loss_of)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3, momentum=0.9)
    generator = torch.Generator(DEVICE).manual_seed(1)
    for step in range(turns(60, 2)):
        tokens = torch.randint(0, VOCAB, (BATCH, LENGTH), device=DEVICE, generator=generator)
        losses = []
        if rank == 0:
            schedule.step(tokens)
        elif rank == world - 1:
            schedule.step(target=tokens, losses=losses)
        else:
            schedule.step()
        optimizer.step()
        optimizer.zero_grad()
    if losses:
        print(f"loss {torch.stack(losses).mean().item():.3f}", flush=True)


if __name__ == "__main__":
    run(main)
