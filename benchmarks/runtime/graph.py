"""`keepbusy.graph` against the eager loop, `torch.compile(mode="reduce-overhead")` and `make_graphed_callables`.

    python benchmarks/runtime/graph.py [--out FILE] [--small]      (needs a GPU)

Every contender trains the same model on the same batches, which lie on the device already, and takes turns with the
others. `bound` is what the device needs for one replay of the whole step in which the host plays no part.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from keepbusy.runtime.graph.graphed_step import graph

Step = Callable[[Tensor, Tensor], Tensor]
Contender = Callable[[dict[str, int]], tuple[Step, list[tuple[Tensor, Tensor]]]]
REPEATS = 7
CASES = {
    "launch-bound": {"width": 256, "layers": 4, "batch": 8, "length": 128, "steps": 60},
    "GPU-bound": {"width": 2048, "layers": 2, "batch": 16, "length": 1024, "steps": 8},
}
SMALL = {"width": 32, "layers": 2, "batch": 2, "length": 16, "steps": 3}


class Text(nn.Module):
    """PyTorch's own transformer layers, and a token to predict at each place."""

    def __init__(self, width: int, layers: int, words: int = 8192) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, max(4, width // 64), 4 * width, 0.0, "gelu", batch_first=True)
        self.body = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.embed, self.head = nn.Embedding(words, width), nn.Linear(width, words)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.body(self.embed(tokens))).flatten(0, 1)


def made(case: dict[str, int]) -> tuple[Text, torch.optim.Optimizer, list[tuple[Tensor, Tensor]]]:
    torch.manual_seed(0)
    model = Text(case["width"], case["layers"]).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-4, device="cuda"), fused=True, capturable=True)
    shape = (case["batch"], case["length"])
    batches = [(torch.randint(8192, shape).cuda(), torch.randint(8192, shape).flatten().cuda()) for _ in range(8)]
    return model, optimizer, batches


def training(model: Callable[[Tensor], Tensor], optimizer: torch.optim.Optimizer, cache: bool = True) -> Step:
    def step(x: Tensor, y: Tensor) -> Tensor:
        x, y = x.to("cuda", non_blocking=True), y.to("cuda", non_blocking=True)  # nothing, except in `from_host`
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16, cache_enabled=cache):
            loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return step


def eager(case: dict[str, int]) -> tuple[Step, list[tuple[Tensor, Tensor]]]:
    model, optimizer, batches = made(case)
    return training(model, optimizer), batches


def graphed(case: dict[str, int]) -> tuple[Step, list[tuple[Tensor, Tensor]]]:
    step, batches = eager(case)
    return graph(step), batches


def compiled(case: dict[str, int]) -> tuple[Step, list[tuple[Tensor, Tensor]]]:
    model, optimizer, batches = made(case)
    step = training(torch.compile(model, mode="reduce-overhead"), optimizer)

    def marked(x: Tensor, y: Tensor) -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        return step(x, y)

    return marked, batches


def callables(case: dict[str, int]) -> tuple[Step, list[tuple[Tensor, Tensor]]]:
    model, optimizer, batches = made(case)
    with torch.autocast("cuda", dtype=torch.bfloat16, cache_enabled=False):
        model = torch.cuda.make_graphed_callables(model, (batches[0][0],))
    return training(model, optimizer, cache=False), batches


def from_host(case: dict[str, int]) -> tuple[Step, list[tuple[Tensor, Tensor]]]:
    """The batches lie in pinned memory of the host, and `graph` brings them."""
    step, batches = graphed(case)
    return step, [(x.cpu().pin_memory(), y.cpu().pin_memory()) for x, y in batches]


HOST, COMPILED = "keepbusy.graph, batches of the host", "reduce-overhead"
CONTENDERS = {
    "eager": eager,
    "keepbusy.graph": graphed,
    HOST: from_host,
    COMPILED: compiled,
    "make_graphed_callables": callables,
}


def in_turn(batches: list[tuple[Tensor, Tensor]], count: int) -> Iterator[tuple[Tensor, Tensor]]:
    for number in range(count):
        yield batches[number % len(batches)]


def set_up(contender: Contender, case: dict[str, int]) -> dict[str, object]:
    """From nothing to the fifth step: warming up, compiling and capturing are in it."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    step, batches = contender(case)
    losses = [step(x, y).detach().clone() for x, y in in_turn(batches, 6)]
    torch.cuda.synchronize()
    return {"step": step, "batches": batches, "seconds": time.perf_counter() - began, "loss": losses[-1].item()}


def timed(one: dict[str, object], count: int) -> tuple[float, float]:
    """Milliseconds a step, and of the host's time in it."""
    step = one["step"]
    torch.cuda.synchronize()
    began = time.perf_counter()
    for x, y in in_turn(one["batches"], count):
        step(x, y)
    enqueued = time.perf_counter()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / count * 1e3, (enqueued - began) / count * 1e3


def bound(case: dict[str, int]) -> float:
    """A bare replay, enqueued behind a kernel that spins until it stands there whole."""
    step, batches = eager(case)
    side, captured = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(side):
        for x, y in in_turn(batches, 3):
            step(x, y)
    torch.cuda.synchronize()
    with torch.cuda.graph(captured, stream=side):
        step(*batches[0])
    found = []
    for _ in range(REPEATS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(20_000_000)
        start.record()
        captured.replay()
        end.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(end))
    return statistics.median(found)


def measured(case: dict[str, int], names: list[str]) -> dict[str, object]:
    ready = {name: set_up(CONTENDERS[name], case) for name in names}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in ready}
    for _ in range(REPEATS):
        for name, one in ready.items():
            times[name].append(timed(one, case["steps"]))
    return {name: row(one, times[name]) for name, one in ready.items()} | {"bound": {"ms": bound(case)}}


def row(one: dict[str, object], times: list[tuple[float, float]]) -> dict[str, object]:
    steps, host = [first for first, _ in times], [second for _, second in times]
    return {
        "ms": statistics.median(steps),
        "low": min(steps),
        "high": max(steps),
        "host_ms": statistics.median(host),
        "set_up_s": one["seconds"],
        "loss": one["loss"],
        "report": one["step"].report() if hasattr(one["step"], "report") else "",
    }


def in_a_process(case: str, names: list[str], options: argparse.Namespace) -> dict[str, object]:
    """Compiled code changes the state of its process, so it gets one with an eager loop of its own."""
    command = [sys.executable, "-X", "faulthandler", __file__, "--case", case, "--contenders", *names]
    finished = subprocess.run(
        command + ["--small"] * options.small, capture_output=True, text=True, timeout=options.timeout, check=False
    )
    if finished.returncode:
        return {"failed": f"exit code {finished.returncode}", "stderr": finished.stderr[-4000:]}
    return json.loads(finished.stdout.splitlines()[-1])


def table(case: str, found: dict[str, dict]) -> str:
    if "failed" in found:
        return f"{case}: {found['failed']}\n{found['stderr']}"
    lines = [f"{case}: the device needs {found['bound']['ms']:.3f} ms a step"]
    for name, one in found.items():
        if name != "bound":
            lines.append(
                f"  {name:38} {one['ms']:8.3f} ms ({one['low']:.3f}-{one['high']:.3f}), host {one['host_ms']:.3f} ms, "
                f"set up {one['set_up_s']:.1f} s, sixth loss {one['loss']:.5f}  {one['report']}"
            )
    return "\n".join(lines)


def everything(options: argparse.Namespace) -> None:
    found: dict[str, object] = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    for names in (["eager", "keepbusy.graph", HOST, "make_graphed_callables"], ["eager", "keepbusy.graph", COMPILED]):
        for case in CASES:
            try:
                found[f"{case}: {', '.join(names)}"] = one = in_a_process(case, names, options)
            except subprocess.TimeoutExpired:
                one = {"failed": f"not done within {options.timeout} s", "stderr": ""}
            print(table(case, one), flush=True)
            if options.out:
                options.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--out", type=Path)
    arguments.add_argument("--small", action="store_true", help="sizes that a virtual GPU can bear")
    arguments.add_argument("--timeout", type=int, default=60, help="seconds that each of four processes may take")
    arguments.add_argument("--case", choices=CASES)
    arguments.add_argument("--contenders", nargs="+", choices=CONTENDERS)
    options = arguments.parse_args()
    if options.case:
        warnings.filterwarnings("ignore")
        case = SMALL if options.small else CASES[options.case]
        print(json.dumps(measured(case, options.contenders)))
    else:
        everything(options)
