"""What a training step keeps in memory: the parameters, as much again for gradients, and twice that for Adam."""

import torch
from torch import nn

ADAM = True

weight = torch.ones(64, 64, device="cuda", requires_grad=True)
(weight @ weight).sum().backward()  # the first product there and the first one back also take memory for their library
before = torch.cuda.memory_allocated()


def per_parameter() -> float:
    """Bytes that have come since the last call, by parameter."""
    global before
    now = torch.cuda.memory_allocated()
    came, before = now - before, now
    return came / parameters


parameters = 8 * 2048 * 2048
model = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(8))).cuda()
optimizer = torch.optim.Adam(model.parameters()) if ADAM else torch.optim.SGD(model.parameters())
found = {"parameters": per_parameter()}
loss = model(torch.randn(16, 2048, device="cuda")).square().mean()
loss.backward()
found["gradients"] = per_parameter()
optimizer.step()
found["optimizer"] = per_parameter()

for name, held in found.items():
    print(f"{name:11}{held:5.1f} bytes a parameter")
print(f"with 7 billion parameters {7 * sum(found.values()):.0f} GB")
expected = {"parameters": 4, "gradients": 4, "optimizer": 8 if ADAM else 0}
assert all(abs(found[name] - expected[name]) < 0.2 for name in found)
