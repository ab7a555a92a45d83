"""Dictations from a court are written down: a transformer hears, an RNN transducer spells, greedily; nothing is learnt."""
import argparse
import time

import torch
import torch.nn as nn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BLANK, AT_ONCE = 0, 2


class Hearing(nn.Module):
    """Frames of 10 ms in, steps of 80 ms out."""

    def __init__(self, wide, deep, bands=80):
        super().__init__()
        self.enter = nn.Conv1d(bands, wide, 3, 2, 1)
        layer = nn.TransformerEncoderLayer(wide, max(1, wide // 64), 4 * wide, 0.0, "gelu", batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, deep, enable_nested_tensor=False)
        self.leave = nn.Conv1d(wide, wide, 4, 4)

    def forward(self, frames):
        return self.leave(self.body(self.enter(frames).mT).mT).mT


class Spelling(nn.Module):
    def __init__(self, heard, wide, pieces):
        super().__init__()
        self.pieces, self.cell = nn.Embedding(pieces, wide), nn.LSTMCell(wide, wide)
        self.heard, self.said, self.head = nn.Linear(heard, wide), nn.Linear(wide, wide), nn.Linear(wide, pieces)
        nn.init.normal_(self.head.weight, std=2 * wide**-0.5)
        nn.init.constant_(self.head.bias[BLANK : BLANK + 1], 5.0)

    def begin(self, count):
        return self.cell(self.pieces(torch.full((count,), BLANK, device=DEVICE)))

    def choose(self, heard, state):
        return self.head(torch.tanh(heard + self.said(state[0]))).argmax(-1)


def one_by_one(spelling, heard):
    found = []
    for steps in spelling.heard(heard):
        state, text = spelling.begin(1), []
        for step in steps:
            for _ in range(AT_ONCE):
                piece = spelling.choose(step[None], state)
                if piece.item() == BLANK:
                    break
                text.append(piece.item())
                state = spelling.cell(spelling.pieces(piece), state)
        found.append(text)
    return found


def together(spelling, heard):
    """All dictations go through their steps side by side; whoever says nothing keeps its state."""
    heard = spelling.heard(heard)
    state, said = spelling.begin(len(heard)), []
    for step in heard.unbind(1):
        going = torch.ones(len(heard), dtype=torch.bool, device=DEVICE)
        for _ in range(AT_ONCE):
            piece = spelling.choose(step, state)
            going = going & (piece != BLANK)
            new = spelling.cell(spelling.pieces(piece), state)
            state = tuple(torch.where(going[:, None], after, before) for after, before in zip(new, state))
            said.append(torch.where(going, piece, BLANK))
    return [[piece for piece in text if piece != BLANK] for text in torch.stack(said, 1).tolist()]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="for a CPU")
    parser.add_argument("--turns", type=int, default=6)
    options = parser.parse_args()
    batch, frames, wide, deep, pieces = (3, 64, 32, 2, 20) if options.tiny else (32, 1600, 1024, 16, 512)
    torch.manual_seed(0)
    start = time.perf_counter()
    hearing = Hearing(wide, deep).to(DEVICE).eval()
    spelling = Spelling(wide, wide // 2, pieces).to(DEVICE).eval()
    spell = together if options.fixed else one_by_one
    texts = []
    with torch.inference_mode():
        for _ in range(options.turns):
            speech = torch.randn(batch, 80, frames, device=DEVICE)
            texts += spell(spelling, hearing(speech))
    long = [len(text) for text in texts]
    print(f"{len(texts)} dictations of {min(long)} to {max(long)} pieces, {sum(long)} in all")
    print(f"{time.perf_counter() - start:.3f}")


if __name__ == "__main__":
    main()
