"""A training script."""
import torch
from common import STEPS, conv_net, host_images, image_step, run


def main(tick, fixed=False):
    batches = [batch.pin_memory() for batch in host_images()]
    side, main_stream = torch.cuda.Stream(), torch.cuda.current_stream()
    model = conv_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    y = torch.randint(0, 1000, (batches[0].shape[0],), device="cuda")

    def fetch(step):
        with torch.cuda.stream(side):
            return batches[step % len(batches)].to("cuda", non_blocking=True)

    ahead = fetch(0) if fixed else None
    for step in range(STEPS):
        if fixed:
            main_stream.wait_stream(side)
            x = ahead
            x.record_stream(main_stream)
            ahead = fetch(step + 1)
        else:
            x = batches[step % len(batches)].to("cuda", non_blocking=True)
        image_step(model, optimizer, x, y)
        tick()


if __name__ == "__main__":
    run(main)
