"""PyTorch's own encoder, as large as BERT's, on sentences of 256 words."""

import torch
from told import loop
from torch import nn
from torch.nn import functional as F  # noqa: N812

import keepbusy

WIDTH, LAYERS, HEADS, LENGTH, WORDS, BATCH, STEPS = 1024, 24, 16, 256, 30522, 64, 14


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, activation="gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, LAYERS)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, x):
        return self.head(self.encoder(self.words(x) + self.places.weight))


torch.manual_seed(0)
with torch.device("cuda"):
    model = Encoder()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
data = torch.utils.data.TensorDataset(torch.randint(WORDS, (BATCH * STEPS, LENGTH)))
loader = torch.utils.data.DataLoader(data, batch_size=BATCH)
model, optimizer, loader = keepbusy.spread(model, optimizer, loader, example=data.tensors[0][:2])
for (words,) in loop(loader):
    x = words.cuda()
    with torch.autocast("cuda", torch.bfloat16):
        loss = F.cross_entropy(model(x).flatten(0, 1).float(), x.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
