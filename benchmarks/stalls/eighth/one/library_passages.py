"""A library's passages become vectors by a BERT, and the nearest passages of many questions are sought; memory is tidied after each batch."""
import argparse
import gc
import time

import torch
import torch.nn.functional as F
from transformers import BertConfig, BertModel

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Library:
    """Passages sorted by length, so that a batch is little padded."""

    def __init__(self, passages, longest, words):
        chance = torch.Generator().manual_seed(0)
        self.lengths = torch.randint(longest // 4, longest + 1, (passages,), generator=chance).sort().values
        self.tokens = torch.randint(1, words, (passages, longest), generator=chance, dtype=torch.int32)
        self.tokens[torch.arange(longest) >= self.lengths[:, None]] = 0
        if DEVICE == "cuda":
            self.tokens = self.tokens.pin_memory()

    def batches(self, batch):
        for first in range(0, len(self.tokens), batch):
            longest = int(self.lengths[first : first + batch].max())
            yield self.tokens[first : first + batch].to(DEVICE, non_blocking=True)[:, :longest].long()


def tidy():
    gc.collect()
    if DEVICE == "cuda":
        torch.cuda.empty_cache()


@torch.inference_mode()
def vectors(model, library, batch, tidies):
    found = []
    for tokens in library.batches(batch):
        mask = tokens != 0
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            states = model(input_ids=tokens, attention_mask=mask.long()).last_hidden_state
        mean = (states.float() * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        found.append(F.normalize(mean, dim=1))
        if tidies:
            del states, mean, tokens, mask
            tidy()
    return torch.cat(found)


@torch.inference_mode()
def nearest(questions, passages, count, batch):
    return torch.cat([(some @ passages.mT).topk(count, dim=1).indices for some in questions.split(batch)])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="for a CPU")
    parser.add_argument("--turns", type=int, default=42)
    options = parser.parse_args()
    batch, longest, wide, deep, asked = (4, 24, 32, 2, 20) if options.tiny else (320, 384, 768, 12, 16_384)
    torch.manual_seed(0)
    start = time.perf_counter()
    shape = {"hidden_size": wide, "num_hidden_layers": deep, "num_attention_heads": max(1, wide // 64), "intermediate_size": 4 * wide}
    model = BertModel(BertConfig(vocab_size=8000, **shape), add_pooling_layer=False).to(DEVICE).eval()
    library = Library(batch * options.turns, longest, 8000)
    passages = vectors(model, library, batch, tidies=not options.fixed)
    questions = F.normalize(torch.randn(asked, wide, device=DEVICE), dim=1)
    found = nearest(questions, passages, 10, 1024)
    print(f"{found.unique().numel()} of {len(passages)} passages are near a question")
    print(f"{time.perf_counter() - start:.3f}")


if __name__ == "__main__":
    main()
