"""The log of driver calls against the profiler, command by command, and what it costs a step.

    python benchmarks/driver_log.py complete OUT      # each program in a process of its own; logs and traces go to OUT
    python benchmarks/driver_log.py rebuild OUT       # from these, anywhere: the GPU's timeline held against real waits
    python benchmarks/driver_log.py script OUT train.py --epochs 1    # any training script, for `rebuild`
    python benchmarks/driver_log.py cost mlp          # blocks of steps, with and without the log, in turns
    torchrun --nproc-per-node 2 benchmarks/driver_log.py one ddp OUT

On a machine with an NVIDIA GPU and a C compiler.
"""

from __future__ import annotations

import atexit
import json
import os
import runpy
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))
from keepbusy.log import hostlog
from keepbusy.log.joined_ranks import rebuild_ranks
from keepbusy.log.kernel_times import KernelTimes, learn
from keepbusy.log.kernel_times import device_events as seen_on_device
from keepbusy.log.log_file import device_commands, read_log
from keepbusy.log.rebuild import LONG_WAIT, how_close, rebuild

Step = Callable[[], object]


def build() -> None:
    source = hostlog.LIBRARY.with_name("hostlog.c")
    if not hostlog.LIBRARY.exists():
        command = ["gcc", "-O2", "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", str(source)]
        subprocess.run([*command, "-o", str(hostlog.LIBRARY)], check=True)


def mlp() -> Step:
    """About 1 ms of Python a step, and less on the GPU."""
    import torch

    x, y = torch.randn(64, 32, device="cuda"), torch.randn(64, 8, device="cuda")
    parameters = [
        torch.randn(size, device="cuda", requires_grad=True) for size in ((32, 64), (64,), (64, 64), (64,), (64, 8))
    ]

    def step() -> None:
        a, b, c, d, e = parameters
        loss = ((((x @ a + b).tanh() @ c + d).tanh() @ e) - y).square().mean()
        for p in parameters:
            p.grad = None
        loss.backward()
        for p in parameters:
            p.data += -0.01 * p.grad

    return step


def many_layers() -> Step:
    """About 8 ms of Python a step, and less on the GPU."""
    import torch
    from torch import nn

    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, dropout=0.0)
    model = nn.TransformerEncoder(layer, 8, enable_nested_tensor=False).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False, fused=False, lr=1e-4)
    x = torch.randn(8, 16, 64, device="cuda")

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step


def healthy() -> Step:
    """The GPU is busy: large products, few launches."""
    import torch

    a, b = (torch.randn(6144, 6144, device="cuda", dtype=torch.bfloat16) for _ in range(2))

    def step() -> None:
        c = a
        for _ in range(12):
            c = (c @ b) * 0.01
        c.sum().item()

    return step


def convolutions() -> Step:
    import torch
    from torch import nn

    layers: list[nn.Module] = []
    for width in (3, 32, 64, 64):
        layers += [
            nn.Conv2d(width, max(32, min(2 * width, 64)), 3, padding=1),
            nn.BatchNorm2d(max(32, min(2 * width, 64))),
            nn.ReLU(),
        ]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)).cuda()
    model = model.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    x = torch.randn(32, 3, 64, 64, device="cuda").contiguous(memory_format=torch.channels_last)
    y = torch.randint(10, (32,), device="cuda")

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()

    return step


def attention() -> Step:
    import torch
    from torch import nn

    q = torch.randn(4, 8, 512, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    linear = nn.Linear(64, 64, device="cuda", dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW([q, *linear.parameters()], fused=True)

    def step() -> None:
        optimizer.zero_grad()
        out = nn.functional.scaled_dot_product_attention(q, linear(q), q, is_causal=True)
        out.float().square().mean().backward()
        optimizer.step()

    return step


def recurrent() -> Step:
    import torch
    from torch import nn

    model, embed = nn.LSTM(64, 64, 2).cuda(), nn.Embedding(1000, 64).cuda()
    optimizer = torch.optim.Adam([*model.parameters(), *embed.parameters()])
    tokens = torch.randint(1000, (40, 16), device="cuda")

    def step() -> None:
        optimizer.zero_grad()
        out, _ = model(embed(tokens))
        out.square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def inductor(mode: str | None = None) -> Step:
    import torch
    from torch import nn

    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 64)).cuda()
    compiled = torch.compile(model, mode=mode)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(32, 64, device="cuda")

    def step() -> None:
        optimizer.zero_grad()
        compiled(x).square().mean().backward()
        optimizer.step()

    return step


def reduce_overhead() -> Step:
    return inductor("reduce-overhead")


def triton_kernel() -> Step:
    import torch
    from driver_log_triton import double

    x = torch.randn(100_000, device="cuda")

    def step() -> None:
        for _ in range(5):
            double(x)
        x.mul_(0.5)

    return step


def graph() -> Step:
    import torch

    x, w = torch.randn(64, 64, device="cuda"), torch.randn(64, 64, device="cuda")
    captured = torch.cuda.CUDAGraph()
    x @ w  # cuBLAS cannot start within a capture
    with torch.cuda.graph(captured):
        y = x
        for _ in range(20):
            y = (y @ w).tanh()
        y.zero_()

    def step() -> None:
        x.normal_()
        captured.replay()
        y.sum().item()

    return step


def copies() -> Step:
    import torch

    side = torch.cuda.Stream()
    pinned, pageable = torch.randn(1 << 18).pin_memory(), torch.randn(1 << 16)
    w = torch.randn(512, 512, device="cuda")

    def step() -> None:
        with torch.cuda.stream(side):
            batch = pinned.to("cuda", non_blocking=True)
        product = w @ w
        torch.cuda.current_stream().wait_stream(side)
        batch.record_stream(torch.cuda.current_stream())
        total = batch.view(512, 512) + product
        total[:128, :128].sum().item()
        total.flatten()[: 1 << 16].copy_(pageable)
        total[0].cpu()

    return step


def low_precision() -> Step:
    import torch

    a = torch.randn(256, 256, device="cuda").to(torch.float8_e4m3fn)
    one, i = torch.tensor(1.0, device="cuda"), torch.randint(-8, 8, (256, 256), device="cuda", dtype=torch.int8)
    bias, w = (
        torch.randn(256, device="cuda", dtype=torch.bfloat16),
        torch.randn(256, 256, device="cuda", dtype=torch.bfloat16),
    )

    def step() -> None:
        torch._scaled_mm(a, a.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
        torch._int_mm(i, i.t())
        torch._addmm_activation(bias, w, w, use_gelu=True)

    return step


def indices() -> Step:
    import torch

    x, at = torch.randn(50_000, device="cuda"), torch.randint(1000, (50_000,), device="cuda")
    sums = torch.zeros(1000, device="cuda")

    def step() -> None:
        sums.zero_().scatter_add_(0, at, x)
        x.sort().values[x > 0].cumsum(0).nonzero()
        torch.unique(at)

    return step


def libraries() -> Step:
    import torch

    x = torch.randn(64, 64, device="cuda")
    symmetric = x @ x.t() + 64 * torch.eye(64, device="cuda")

    def step() -> None:
        torch.fft.rfft2(x)
        torch.linalg.cholesky(symmetric)
        torch.linalg.svdvals(x)
        torch.multinomial(x.abs(), 4)

    return step


def ddp() -> Step:
    import torch
    import torch.distributed as dist
    from torch import nn

    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*[nn.Linear(512, 512) for _ in range(8)]).cuda())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(64, 512, device="cuda")

    def step() -> None:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        total.item()

    return step


def late_rank() -> Step:
    """Rank 1 computes more than rank 0, which waits for it."""
    import torch

    together, more = ddp(), torch.randn(4096, 4096, device=f"cuda:{os.environ['LOCAL_RANK']}")

    def step() -> None:
        for _ in range(4 * int(os.environ["RANK"])):
            more @ more
        together()

    return step


RANKS = {"ddp": ddp, "late_rank": late_rank}
PROGRAMS = {
    program.__name__: program
    for program in (
        *(mlp, many_layers, healthy, convolutions, attention, recurrent, inductor, reduce_overhead, triton_kernel),
        *(graph, copies, low_precision, indices, libraries),
    )
}


def one(name: str, out: Path) -> None:
    """One program: warm-up, six steps under the profiler, a hundred without. Says how log and profiler agree."""
    rank = os.environ.get("RANK", "")
    folder = out / f"{name}{rank}"
    folder.mkdir(parents=True)
    assert not (why := hostlog.start(folder)), why
    import torch

    step = (PROGRAMS | RANKS)[name]()
    for _ in range(20):
        step()
    torch.cuda.synchronize()
    stamps = []
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profiler:
        torch.cuda.synchronize()
        window = [time.monotonic_ns()]
        for _ in range(6):
            step()
        torch.cuda.synchronize()
        window.append(time.monotonic_ns())
    for number in range(100):
        stamps.append(time.monotonic_ns())
        step()
        if number % 5 == 4:
            torch.cuda.synchronize()  # a wait to hold the rebuilt timeline against
    ended = hostlog.stop()
    profiler.export_chrome_trace(str(folder / "trace.json"))
    (folder / "window.json").write_text(json.dumps({"window": window, "steps": stamps}))
    print(name + rank, compare(folder), ended or "", flush=True)
    if name in RANKS:
        torch.distributed.destroy_process_group()


def script(out: Path, path: str, arguments: list[str], first: int = 60, last: int = 66) -> None:
    """Any script that trains: the profiler looks on between two of its optimizer's steps."""
    assert not (why := hostlog.start(out)), why
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    stamps, window = list[int](), list[int]()
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True)

    def stepped(*_: object) -> None:
        stamps.append(time.monotonic_ns())
        if len(stamps) == first:
            profiler.start()
        if len(stamps) in (first, last):
            torch.cuda.synchronize()
            window.append(time.monotonic_ns())
        if len(stamps) == last:
            profiler.stop()
            profiler.export_chrome_trace(str(out / "trace.json"))

    def leave() -> None:
        print(f"{out.name}: {len(stamps)} steps {hostlog.stop()}", flush=True)
        (out / "window.json").write_text(json.dumps({"window": window, "steps": stamps[last:]}))

    register_optimizer_step_post_hook(stepped)
    atexit.register(leave)
    sys.argv, sys.path[0] = [path, *arguments], str(Path(path).resolve().parent)
    runpy.run_path(path, run_name="__main__")


def compare(folder: Path) -> str:
    log = read_log(folder)
    first, last = json.loads((folder / "window.json").read_text())["window"]
    issuers, described = device_commands(log)
    begin = log.begin[issuers]
    logged = [
        (kind if kind in ("launch", "set_memory") else "copy", call.grid, call.block)
        for kind, call in (
            (log.calls[number].kind, log.calls[number])
            for number in log.rows["call"][described[(begin >= first) & (begin <= last)]].tolist()
        )
    ]
    profiled = [
        (
            {"kernel": "launch", "gpu_memset": "set_memory", "gpu_memcpy": "copy"}[event["cat"]],
            tuple(event["args"].get("grid", ())),
            tuple(event["args"].get("block", ())),
        )
        for event in sorted(device_events(folder), key=lambda event: (event["args"]["correlation"], event["ts"]))
    ]
    same = (
        "same order" if logged == profiled else "another order" if Counter(logged) == Counter(profiled) else "DIFFERENT"
    )
    apart = (Counter(logged) - Counter(profiled), Counter(profiled) - Counter(logged))
    more = "" if same != "DIFFERENT" else f" only in the log: {dict(apart[0])}, only in the profile: {dict(apart[1])}"
    kinds = log.kinds()[(log.begin >= first) & (log.begin <= last)]
    waits = Counter(kinds[np.isin(kinds, [*WAITS])].tolist())
    seen = Counter(event["name"] for event in events(folder) if event.get("cat") == "cuda_runtime")
    missing = {name: seen[WAITS[name]] - waits[name] for name in WAITS if seen[WAITS[name]] > waits[name]}
    missing.pop("context_sync", None) if missing.get("context_sync", 0) <= 2 else None  # outside of the window
    python = (log.rows["stack"] != 0).mean()
    named = sum(bool(call.name) for call in log.calls.values() if call.kind == "launch")
    launches = sum(call.kind == "launch" for call in log.calls.values())
    return (
        f"{len(logged)} of {len(profiled)}, {same}; {len(log.rows)} rows, {len(log.stacks)} stacks,"
        f" {python:.0%} with one, {named} of {launches} kernels named, {waits.total()} waits"
        f"{f', MISSING {missing}' if missing else ''}{more}"
    )


WAITS = {
    "stream_sync": "cudaStreamSynchronize",
    "event_sync": "cudaEventSynchronize",
    "context_sync": "cudaDeviceSynchronize",
}


def events(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((folder / "trace.json").read_text())["traceEvents"]
    return found


def device_events(folder: Path) -> list[dict[str, Any]]:
    return [event for event in events(folder) if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]


def complete(out: Path) -> None:
    """One after the other: programs beside each other make the GPU's times longer."""
    for name in PROGRAMS:
        subprocess.run([sys.executable, __file__, "one", name, str(out)], check=True)


def closure(folders: list[Path]) -> Iterator[str]:
    """How the GPU's timeline, rebuilt from the log and the one window, ends at the waits after the window. Of ranks,
    rebuilt together."""
    logs, said = [read_log(folder) for folder in folders], list[Any]()
    taught = list[KernelTimes]()
    for folder, log in zip(folders, logs, strict=True):
        said.append(json.loads((folder / "window.json").read_text()))
        taught.append(learn(log, *said[-1]["window"], seen_on_device(events(folder))))
    runs = rebuild_ranks(logs, taught) if len(logs) > 1 else [rebuild(logs[0], taught[0])]
    for folder, run, about in zip(folders, runs, said, strict=True):
        first = about["steps"][0]
        run.waits = [wait for wait in run.waits if wait.begin > first]
        real = np.array([wait.ended for wait in run.waits], float)
        wrong = np.abs(np.array([wait.predicted for wait in run.waits]) - real)
        since, long = np.diff(real, prepend=first), how_close(run.waits)[0]
        wrong_by = f"{np.median(long):.1%} of each" if len(long) else ""
        text = f"{len(long)} of {LONG_WAIT // 1000} µs or more, wrong by {wrong_by}" if len(long) else "none long"
        yield (
            f"{folder.name}: {run.known:.1%} of commands known; {len(real)} waits, predicted within "
            f"{np.median(wrong) / 1e3:.1f} µs, {np.median(wrong / since):.2%} of the time since the wait before; {text}"
        )


def timed(name: str, blocks: int = 300) -> None:
    """Steps with the log, without it, and without it once more as a control, in blocks that take turns."""
    folder = Path(tempfile.mkdtemp())
    assert not (why := hostlog.start(folder)), why
    import torch

    step = PROGRAMS[name]()
    for _ in range(50):
        step()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(20):
        step()
    torch.cuda.synchronize()
    steps = max(3, round(0.02 / (time.perf_counter() - began) * 20))
    order, means, longest = ["logged", "plain", "control"], {"logged": [], "plain": [], "control": []}, 0.0
    for block in range(blocks):
        for which in order[block % 3 :] + order[: block % 3]:
            hostlog.pause(which != "logged")
            torch.cuda.synchronize()
            stamps = [time.perf_counter()]
            for _ in range(steps):
                step()
                stamps.append(time.perf_counter())
            torch.cuda.synchronize()
            means[which].append((time.perf_counter() - stamps[0]) / steps)
            if which == "logged":
                longest = max(longest, *(b - a for a, b in pairwise(stamps)))
    pairs = {
        which: [b / a - 1 for a, b in zip(means["plain"], means[which], strict=True)] for which in ("logged", "control")
    }
    text = ", ".join(
        f"{which} {statistics.median(values):+.2%} (±{1.25 * statistics.stdev(values) / len(values) ** 0.5:.2%})"
        for which, values in pairs.items()
    )
    median = 1e3 * statistics.median(means["plain"])
    print(
        f"{name}: {median:.3f} ms a step, {blocks} blocks of {steps} steps: {text}; longest {1e3 * longest:.1f} ms",
        flush=True,
    )
    shutil.rmtree(folder)


if __name__ == "__main__":
    if "rebuild" not in sys.argv:
        build()
    match sys.argv[1:]:
        case ["one", name, out]:
            one(name, Path(out))
        case ["script", out, path, *arguments]:
            Path(out).mkdir(parents=True)
            script(Path(out), path, arguments)
        case ["complete", out]:
            complete(Path(out))
        case ["rebuild", out]:
            print("medians:")
            for _, ranks in groupby(sorted(Path(out).iterdir()), key=lambda folder: folder.name.rstrip("0123456789")):
                print(*closure([*ranks]), sep="\n")
        case ["cost", name]:
            timed(name)
        case _:
            sys.exit(__doc__)
