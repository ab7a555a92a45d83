"""A GPT learns to write recipes; they are streamed, cut into words and numbered on the way, and accelerate prepares what comes out."""
import re
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from transformers import GPT2Config, GPT2LMHeadModel

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "eighth" / "ranks"))
from job import CUDA, run

PIECE = re.compile(r"[A-Za-z]+|[0-9]+|[^\sA-Za-z0-9]")
THINGS = ["flour", "butter", "sugar", "salt", "eggs", "milk", "onions", "garlic", "carrots", "leeks", "rice", "beans", "cheese", "cream", "pepper", "oil", "vinegar", "honey"]
DEEDS = ["stir", "chop", "fry", "bake", "boil", "fold", "melt", "whisk", "grate", "knead"]


class Recipes(IterableDataset):
    """Batch after batch of recipes; some batches only, if several share the stream."""

    def __init__(self, batches, batch, length, words, begin=0, stride=1):
        self.batches, self.batch, self.length, self.words, self.begin, self.stride = batches, batch, length, words, begin, stride

    def text(self, number):
        lines = []
        for line in range(self.length // 7):
            seed = number * 7919 + line * 104729
            lines.append(f"{line + 1}. {DEEDS[seed % 10]} {seed % 450 + 50} g {THINGS[seed // 7 % 18]};")
        return "\n".join(lines)

    def numbered(self, text):
        """Word by word, by a hash that is the same in every process."""
        numbers = []
        for piece in PIECE.findall(text.lower()):
            number = 0
            for letter in piece:
                number = (number * 131 + ord(letter)) % 1_000_003
            numbers.append(number % self.words)
        return (numbers + [0] * self.length)[: self.length]

    def __iter__(self):
        worker = get_worker_info()
        begin = self.begin + (worker.id * self.stride if worker else 0)
        for batch in range(begin, self.batches, self.stride * (worker.num_workers if worker else 1)):
            for number in range(batch * self.batch, (batch + 1) * self.batch):
                yield {"input_ids": torch.tensor(self.numbered(self.text(number)))}


def loader_for(accelerator, args):
    """accelerate's way with a stream: the main process reads for all, and hands the pieces out."""
    world = accelerator.num_processes
    if not args.fixed:
        return accelerator.prepare(DataLoader(Recipes(args.steps * world, args.batch, args.length, args.words), args.batch))
    mine = Recipes(args.steps * world, args.batch, args.length, args.words, accelerator.process_index, world)
    return DataLoader(mine, args.batch, num_workers=args.workers, pin_memory=CUDA, prefetch_factor=4)


def main(args):
    accelerator = Accelerator(mixed_precision="bf16" if CUDA else "no", cpu=not CUDA, dataloader_config=DataLoaderConfiguration(non_blocking=True))
    sizes = {"vocab_size": args.words, "n_positions": args.length, "n_embd": args.width, "n_layer": args.layers, "n_head": max(1, args.width // 64)}
    model = GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False, bos_token_id=0, eos_token_id=0))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=3e-4, fused=CUDA))
    total = torch.zeros((), device=accelerator.device)
    for batch in loader_for(accelerator, args):
        ids = batch["input_ids"].to(accelerator.device, non_blocking=True)
        loss = model(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        total += loss.detach()
    dist.all_reduce(total)
    if accelerator.is_main_process:
        print(f"mean loss {total.item() / args.steps / accelerator.num_processes:.4f}")


if __name__ == "__main__":
    run(main, steps=120, batch=64, length=256, words=8192, width=768, layers=12, workers=6)
