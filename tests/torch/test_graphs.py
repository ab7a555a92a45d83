"""CUDA graphs: what is captured runs at each replay, with the values that eager code would have."""

from __future__ import annotations

import copy
import gc
import json
from collections.abc import Callable, Iterator

import pytest
import torch
from graph_asking import AtHand, capture
from torch import nn
from torch.nn import functional as F  # noqa: N812  # its usual name
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from keepbusy.timeline.replay import replay
from keepbusy.virtual.pytorch.randomness import DEFAULTS

STEPS = 4


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each device draws from its own generator; a capture that fails leaves its stream the current one."""
    monkeypatch.setattr(DEFAULTS, "shared", False)
    monkeypatch.setattr(torch.cuda, "default_generators", DEFAULTS.all())
    torch.manual_seed(0)
    yield
    torch.cuda.set_stream(torch.cuda.default_stream())


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.head = nn.Sequential(nn.Dropout(0.3), nn.Linear(8 * 16, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(F.max_pool2d(self.norm(self.convolution(x)).relu(), 2).flatten(1))

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(4, 3, 8, 8), torch.randint(0, 10, (4,))


class Words(nn.Module):
    """Attention and a recurrent layer, both with dropout: operators that are taken whole."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(20, 16), nn.LayerNorm(16)
        self.mixed, self.recurrent = nn.Linear(16, 48), nn.LSTM(16, 16, 2, dropout=0.2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(x)
        query, key, value = (
            one.unflatten(-1, (2, 8)).transpose(1, 2) for one in self.mixed(self.norm(hidden)).chunk(3, -1)
        )
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True, dropout_p=0.1)
        return self.recurrent(hidden + attended.transpose(1, 2).flatten(2))[0].flatten(0, 1)

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randint(0, 20, (2, 6)), torch.randint(0, 16, (12,))


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "momentum": lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9),
    "foreach": lambda weights: torch.optim.Adam(weights, lr=0.01, capturable=True),
    "one by one": lambda weights: torch.optim.AdamW(weights, lr=0.01, capturable=True, foreach=False),
    "fused": lambda weights: torch.optim.AdamW(weights, lr=0.01, capturable=True, fused=True),
}


class Training:
    """One model and its static input, trained by eager steps or by replays."""

    def __init__(self, model: nn.Module, optimizer: str, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
        self.model = copy.deepcopy(model).cuda()
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.x, self.target = (one.cuda() for one in batch)
        self.losses: list[float] = []

    def step(self) -> torch.Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(self.model(self.x), self.target)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def warm_up(self) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self.losses += [self.step().item() for _ in range(3)]
        torch.cuda.current_stream().wait_stream(side)

    def captured(self) -> Callable[[], torch.Tensor]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = self.step()

        def again() -> torch.Tensor:
            graph.replay()
            return loss

        return again

    def go_on(self, step: Callable[[], torch.Tensor], batches: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for x, target in batches:
            self.x.copy_(x)
            self.target.copy_(target)
            self.losses.append(step().item())


def state(training: Training) -> dict[str, torch.Tensor]:
    return {name: value.cpu() for name, value in training.model.state_dict().items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.parametrize(("kind", "optimizer"), [*((Images, name) for name in OPTIMIZERS), (Words, "foreach")])
def test_a_captured_step_trains_as_an_eager_one(kind: type[nn.Module], optimizer: str) -> None:
    """Bit for bit: weights, running means, momenta, random numbers."""
    model, trained = kind(), []
    batches = [model.batch() for _ in range(STEPS)]
    for graphed in (False, True):
        torch.cuda.manual_seed(3)
        training = Training(model, optimizer, batches[0])
        training.warm_up()
        before = state(training)
        step = training.captured() if graphed else training.step
        assert same(state(training), before)  # nothing runs at capture
        training.go_on(step, batches)
        trained.append(training)
    eager, graph = trained
    assert graph.losses == eager.losses
    assert same(state(graph), state(eager))


def test_graphed_callables_train_as_the_modules_do() -> None:
    """PyTorch's own example of capturing a part: a branch that depends on a value lies between the graphs."""
    losses = []
    for graphed in (False, True):
        torch.manual_seed(1)
        first, left, right = nn.Linear(8, 6).cuda(), *(nn.Sequential(nn.Linear(6, 4), nn.Dropout()) for _ in range(2))
        left.cuda(), right.cuda()
        optimizer = torch.optim.SGD([*first.parameters(), *left.parameters(), *right.parameters()], lr=0.1)
        if graphed:
            x, hidden = torch.randn(5, 8, device="cuda"), torch.randn(5, 6, device="cuda", requires_grad=True)
            first = torch.cuda.make_graphed_callables(first, (x,))
            left, right = torch.cuda.make_graphed_callables((left, right), ((hidden,), (hidden,)))
        torch.manual_seed(2)
        mine = []
        for _ in range(6):
            optimizer.zero_grad(set_to_none=True)
            found = first(torch.randn(5, 8).cuda())
            loss = (left if found.sum().item() > 0 else right)(found).pow(2).mean()
            loss.backward()
            optimizer.step()
            mine.append(loss.item())
        losses.append(mine)
    assert losses[0] == losses[1]


def test_a_scaler_steps_beside_the_graph() -> None:
    losses = []
    for graphed in (False, True):
        torch.manual_seed(1)
        model, scaler = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4)).cuda(), torch.amp.GradScaler("cuda")
        optimizer, x = torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(5, 8, device="cuda")

        def forward_and_backward(model=model, scaler=scaler, x=x) -> torch.Tensor:
            with torch.autocast("cuda", cache_enabled=False):
                loss = model(x).pow(2).mean()
            scaler.scale(loss).backward()
            return loss

        mine = []
        for _ in range(2):
            optimizer.zero_grad(set_to_none=True)
            mine.append(forward_and_backward().item())
            scaler.step(optimizer)
            scaler.update()
        if graphed:
            graph = torch.cuda.CUDAGraph()
            optimizer.zero_grad(set_to_none=True)
            with torch.cuda.graph(graph):
                loss = forward_and_backward()
        for _ in range(3):
            x.copy_(torch.randn(5, 8))
            if graphed:
                graph.replay()
            else:
                optimizer.zero_grad(set_to_none=True)
                loss = forward_and_backward()
            scaler.step(optimizer)
            scaler.update()
            mine.append(loss.item())
        losses.append(mine)
    assert losses[0] == losses[1]


def test_recomputed_activations_draw_the_same_numbers() -> None:
    """Checkpointing takes the random state and puts it back, within the capture as well."""
    gradients = []
    for graphed in (False, True):
        torch.manual_seed(1)
        layer, x = nn.Sequential(nn.Linear(8, 8), nn.Dropout()).cuda(), torch.ones(4, 8, device="cuda")

        def step(layer=layer, x=x) -> torch.Tensor:
            found = checkpoint(layer, F.dropout(x).requires_grad_(), use_reentrant=False)
            return torch.autograd.grad(found.pow(2).sum(), layer[0].weight)[0]

        graph = torch.cuda.CUDAGraph()
        if graphed:
            with torch.cuda.graph(graph):
                gradient = step()
        torch.cuda.manual_seed(7)
        mine = []
        for _ in range(3):
            if graphed:
                graph.replay()
            else:
                gradient = step()
            mine.append(gradient.tolist())
        gradients.append(mine)
    assert gradients[0] == gradients[1]


def test_before_the_first_replay_results_hold_nothing() -> None:
    x, graph = torch.ones(3, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, largest = x * 2, x.argmax()
    assert y.isnan().all()
    graph.replay()
    assert (y.tolist(), largest.item()) == ([2.0] * 3, 0)


def test_results_written_into_and_resized() -> None:
    x, graph = torch.ones(3, device="cuda"), torch.cuda.CUDAGraph()
    given, small, grown = torch.zeros(3, device="cuda"), torch.empty(0, device="cuda"), torch.ones(2, device="cuda")
    with torch.cuda.graph(graph):
        torch.mul(x, 2, out=given)
        torch.mul(x, 3, out=small)
        grown.resize_(4).mul_(5)
        inside = torch.empty(3, device="cuda").copy_(given)
    assert given.tolist() == [0.0] * 3
    x.fill_(2)
    graph.replay()
    assert (given.tolist(), small.tolist(), inside.tolist()) == ([4.0] * 3, [6.0] * 3, [4.0] * 3)
    assert grown[:2].tolist() == [5.0, 5.0]


def test_indices_computed_in_the_graph() -> None:
    """On the way to its first replay nothing is looked up at places that are not there."""
    scores, table = torch.tensor([0.0, 1.0, 3.0, 2.0], device="cuda"), torch.arange(8.0, device="cuda").view(4, 2)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        place = torch.empty(1, dtype=torch.int64, device="cuda")
        place.copy_(scores.argmax())
        found = table[place]
        drawn = torch.multinomial(scores.softmax(0), 2)
    graph.replay()
    assert found.tolist() == [[4.0, 5.0]]
    scores.copy_(torch.tensor([9.0, 0.0, 0.0, 0.0]))
    graph.replay()
    assert found.tolist() == [[0.0, 1.0]]
    assert set(drawn.tolist()) <= {0, 1, 2, 3}


def test_views_and_complex_numbers() -> None:
    x, graph = torch.arange(6.0, device="cuda").view(2, 3), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        turned = x.t()[1:].contiguous()
        wave = torch.fft.fft(x).conj().clone()
        x[0].mul_(10)
        x[:, 1] += 1
    assert x.tolist() == [[0, 1, 2], [3, 4, 5]]
    graph.replay()
    assert x.tolist() == [[0, 11, 20], [3, 5, 5]]
    assert turned.tolist() == [[1, 4], [2, 5]]
    assert torch.equal(wave.cpu(), torch.fft.fft(torch.arange(6.0).view(2, 3)).conj())


def test_an_operator_may_give_the_same_result_twice() -> None:
    """As the backward pass of an LSTM's cell: the gradient of what comes in is that of what goes round."""
    torch.manual_seed(0)
    cell, x = nn.LSTMCell(3, 4).cuda(), torch.randn(2, 3).cuda()

    def gradients() -> list[torch.Tensor]:
        cell.zero_grad()
        cell(x)[0].sum().backward()
        return [weight.grad for weight in cell.parameters()]

    expected = [one.clone() for one in gradients()]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = gradients()
    graph.replay()
    assert all(map(torch.equal, expected, found))


def test_a_graph_keeps_what_it_reads_though_the_program_lets_go() -> None:
    """On a GPU that would read memory of somebody else; here it must at least not crash."""
    graph, x = torch.cuda.CUDAGraph(), torch.full((1 << 16,), 3.0, device="cuda")
    with torch.cuda.graph(graph):
        y = x + 1
    gc.collect()
    allocated = torch.cuda.memory_allocated()
    del x
    assert torch.cuda.memory_allocated() == allocated - (1 << 18)
    graph.replay()
    assert y[0].item() == 4


def test_captured_in_inference_mode_and_replayed_outside() -> None:
    model, x, graph = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).cuda().eval(), torch.ones(2, 4).cuda(), None
    with torch.inference_mode():
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = model(x)
            y.add_(1)
    x.fill_(2)
    graph.replay()
    assert torch.equal(y, model(x) + 1)


@pytest.mark.skipif(not hasattr(torch.accelerator, "Graph"), reason="newer than this PyTorch")
def test_the_accelerators_graph() -> None:
    x, side, graph = torch.ones(3, device="cuda"), torch.Stream(), torch.accelerator.Graph()
    with side, graph:
        x += 1
    assert x.tolist() == [1.0] * 3
    graph.replay()
    assert x.tolist() == [2.0] * 3


def test_the_programs_modes_see_nothing_of_a_replay() -> None:
    weight, graph = torch.ones(4, 4, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = weight @ weight
    with FlopCounterMode(display=False) as counted, torch.autocast("cuda", torch.bfloat16), torch.device("cuda"):
        graph.replay()
        assert counted.get_total_flops() == 0
        assert y.dtype == torch.float32
        assert torch.ones(1).is_cuda
        assert (weight @ weight).dtype == torch.bfloat16
        assert counted.get_total_flops() > 0


@pytest.mark.skipif(
    "check_input_liveness" not in torch.cuda.graph.__init__.__code__.co_varnames, reason="newer than this PyTorch"
)
def test_inputs_that_died_are_found_where_that_is_asked_for() -> None:
    x, gone, graph = torch.ones(4, device="cuda"), torch.ones(4, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, check_input_liveness=True):
        y = x + gone
    graph.replay()
    assert y[0].item() == 2
    del gone
    with pytest.raises(RuntimeError, match="1 dead tensor"):
        graph.replay()


def test_an_error_says_which_call_it_was() -> None:
    at = AtHand()
    at.graph.register_generator_state(at.generator)
    torch.cuda.set_stream(at.side)
    at.graph.capture_begin()
    with pytest.raises(torch.AcceleratorError, match="The call was cudaStreamSynchronize") as refused:
        at.x.sum().item()
    assert refused.value.error_code == 900
    with pytest.raises(torch.AcceleratorError, match="previous error during capture"):
        at.graph.capture_end()


def test_what_a_failed_capture_did_is_undone() -> None:
    x, random = torch.ones(3, device="cuda"), torch.cuda.get_rng_state()

    def body() -> None:
        x.add_(1)
        x.mul_(torch.rand(3, device="cuda"))
        x.sum().item()

    assert "not permitted" in capture(body)[0]
    assert x.tolist() == [1.0] * 3
    assert torch.equal(torch.cuda.get_rng_state(), random)


def test_a_graph_may_go_in_a_process_that_has_another_memory(machine) -> None:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.ones(3, device="cuda")
    machine._begin()  # as a forked process does
    graph.reset()
    assert machine.memory.stats()["active_bytes.all.current"] == 0


def external_within_a_capture() -> None:
    event = torch.cuda.Event(external=True)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        event.record()


def old_state_within_a_capture() -> None:
    state = torch.cuda.get_rng_state()
    torch.rand(1, device="cuda")
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        torch.cuda.set_rng_state(state)


@pytest.mark.parametrize(
    ("does", "what"),
    [
        (lambda graph: torch.cuda.CUDAGraph(keep_graph=True).raw_cuda_graph(), "no cudaGraph_t behind a CUDAGraph"),
        (lambda graph: graph.begin_capture_to_if_node(None), "no conditional nodes in CUDA graphs"),
        (lambda graph: torch.Generator("cuda").graphsafe_get_state(), "no graph-safe random states"),
        (lambda graph: external_within_a_capture(), "no external events within CUDA graphs"),
        (lambda graph: old_state_within_a_capture(), "a random state from before it"),
    ],
)
def test_what_is_missing_is_refused_by_name(does, what: str) -> None:
    with pytest.raises(NotImplementedError, match=what):
        does(torch.cuda.CUDAGraph())


def test_the_timeline_replays_to_itself(machine) -> None:
    timeline = machine.clock.timeline()
    again = replay(timeline)
    assert (again.spans.start == timeline.spans.start).all()
    assert (again.spans.end == timeline.spans.end).all()


LOOP = """\
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(20))).cuda()
optimizer = torch.optim.AdamW(model.parameters(), capturable=True)
x = torch.randn(8, 32, device="cuda")

def step():
    optimizer.zero_grad(set_to_none=False)
    loss = model(x).pow(2).mean()
    loss.backward()
    optimizer.step()
    return loss

side = torch.cuda.Stream()
with torch.cuda.stream(side):
    for _ in range(3):
        step()
torch.cuda.current_stream().wait_stream(side)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    loss = step()
for _ in range(12):
    x.copy_(torch.randn(8, 32).pin_memory(), non_blocking=True)
    graph.replay()
print(loss.item() < 1)
"""


@pytest.mark.parametrize("values", ["real", "none"])
def test_the_report_is_about_the_loop_of_replays(run, values: str) -> None:
    done = run(LOOP, before=("--clock", "modelled", "--values", values, "--json"))
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.partition("\n")[2] if done.stdout.startswith("True") else done.stdout)
    assert said["steps"] == 11
    assert said["plain_step"] < 1


RANKS = """\
import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("nccl")
rank = dist.get_rank()
torch.cuda.set_device(rank)
x = torch.ones(4, device="cuda")
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    y = x * 2
    dist.all_reduce(y)
    z = y + 1
for value in (1.0, 5.0):
    x.fill_(value + rank)
    graph.replay()
    assert z.tolist() == [2 * (2 * value + 1) + 1] * 4, z

def train(graphed):
    torch.manual_seed(0)
    side, x = torch.cuda.Stream(), torch.ones(8, 16, device="cuda")
    with torch.cuda.stream(side):
        model = DistributedDataParallel(torch.nn.Linear(16, 4).cuda(), device_ids=[rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        optimizer.zero_grad(set_to_none=True)
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        return loss

    with torch.cuda.stream(side):
        for _ in range(11):
            step()
    torch.cuda.current_stream().wait_stream(side)
    if graphed:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = step()
    losses = []
    for number in range(4):
        x.fill_(rank + number * 0.1)
        if graphed:
            graph.replay()
        else:
            loss = step()
        losses.append(loss.item())
    return losses

assert train(False) == train(True)
os.write(1, b"fine %d" % rank + bytes([10]))
dist.destroy_process_group()
"""


def test_collectives_in_a_graph(run) -> None:
    done = run(RANKS, before=("--clock", "modelled", "--ranks", "2"))
    assert done.returncode == 0, done.stderr
    assert {"fine 0", "fine 1"} <= set(done.stdout.splitlines())
