"""Speech of 4 to 16 seconds with CTC; since lengths vary, the cache is emptied in fear of running out, and every batch is decoded."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from script import DEVICE, run, turns
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

from models import encoder, size

BATCH, BANDS, LETTERS = size(24, 2), 80, 32
SHORTEST, LONGEST = size(400, 32), size(1600, 64)


class Utterances(Dataset):
    def __init__(self, count):
        self.count, self.sound = count, torch.randn(LONGEST, BANDS)

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        frames = SHORTEST + index * 7919 % (LONGEST - SHORTEST)
        text = (torch.arange(max(2, frames // 20)) * (index % 7 + 1)) % (LETTERS - 1) + 1
        return self.sound[:frames] * (1 + index % 5), text


def collate(rows):
    sounds, texts = zip(*rows)
    return (
        pad_sequence(sounds, batch_first=True), torch.tensor([len(sound) for sound in sounds]),
        pad_sequence(texts, batch_first=True), torch.tensor([len(text) for text in texts]),
    )


class Recognizer(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = encoder(512, layers=8, heads=8)
        width = self.body.layers[0].linear1.in_features
        self.front = nn.Sequential(nn.Conv1d(BANDS, width, 3, 2, 1), nn.GELU(), nn.Conv1d(width, width, 3, 2, 1), nn.GELU())
        self.head = nn.Linear(width, LETTERS)

    def forward(self, sounds):
        return self.head(self.body(self.front(sounds.transpose(1, 2)).transpose(1, 2)))


def edits(one, other):
    row = list(range(len(other) + 1))
    for i, a in enumerate(one, 1):
        corner, row[0] = row[0], i
        for j, b in enumerate(other, 1):
            corner, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, corner + (a != b))
    return row[-1]


def error_rate(scores, lengths, texts, text_lengths):
    wrong = total = 0
    best = scores.argmax(-1).tolist()  # STALL: host_sync
    for letters, length, text, wanted in zip(best, lengths.tolist(), texts.tolist(), text_lengths.tolist()):
        heard = [b for a, b in zip([0, *letters], letters[:length]) if b and b != a]
        wrong += edits(heard, text[:wanted])  # STALL: host_work
        total += wanted
    return wrong / total


def main(tick, fixed=False):
    """`fixed` may also be "cache" or "decode", to mend one of the two alone."""
    cached, seldom = fixed in (True, "cache"), fixed in (True, "decode")
    torch.manual_seed(0)
    steps = turns(200, 2)
    with torch.device(DEVICE):
        model = Recognizer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=DEVICE == "cuda")
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / 100, (100 / (step + 1)) ** 0.5))
    rates = []
    loader = DataLoader(Utterances(BATCH * steps), BATCH, shuffle=True, num_workers=size(6, 1), collate_fn=collate, pin_memory=DEVICE == "cuda")
    for step, (sounds, lengths, texts, text_lengths) in enumerate(loader):
        on_device = texts.to(DEVICE, non_blocking=True)
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            scores = model(sounds.to(DEVICE, non_blocking=True)).float().log_softmax(-1)
        lengths = (lengths + 3) // 4
        loss = F.ctc_loss(scores.transpose(0, 1), on_device, lengths, text_lengths, zero_infinity=True)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        schedule.step()
        if not seldom or step % 50 == 49:
            rates.append(error_rate(scores.detach(), lengths, texts, text_lengths))
        del scores, loss
        if not cached:
            torch.cuda.empty_cache()  # STALL: host_sync
        tick()


if __name__ == "__main__":
    run(main)
