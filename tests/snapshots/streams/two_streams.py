import torch

weights = torch.randn(4096, 4096, device="cuda")
batches = [torch.randn(4096, 4096).pin_memory() for _ in range(8)]
copies = torch.cuda.Stream()


def load(batch):
    with torch.cuda.stream(copies):
        on_gpu = batch.to("cuda", non_blocking=True)
        return on_gpu, copies.record_event()


following = load(batches[0])
for number in range(len(batches)):
    batch, copied = following
    if number + 1 < len(batches):
        following = load(batches[number + 1])
    torch.cuda.current_stream().wait_event(copied)
    batch.record_stream(torch.cuda.current_stream())
    result = batch @ weights
torch.cuda.synchronize()
