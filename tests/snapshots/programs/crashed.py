import torch

model = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(8)]).cuda()
optimizer = torch.optim.Adam(model.parameters())
for step in range(40):
    x = torch.randn(64, 512, device="cuda")
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 25:
        raise ValueError("a bad batch")
