"""Perplexity of a Llama on documents of all lengths, sorted into batches; every batch's loss is read, and words are picked by a mask."""
import math

import torch
import torch.nn.functional as F
from setting import DEVICE, run, size, turns
from transformers import LlamaConfig, LlamaForCausalLM

BUDGET, LONGEST, VOCAB = size(32768, 128), size(2048, 32), size(32000, 64)


def make_model():
    wide = size(2048, 32)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=wide, intermediate_size=size(5632, 64), num_hidden_layers=size(16, 2), num_attention_heads=size(16, 2),
        num_key_value_heads=size(8, 2), max_position_embeddings=4096, attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config).to(DEVICE, torch.bfloat16 if DEVICE == "cuda" else torch.float32).eval()


def documents(tokens):
    """Documents of 1/8 to all of the longest, of `tokens` tokens together."""
    generator = torch.Generator().manual_seed(0)
    while tokens > 0:
        length = int(LONGEST / 8 + torch.rand(1, generator=generator).item() ** 2 * LONGEST * 7 / 8)
        yield torch.randint(3, VOCAB, (length,), generator=generator)
        tokens -= length


def batches(corpus):
    """Longest first, as many at once as fit the budget of padded tokens."""
    corpus = sorted(corpus, key=len, reverse=True)
    while corpus:
        rows = corpus[: max(1, BUDGET // len(corpus[0]))]
        corpus = corpus[len(rows) :]
        padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        lengths = torch.tensor([len(row) for row in rows])
        yield padded, (torch.arange(padded.shape[1]) < lengths[:, None]).long()


@torch.inference_mode()
def main(variant):
    model = make_model()
    corpus = list(documents(turns(75, 3) * BUDGET))
    total, count, worst = torch.zeros((), device=DEVICE, dtype=torch.float64), torch.zeros((), device=DEVICE, dtype=torch.long), 0.0
    for number, (tokens, mask) in enumerate(batches(corpus)):
        tokens, mask = tokens.to(DEVICE), mask.to(DEVICE)
        hidden = model.model(tokens, attention_mask=mask, use_cache=False).last_hidden_state[:, :-1]
        valid = mask[:, 1:].bool()
        if variant == "fixed":
            losses = F.cross_entropy(model.lm_head(hidden).flatten(0, 1), tokens[:, 1:].flatten(), reduction="none") * valid.flatten()
            total += losses.double().sum()
            count += valid.sum()
        else:
            losses = F.cross_entropy(model.lm_head(hidden).flatten(0, 1), tokens[:, 1:].flatten(), reduction="none").view(valid.shape)[valid]
            total += losses.double().sum()
            count += losses.numel()
            worst = max(worst, losses.max().item())
            if number % 10 == 0:
                print(f"batch {number}: perplexity so far {math.exp(total.item() / count.item()):.1f}, worst word {worst:.2f}")
    print(f"{len(corpus)} documents, {count.item()} words, perplexity {math.exp(total.item() / count.item()):.1f}")


if __name__ == "__main__":
    run(main)
