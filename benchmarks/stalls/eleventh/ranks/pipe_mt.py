# Two-stage pipeline: stage 0 = embedding + lower half, stage 1 = upper half + vocabulary head.
import os, sys, time, tempfile
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

FIXED = "--fixed" in sys.argv
SMALL = os.environ.get("BLIND_SMALL") == "1"

D, HEADS, LAYERS, VOCAB = (64, 4, 1, 200) if SMALL else (1024, 16, 6, 8000)
MB, T, N_MICRO = (2, 16, 4) if SMALL else (12, 512, 8)
EPOCHS, STEPS, VAL_MICRO = (2, 3, 3) if SMALL else (3, 28, 12)

cuda = torch.cuda.is_available()
local = int(os.environ["LOCAL_RANK"])
device = torch.device(f"cuda:{local}" if cuda else "cpu")
if cuda:
    torch.cuda.set_device(device)
    torch.set_float32_matmul_precision("high")
    dist.init_process_group("nccl", device_id=device)
else:
    dist.init_process_group("gloo")
start = time.time()
rank = dist.get_rank()
act_pg = dist.new_group([0, 1])     # activations 0 -> 1
grad_pg = dist.new_group([0, 1])    # their gradients 1 -> 0


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.qkv, self.proj = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.mlp = nn.Sequential(nn.Linear(D, 4 * D), nn.GELU(), nn.Linear(4 * D, D))

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(a.transpose(1, 2).reshape(b, t, D))
        return x + self.mlp(self.n2(x))


torch.manual_seed(17 + rank)
with device:
    layers = [Layer() for _ in range(LAYERS)]
    if rank == 0:
        stage = nn.Sequential(nn.Embedding(VOCAB, D), *layers)
    else:
        stage = nn.Sequential(*layers, nn.LayerNorm(D), nn.Linear(D, VOCAB))
opt = torch.optim.AdamW(stage.parameters(), lr=2e-4, fused=cuda)
g = torch.Generator(device=device).manual_seed(5)      # the same tokens on both stages
train = torch.randint(VOCAB, (STEPS, N_MICRO, MB, T + 1), device=device, generator=g)
valid = torch.randint(VOCAB, (VAL_MICRO, MB, T + 1), device=device, generator=g)
autocast = lambda: torch.autocast(device.type, torch.bfloat16, enabled=cuda)
new_buf = lambda: torch.empty(MB, T, D, device=device)


def forward(x):
    with autocast():
        return stage(x)


def lower_step(tokens):
    """Stage 0: forward, hand the activation on, get its gradient back, backward."""
    if FIXED:
        outs, works = [], []
        for m in range(N_MICRO):
            outs.append(forward(tokens[m, :, :-1]))
            works.append(dist.isend(outs[m].detach(), 1, group=act_pg))
        for m in range(N_MICRO):
            grad = new_buf()
            dist.recv(grad, 1, group=grad_pg)
            outs[m].backward(grad)
            outs[m] = None
        for w in works:
            w.wait()
    else:
        for m in range(N_MICRO):
            out = forward(tokens[m, :, :-1])
            dist.send(out.detach(), 1, group=act_pg)
            grad = new_buf()
            dist.recv(grad, 1, group=grad_pg)  # FAULT
            out.backward(grad)


def upper_step(tokens):
    """Stage 1: the loss, and the gradient of the activation to stage 0; the next activation is asked for early."""
    total, sends = torch.zeros((), device=device), []
    bufs = [new_buf()]
    work = dist.irecv(bufs[0], 0, group=act_pg)
    for m in range(N_MICRO):
        work.wait()
        x = bufs[m].requires_grad_()
        if m + 1 < N_MICRO:
            bufs.append(new_buf())
            work = dist.irecv(bufs[m + 1], 0, group=act_pg)
        logits = forward(x)
        loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[m, :, 1:].flatten()) / N_MICRO
        loss.backward()
        sends.append(dist.isend(x.grad, 0, group=grad_pg))
        total += loss.detach()
    for w in sends:
        w.wait()
    return total


@torch.no_grad()
def validate():
    stage.eval()
    total, works = torch.zeros((), device=device), []
    for m in range(VAL_MICRO):
        if rank == 0:
            works.append(dist.isend(forward(valid[m, :, :-1]), 1, group=act_pg))
        else:
            buf = new_buf()
            dist.recv(buf, 0, group=act_pg)
            total += F.cross_entropy(forward(buf).float().flatten(0, 1), valid[m, :, 1:].flatten())
    for w in works:
        w.wait()
    stage.train()
    return total / VAL_MICRO


for epoch in range(EPOCHS):
    tick, history = time.time(), []
    for step in range(STEPS):
        for group in opt.param_groups:
            group["lr"] = 2e-4 * min(1.0, (epoch * STEPS + step + 1) / 10)
        if rank == 0:
            lower_step(train[step])
        else:
            history.append(upper_step(train[step]))
        opt.step()
        opt.zero_grad()
    val = validate()
    if rank == 1:
        print(f"[{epoch}] train {torch.stack(history).mean().item():.4f} val {val.item():.4f} "
              f"{(time.time() - tick) / STEPS * 1e3:.1f} ms/step", flush=True)

torch.save([p.detach().to("cpu", torch.bfloat16) for p in stage.parameters()],
           os.path.join(tempfile.mkdtemp(), f"stage{rank}.pt"))
if cuda:
    torch.cuda.synchronize()
dist.barrier(device_ids=[local] if cuda else None)
if rank == 0:
    print("RUN_SECONDS %.3f" % (time.time() - start), flush=True)
dist.destroy_process_group()
