"""LoRA adapters for a GPT-2 through the Trainer; the collator cuts the chats into word pieces as it makes a batch."""
import random
import re
import tempfile

import torch
from peft import LoraConfig, get_peft_model
from script import DEVICE, run, turns
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from models import size

BATCH, LENGTH, VOCAB = size(24, 2), size(512, 16), size(16384, 2000)
WORD = re.compile(r"\w+|[^\w\s]")


class Chats(Dataset):
    def __init__(self, count):
        rng = random.Random(0)
        letters = "etaoinshrdlu"
        self.words = ["".join(rng.choices(letters, k=rng.randint(2, 9))) for _ in range(20000)]
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        rng = random.Random(index)
        return {"text": " ".join(rng.choices(self.words, k=LENGTH // 2))}


class Collator:
    """Greedy longest match, as WordPiece does it."""

    def __init__(self):
        rng = random.Random(1)
        pieces = set("abcdefghijklmnopqrstuvwxyz.,")
        while len(pieces) < VOCAB - 2:
            pieces.add("".join(rng.choices("etaoinshrdlu", k=rng.randint(2, 5))))
        self.ids = {piece: number + 2 for number, piece in enumerate(sorted(pieces))}

    def cut(self, word):
        out, start = [], 0
        while start < len(word):
            for end in range(min(len(word), start + 5), start, -1):  # STALL: host_work
                if word[start:end] in self.ids:
                    out.append(self.ids[word[start:end]])
                    break
            start = end
        return out

    def __call__(self, rows):
        tokens = torch.zeros(len(rows), LENGTH, dtype=torch.long)
        for row, example in zip(tokens, rows):
            ids = [piece for word in WORD.findall(example["text"].lower()) for piece in self.cut(word)][:LENGTH]
            row[: len(ids)] = torch.tensor(ids)
        return {"input_ids": tokens, "attention_mask": (tokens > 0).long(), "labels": tokens.masked_fill(tokens == 0, -100)}


class Tick(TrainerCallback):
    def __init__(self, tick):
        self.tick = tick

    def on_step_end(self, *_, **__):
        self.tick()


def main(tick, fixed=False):
    """`fixed` may also be "workers" or "filter", to mend one of the two alone."""
    workers, unread = fixed in (True, "workers"), fixed in (True, "filter")
    steps = turns(140, 2)
    config = GPT2Config(
        vocab_size=VOCAB, n_positions=LENGTH, n_embd=size(1024, 32), n_layer=size(12, 2), n_head=size(16, 2),
        bos_token_id=0, eos_token_id=1, use_cache=False,
    )
    model = get_peft_model(GPT2LMHeadModel(config), LoraConfig(r=16, lora_alpha=32, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True, task_type="CAUSAL_LM"))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=steps, per_device_train_batch_size=BATCH, learning_rate=2e-4, lr_scheduler_type="cosine", warmup_steps=10,
            bf16=DEVICE == "cuda", use_cpu=DEVICE == "cpu", logging_steps=50, save_strategy="no", report_to=[], disable_tqdm=True,
            remove_unused_columns=False, optim="adamw_torch_fused" if DEVICE == "cuda" else "adamw_torch",
            dataloader_num_workers=size(8, 1) if workers else 0,
            logging_nan_inf_filter=not unread,
        )
        trainer = Trainer(model, arguments, train_dataset=Chats(BATCH * steps), data_collator=Collator(), callbacks=[Tick(tick)])
        trainer.remove_callback(PrinterCallback)
        trainer.train()  # STALL: host_sync


if __name__ == "__main__":
    run(main)
