"""A T5 learns to write addresses in order, through the Trainer; the share of right words on held-out ones is worked out every 80 steps."""
import argparse
import tempfile
import time

import torch
from torch.utils.data import Dataset
from transformers import T5Config, T5ForConditionalGeneration, Trainer, TrainingArguments, set_seed

parser = argparse.ArgumentParser()
parser.add_argument("--fixed", action="store_true")
parser.add_argument("--tiny", action="store_true", help="for a CPU")
parser.add_argument("--turns", type=int, default=240)
options = parser.parse_args()
CUDA = torch.cuda.is_available()
WORDS, SOURCE, TARGET = (200, 16, 8) if options.tiny else (32128, 128, 64)


class Addresses(Dataset):
    """Words in disorder, and the first of them in order."""

    def __init__(self, count, seed):
        chance = torch.Generator().manual_seed(seed)
        self.sources = torch.randint(3, WORDS, (count, SOURCE), generator=chance)
        self.lengths = torch.randint(TARGET // 2, TARGET, (count,), generator=chance)

    def __len__(self):
        return len(self.sources)

    def __getitem__(self, index):
        source, length = self.sources[index], int(self.lengths[index])
        labels = torch.full((TARGET,), -100)
        labels[:length] = source[:length].sort().values
        labels[length] = 1
        return {"input_ids": source, "attention_mask": torch.ones_like(source), "labels": labels}


def right_words(predictions, labels):
    counted = labels != -100
    return {"right": float((predictions == labels)[counted].mean())}


def from_logits(evaluated):
    """T5 returns the encoder's last state beside the logits."""
    return right_words(evaluated.predictions[0].argmax(-1), evaluated.label_ids)


def from_words(evaluated):
    return right_words(evaluated.predictions, evaluated.label_ids)


def most_likely(logits, labels):
    return logits[0].argmax(-1)


def main():
    set_seed(0)
    start = time.perf_counter()
    shape = dict(d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4) if options.tiny else dict(d_model=768, d_kv=64, d_ff=2048, num_layers=6, num_heads=12)
    model = T5ForConditionalGeneration(T5Config(vocab_size=WORDS, decoder_start_token_id=0, use_cache=False, **shape))
    batch = 4 if options.tiny else 32
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, max_steps=options.turns, per_device_train_batch_size=batch, per_device_eval_batch_size=batch, learning_rate=3e-4, warmup_steps=20,
            eval_strategy="steps", eval_steps=max(options.turns // 3, 1), eval_accumulation_steps=1, logging_steps=20, save_strategy="no", report_to=[], bf16=CUDA,
            dataloader_num_workers=2, disable_tqdm=True, seed=0,
        )
        trainer = Trainer(
            model=model, args=arguments, train_dataset=Addresses(batch * options.turns, 1), eval_dataset=Addresses(batch * 4, 2),
            compute_metrics=from_words if options.fixed else from_logits,
            preprocess_logits_for_metrics=most_likely if options.fixed else None,
        )
        trainer.train()
    print(f"{time.perf_counter() - start:.3f}")


if __name__ == "__main__":
    main()
