"""A training script."""
import torch
from common import STEPS, gpt, loss_of, run, size


def host_batch():
    """What a tokenizer or an augmentation costs: about fifteen milliseconds of one core."""
    scores = torch.randn(size(64, 2), size(512, 16), size(48, 8))
    return scores.argmax(-1).pin_memory()


def main(tick, fixed=False):
    torch.set_num_threads(1)
    model = gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    log, running = [], torch.zeros((), device="cuda")
    for step in range(STEPS):
        x = host_batch().to("cuda", non_blocking=True)
        loss = loss_of(model, x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if fixed:
            running += loss.detach()
        else:
            log.append(loss.item())
        tick()
    if fixed:
        log.append(running.item() / STEPS)


if __name__ == "__main__":
    run(main)
