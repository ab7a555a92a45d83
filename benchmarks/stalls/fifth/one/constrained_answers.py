"""Reports are turned into records by a BART that may only write what a grammar, as an automaton over tokens, allows."""
import random

import torch
from setting import DEVICE, run, size, turns
from transformers import BartConfig, BartForConditionalGeneration, LogitsProcessor, LogitsProcessorList

ROWS, LENGTH, TOKENS, VOCAB, STATES, WAYS = size(64, 3), size(512, 24), size(144, 12), size(32000, 60), size(96, 6), size(240, 5)


class Grammar:
    """From each state, which tokens may follow and where they lead."""

    def __init__(self):
        rng = random.Random(0)
        self.ways = [{token: rng.randrange(STATES) for token in rng.sample(range(4, VOCAB), WAYS)} for _ in range(STATES)]

    def allowed(self, tokens):
        state = 0
        for token in tokens:
            state = self.ways[state][token]
        return list(self.ways[state])

    def table(self):
        table = torch.full((STATES, VOCAB), -1)
        for state, ways in enumerate(self.ways):
            table[state, list(ways)] = torch.tensor(list(ways.values()))
        return table


class Automaton(LogitsProcessor):
    """The grammar as a table where the scores are; remembers the state of each row."""

    def __init__(self, grammar):
        self.table, self.states = grammar.table().to(DEVICE), None

    def __call__(self, input_ids, scores):
        if input_ids.shape[1] == 1:
            self.states = input_ids.new_zeros(len(input_ids))
        else:
            self.states = self.table[self.states, input_ids[:, -1]]
        return scores.masked_fill(self.table[self.states] < 0, float("-inf"))


def reports(count):
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        lengths = torch.randint(LENGTH * 3 // 4, LENGTH + 1, (ROWS,), generator=generator)
        mask = (torch.arange(LENGTH) < lengths[:, None]).long()
        tokens = torch.randint(4, VOCAB, (ROWS, LENGTH), generator=generator)
        yield torch.where(mask.bool(), tokens, 1), mask


def make_model():
    wide = size(1024, 32)
    config = BartConfig(
        vocab_size=VOCAB, d_model=wide, encoder_layers=size(8, 1), decoder_layers=size(6, 1),
        encoder_attention_heads=size(16, 2), decoder_attention_heads=size(16, 2), encoder_ffn_dim=4 * wide, decoder_ffn_dim=4 * wide,
        max_position_embeddings=1024, forced_eos_token_id=None, forced_bos_token_id=None,
    )
    return BartForConditionalGeneration(config).to(DEVICE, torch.bfloat16 if DEVICE == "cuda" else torch.float32).eval()


@torch.inference_mode()
def main(variant):
    model, grammar = make_model(), Grammar()
    settings = dict(max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False, num_beams=1, use_cache=True)
    if variant == "fixed":
        settings["logits_processor"] = LogitsProcessorList([Automaton(grammar)])
    else:
        settings["prefix_allowed_tokens_fn"] = lambda row, written: grammar.allowed(written.tolist()[1:])
    records = []
    for tokens, mask in reports(turns(7, 2)):
        if DEVICE == "cuda":
            tokens, mask = tokens.pin_memory(), mask.pin_memory()
        record = model.generate(tokens.to(DEVICE, non_blocking=True), attention_mask=mask.to(DEVICE, non_blocking=True), **settings)
        records.append(record)
    wrong = 0
    for record in records:
        for row in record.cpu().tolist():
            wrong += any(token not in grammar.allowed(row[1:place]) for place, token in enumerate(row[1:8], 1))
    print(f"{sum(len(record) for record in records)} records, {wrong} against the grammar, sum {sum(int(record.sum()) for record in records)}")


if __name__ == "__main__":
    run(main)
