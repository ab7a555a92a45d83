"""Clauses of contracts are sorted into kinds with Hugging Face's Trainer; the text is cut into word pieces while it is being batched."""
import argparse
import re
import tempfile
import time
import unicodedata

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

CUDA = torch.cuda.is_available()
KINDS = 24
SYLLABLES = [first + vowel for first in "bcdfghklmnprstvz" for vowel in ("a", "e", "i", "o", "u", "ai", "ou")]


class Clauses(Dataset):
    def __init__(self, count, words):
        rng = np.random.default_rng(0)
        book = ["".join(SYLLABLES[number] for number in rng.integers(0, len(SYLLABLES), rng.integers(1, 6))) for _ in range(KINDS * 400)]
        book = np.array(book, dtype=object).reshape(-1, KINDS)
        self.kinds = rng.integers(0, KINDS, count)
        self.texts = [self.clause(rng, book, int(kind), words) for kind in self.kinds]

    @staticmethod
    def clause(rng, book, kind, words):
        chosen = book[rng.integers(0, len(book), words), kind].tolist()
        return " ".join(word.title() if place % 11 == 0 else word + "," * (place % 7 == 0) for place, word in enumerate(chosen)) + "."

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, row):
        return {"text": self.texts[row], "labels": int(self.kinds[row])}


class Pieces:
    """Longest first, as WordPiece does it."""

    PARTS = re.compile(r"\w+|[^\w\s]")

    def __init__(self):
        pieces = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", ".", ",", *"abcdefghijklmnopqrstuvwxyz", *SYLLABLES]
        pieces += [one + other for one in SYLLABLES for other in SYLLABLES[::3]]
        pieces += ["##" + piece for piece in pieces[6:]]
        self.numbers = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}

    def word(self, word):
        found, first = [], 0
        while first < len(word):
            last = len(word)
            while last > first:
                number = self.numbers.get(word[first:last] if first == 0 else "##" + word[first:last])
                if number is not None:
                    break
                last -= 1
            if last == first:
                return [self.numbers["[UNK]"]]
            found.append(number)
            first = last
        return found

    @staticmethod
    def clean(text):
        """Small letters without accents and without what cannot be seen."""
        letters = [letter for letter in unicodedata.normalize("NFD", text.lower()) if unicodedata.category(letter) not in ("Mn", "Cc", "Cf")]
        return "".join(" " if letter.isspace() else letter for letter in letters)

    def text(self, text, long):
        numbers = [self.numbers["[CLS]"]]
        for part in self.PARTS.findall(self.clean(text)):
            numbers += self.word(part)
        return [*numbers[: long - 1], self.numbers["[SEP]"]]


class Collator:
    def __init__(self, pieces, long):
        self.pieces, self.long = pieces, long

    def __call__(self, rows):
        numbers = [self.pieces.text(row["text"], self.long) for row in rows]
        tokens = torch.zeros(len(rows), self.long, dtype=torch.int64)
        for row, some in enumerate(numbers):
            tokens[row, : len(some)] = torch.tensor(some)
        return {"input_ids": tokens, "attention_mask": (tokens != 0).long(), "labels": torch.tensor([row["labels"] for row in rows])}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="for a CPU")
    parser.add_argument("--turns", type=int, default=60)
    options = parser.parse_args()
    count, words, long, batch, wide, deep = (40, 30, 48, 4, 32, 2) if options.tiny else (1920, 1000, 512, 32, 768, 12)
    torch.manual_seed(0)
    start = time.perf_counter()
    pieces = Pieces()
    shape = {"hidden_size": wide, "num_hidden_layers": deep, "num_attention_heads": max(1, wide // 64), "intermediate_size": 4 * wide}
    model = BertForSequenceClassification(BertConfig(vocab_size=len(pieces.numbers), max_position_embeddings=long, num_labels=KINDS, **shape))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=options.turns,
            per_device_train_batch_size=batch,
            learning_rate=5e-5,
            bf16=CUDA,
            use_cpu=not CUDA,
            logging_steps=20,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            remove_unused_columns=False,
            dataloader_num_workers=12 if options.fixed else 0,
        )
        trainer = Trainer(model, arguments, data_collator=Collator(pieces, long), train_dataset=Clauses(count, words))
        print(f"mean loss {trainer.train().training_loss:.4f}")
    print(f"{time.perf_counter() - start:.3f}")


if __name__ == "__main__":
    main()
