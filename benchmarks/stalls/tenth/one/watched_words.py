"""A GPT learns what sailors wrote in their logs, by Hugging Face's Trainer; a callback watches which words a few words come to lie next to."""
import argparse
import tempfile
import time

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WATCHED, NEXT = list(range(100, 116)), 10


class Logbooks(Dataset):
    """Words follow each other as in a chain: each has a few that like to come next."""

    def __init__(self, count, length, words):
        chance = torch.Generator().manual_seed(0)
        likes = torch.randint(0, words, (words, 4), generator=chance)
        pages = torch.empty(count, length, dtype=torch.int64)
        pages[:, 0] = torch.randint(0, words, (count,), generator=chance)
        for place in range(1, length):
            pages[:, place] = likes[pages[:, place - 1], torch.randint(0, 4, (count,), generator=chance)]
        self.pages = pages

    def __len__(self):
        return len(self.pages)

    def __getitem__(self, index):
        return {"input_ids": self.pages[index], "labels": self.pages[index]}


class Neighbours(TrainerCallback):
    """The words next to each watched one, by the cosine of their vectors, and how many of them are new."""

    def __init__(self, every):
        self.every, self.before, self.changes = every, None, []

    def on_step_end(self, _args, state, _control, model=None, **_others):
        if state.global_step % self.every == 0:
            self.look(model.get_input_embeddings().weight.detach())

    def look(self, vectors):
        table = vectors.float().cpu().numpy()  # STALL: blocking_copy
        table = table / np.linalg.norm(table, axis=1, keepdims=True)  # STALL: host_work
        near = np.argsort(-(table[WATCHED] @ table.T), axis=1)[:, 1 : NEXT + 1]  # STALL: host_work
        if self.before is not None:
            self.changes.append(NEXT - np.mean([len(np.intersect1d(new, old)) for new, old in zip(near, self.before)]))
        self.before = near

    def mean(self):
        return float(np.mean(self.changes))


class NeighboursOnDevice(Neighbours):
    def look(self, vectors):
        table = torch.nn.functional.normalize(vectors.float(), dim=1)
        near = (table[WATCHED[0] : WATCHED[-1] + 1] @ table.T).topk(NEXT + 1, dim=1).indices[:, 1:]
        if self.before is not None:
            self.changes.append(NEXT - (near[:, :, None] == self.before[:, None]).sum((1, 2)).float().mean())
        self.before = near

    def mean(self):
        return torch.stack(self.changes).mean().item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="for a CPU")
    parser.add_argument("--steps", type=int, default=260)
    options = parser.parse_args()
    words, wide, deep, length, batch, steps = (300, 32, 2, 16, 2, 12) if options.tiny else (32000, 768, 8, 512, 32, options.steps)
    torch.manual_seed(0)
    books = Logbooks(batch * 16, length, words)
    start = time.perf_counter()
    sizes = {"vocab_size": words, "n_positions": length, "n_embd": wide, "n_layer": deep, "n_head": max(1, wide // 64)}
    model = GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False, bos_token_id=0, eos_token_id=0))
    watching = (NeighboursOnDevice if options.fixed else Neighbours)(every=5)
    with tempfile.TemporaryDirectory() as folder:
        how = {"max_steps": steps, "per_device_train_batch_size": batch, "learning_rate": 3e-4, "bf16": DEVICE == "cuda", "use_cpu": DEVICE == "cpu"}
        quiet = {"report_to": "none", "save_strategy": "no", "logging_steps": 50, "disable_tqdm": True, "logging_nan_inf_filter": False}
        trainer = Trainer(model, TrainingArguments(folder, **how, **quiet, optim="adamw_torch_fused"), train_dataset=books, callbacks=[watching])
        loss = trainer.train().training_loss
    print(f"mean loss {loss:.4f}, {watching.mean():.3f} of {NEXT} neighbours new each time")
    print(f"{time.perf_counter() - start:.3f}")


if __name__ == "__main__":
    main()
