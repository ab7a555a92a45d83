"""Every fourth step the weights are copied to the host for a rolling checkpoint, tensor by tensor, while the GPU waits."""
import torch
import torch.nn.functional as F

from models import STEPS, TextClassifier, run, size


def main(tick, fixed=False):
    with torch.device("cuda"):
        model = TextClassifier(width=768, layers=6, heads=12)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    x = torch.randint(0, 8192, (size(96, 2), size(256, 8)), device="cuda")
    y = torch.randint(0, 20, x.shape[:1], device="cuda")
    if fixed:
        home = {name: torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for name, tensor in model.state_dict().items()}
        side = torch.cuda.Stream()
    for step in range(STEPS):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 4 == 3 and fixed:
            copies = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for name, tensor in copies.items():
                    home[name].copy_(tensor, non_blocking=True)
                    tensor.record_stream(side)
        elif step % 4 == 3:
            checkpoint = {name: tensor.cpu() for name, tensor in model.state_dict().items()}  # STALL: blocking_copy
        tick()


if __name__ == "__main__":
    run(main)
