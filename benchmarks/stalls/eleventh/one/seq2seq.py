"""GRU encoder-decoder with attention that learns to sort symbol sequences.

All symbols of one sequence are different, so that the decoder may never emit
the same symbol twice: decoding bans what has been produced already.
"""
import os
import sys
import time

import torch
import torch.nn as nn
import torch.nn.functional as F

started = time.perf_counter()
FIXED = "--fixed" in sys.argv
SMALL = os.environ.get("BLIND_SMALL") == "1"
device = "cuda" if torch.cuda.is_available() else "cpu"


class HP:
    vocab = 60 if SMALL else 400
    length = 10 if SMALL else 40
    batch = 32 if SMALL else 256
    eval_batch = 16 if SMALL else 128
    eval_batches = 2 if SMALL else 6
    emb, hidden = (32, 64) if SMALL else (256, 512)
    steps = 60 if SMALL else 840
    eval_every = 20 if SMALL else 120
    lr = 1e-3


BOS = HP.vocab  # index of the start symbol


def sample_batch(n, generator=None):
    scores = torch.rand(n, HP.vocab, device=device, generator=generator)
    src = scores.topk(HP.length, dim=1).indices
    return src, src.sort(dim=1).values


class Attention(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.q = nn.Linear(dim, dim, bias=False)
        self.mix = nn.Linear(2 * dim, dim)

    def forward(self, dec, mem):
        w = torch.softmax(self.q(dec) @ mem.transpose(1, 2), dim=-1)
        return torch.tanh(self.mix(torch.cat([dec, w @ mem], dim=-1)))


class Seq2Seq(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(HP.vocab + 1, HP.emb)
        self.enc = nn.GRU(HP.emb, HP.hidden // 2, num_layers=2, bidirectional=True, batch_first=True)
        self.bridge = nn.Linear(HP.hidden, HP.hidden)
        self.dec = nn.GRU(HP.emb, HP.hidden, batch_first=True)
        self.attn = Attention(HP.hidden)
        self.out = nn.Linear(HP.hidden, HP.vocab)

    def encode(self, src):
        mem, _ = self.enc(self.emb(src))
        h0 = torch.tanh(self.bridge(mem.mean(1)))[None].contiguous()
        return mem, h0

    def forward(self, src, tgt_in):
        mem, h0 = self.encode(src)
        dec, _ = self.dec(self.emb(tgt_in), h0)
        return self.out(self.attn(dec, mem))


@torch.no_grad()
def greedy_decode(model, src):
    """Greedy search under the no-repetition rule. Returns [batch, length]."""
    n = src.shape[0]
    mem, h = model.encode(src)
    tok = torch.full((n, 1), BOS, dtype=torch.long, device=device)
    produced = torch.zeros(n, HP.length, dtype=torch.long, device=device)
    for t in range(HP.length):
        dec, h = model.dec(model.emb(tok), h)
        logits = model.out(model.attn(dec, mem)).squeeze(1)
        if t > 0:
            if FIXED:
                logits.scatter_(1, produced[:, :t], float("-inf"))
            else:
                for b in range(n):
                    logits[b, produced[b, :t]] = float("-inf")  # FAULT
        tok = logits.argmax(dim=1, keepdim=True)
        produced[:, t] = tok.squeeze(1)
    return produced


def evaluate(model, batches):
    model.eval()
    right_tok = torch.zeros((), device=device)
    right_seq = torch.zeros((), device=device)
    for src, tgt in batches:
        same = greedy_decode(model, src) == tgt
        right_tok += same.float().mean()
        right_seq += same.all(dim=1).float().mean()
    model.train()
    return (torch.stack([right_tok, right_seq]) / len(batches)).tolist()


def train():
    torch.manual_seed(11)
    gen = torch.Generator(device=device).manual_seed(99)
    val = [sample_batch(HP.eval_batch, gen) for _ in range(HP.eval_batches)]
    model = Seq2Seq().to(device)
    opt = torch.optim.Adam(model.parameters(), lr=HP.lr, fused=device == "cuda")
    warm = torch.optim.lr_scheduler.LinearLR(opt, 0.1, 1.0, total_iters=HP.steps // 10)
    bos = torch.full((HP.batch, 1), BOS, dtype=torch.long, device=device)
    window = torch.zeros((), device=device)
    for step in range(1, HP.steps + 1):
        src, tgt = sample_batch(HP.batch)
        logits = model(src, torch.cat([bos, tgt[:, :-1]], dim=1))
        loss = F.cross_entropy(logits.flatten(0, 1), tgt.flatten())
        opt.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        warm.step()
        window += loss.detach()
        if step % HP.eval_every == 0:
            tok_acc, seq_acc = evaluate(model, val)
            print(f"{step:5d} loss {window.item() / HP.eval_every:.3f} "
                  f"token acc {tok_acc:.3f} sequence acc {seq_acc:.3f}", flush=True)
            window.zero_()


if __name__ == "__main__":
    train()
    if device == "cuda":
        torch.cuda.synchronize()
    print("RUN_SECONDS %.3f" % (time.perf_counter() - started))
