"""A program with its fixes finds what it finds without them, to the last bit; and the fixes were at work."""

from __future__ import annotations

import builtins
import gc
import json
import sys
import threading
import weakref
from dataclasses import replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import fix_programs
import late_gradients_ranks
import pytest
import torch
from fix_programs import fixed, found_by
from torch import nn
from torch.utils.data import DataLoader
from warm_python import warm

from keepbusy.explain.diagnosis import PlannedFix, Prediction, Where
from keepbusy.fix.graph import graphed_modules
from keepbusy.fix.live.host_numbers import DrawsAhead
from keepbusy.fix.live.host_waits import QuickCollection
from keepbusy.fix.live.late_gradients import LateGradients
from keepbusy.fix.live.live_fixes import ASKED, LiveFixes, chosen, foretold
from keepbusy.fix.live.more_workers import FedLoop, MoreWorkers
from keepbusy.fix.live.switch import FixSwitch
from keepbusy.fix.live.trial import FixTrial, TrialResult
from keepbusy.instrument.patches import Patches, left_alone
from keepbusy.timeline.files import BadInput


@pytest.fixture(autouse=True)
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.cuda.reset_peak_memory_stats()  # of a test that filled the device, which leaves no room for graphs
    standing, serves = set(threading.enumerate()), graphed_modules._serves_batches  # threads that a browser left behind
    monkeypatch.setattr(graphed_modules, "_serves_batches", lambda one: one in standing or serves(one))
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(4))
    busy = staticmethod(lambda _: False)  # that a program this small waits for nothing is no reason to leave it alone
    monkeypatch.setattr("keepbusy.fix.live.host_waits.DeferredCopies._is_idle", busy)
    monkeypatch.setattr(
        "torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.2
    )  # seconds for a worker to end by itself


DONE = (
    ("one buffer for all batches", "copies", 5),
    ("batches kept in a list", "copies", 3),
    ("copy_ into what is in use", "copies", 6),
    ("moved in one expression", "copies", 180),
    ("new tensors from lists", "copies", 5),
    ("the host's batch is kept, read and changed once it was moved", "copies", 30),
    ("pinned, and changed once it was moved", "copies", 15),
    ("streams of its own in the middle", "copies", 0),
    ("workers that persist, and draw", "workers", 0),
    ("summed", "late_numbers", 3),
    ("kept in a list", "late_numbers", 3),
    ("the tensor changes after it was read", "late_numbers", 10),
    ("decides now and then", "late_numbers", 40),
    ("decides what happens next", "late_numbers", 0),
    ("closures and inner functions see it", "late_numbers", 0),
    ("a global name that a function reads", "late_numbers", 0),
    ("locals and eval look", "late_numbers", 0),
    ("a list that others hold", "late_numbers", 0),
    ("a list handed over while the loop runs", "late_numbers", 0),
    ("gradient norms by hand", "late_numbers", 9),
    ("weights taken home, and changed by the next step", "late_numbers", 6),
    ("outputs kept in a list, and their tensor changed in place", "late_numbers", 6),
    ("masks made small at home", "late_numbers", 5),
    ("a gradient that would flow home", "late_numbers", 0),
    ("what cannot become an array", "late_numbers", 0),
    ("numbers in places of a list", "late_numbers", 18),
    ("handed on", "late_numbers", 9),
    ("running means, and numbers made of one another", "late_numbers", 285),
    ("a list that is a row of another", "late_numbers", 0),
    ("times of the device", "late_numbers", 6),
    ("synchronized for nobody", "syncs", 24),
    ("copied home without waiting, and then waited for", "syncs", 0),
    ("pinned memory that is filled again after waiting", "syncs", 0),
    ("memory given back in the loop", "cache", 3),
    ("memory given back in the loop", "garbage", 1),
    ("streams of its own in the middle", "late_numbers", 8),
    ("averages and steps by hand", "foreach", 16),
    ("state by names, of several types", "foreach", 6),
    ("tensors that share memory, in loops", "foreach", 27),
    ("changed and read in one loop", "foreach", 0),
    ("names that are looked at after a loop", "foreach", 0),
    ("errors in the middle of a loop", "foreach", 0),
    ("twenty-four plain turns", "graph", 15),
    ("in a function that is called again", "graph", 18),
    ("a step of its own, in a class", "graph", 15),
    ("a number of a configuration that changes", "graph", 9),
    ("a number in a dictionary, of a list and behind another name", "graph", 9),
    ("a number of a class, and a function that is replaced", "graph", 27),
    ("a hook that comes later", "graph", 6),
    ("hooks on gradients", "graph", 6),
    ("prints, counts and lists in a forward pass", "graph", 2),
    ("an attribute written in a forward pass", "graph", 13),
    ("random numbers of Python, of NumPy and of generators", "graph", 9),
    ("what comes next of an iterator", "graph", 13),
    ("a result that shows how it was made", "graph", 15),
    ("gradients that are kept over turns", "graph", 15),
    ("gradients that add up over micro-batches, of many shapes", "graph", 9),
    ("results that are kept, and changed", "graph", 15),
    ("a second way back through what came out", "graph", 18),
    ("a step whose result its callers look at, in a function within another", "graph", 30),
    ("a step whose result somebody keeps", "graph", 15),
    ("two networks that train each other", "graph", 64),
    ("the way back alone", "graph", 15),
    ("two threads that train", "graph", 0),
    ("weights stepped by hand", "graph", 15),
    ("weights that are replaced, frozen and loaded", "graph", 21),
    ("an optimizer restored in the middle, and a schedule", "graph", 21),
    ("batch statistics", "graph", 15),
    ("mixed precision and a scaler", "graph", 31),
    ("plain tensors whose gradients add up", "graph", 0),
    ("a backward pass of its own", "graph", 15),
    ("a number of the file, of a function around and by default", "graph", 28),
    ("an error while it is watched", "graph", 9),
    ("loops over objects with numbers", "graph", 13),
    ("dropout that is turned up, and evaluation in between", "graph", 9),
    ("a state that goes from turn to turn", "graph", 15),
    ("plain tensors as weights", "graph", 0),
    ("errors in a forward pass", "graph", 6),
    ("layers by chance and by turn", "graph", 3),
    ("settings of PyTorch and seeds", "graph", 15),
    ("a gradient of gradients, later", "graph", 9),
    ("back twice, with leave and without", "graph", 16),
    ("a weight changed before the way back", "graph", 15),
    ("gradients of what goes in, by another call", "graph", 15),
    ("several results, of which some are used", "graph", 21),
    ("copies of a network, and one that is saved and loaded", "graph", 30),
    ("forward passes that nobody goes back through", "graph", 1),
    ("a loss over two turns", "graph", 6),
    ("weights that are shared, and punished outside", "graph", 18),
    ("other weights in its place, and a forward pass that is replaced", "graph", 5),
    ("what it keeps for the way back lies on the host", "graph", 9),
    ("weights made of others", "graph", 15),
    ("parts of a module that reads on the host", "graph", 36),
    ("lines that do not run, and some that do later", "graph", 31),
    ("batch statistics of several calls, gone back through together", "graph", 41),
    ("inside of a longer loop with breaks", "graph", 33),
    ("loops over what autograd, hooks and subclasses see", "foreach", 9),
    ("generators of its own", "workers", 0),
    ("counts its samples", "workers", 0),
    ("a global count", "workers", 0),
    ("an open file", "workers", 0),
    ("its seeds drawn by the GPU", "workers", 0),
)
"""How often a fix does something in a program, where nothing is tried; 0 where it must not."""
WORKED = {
    "the same shapes turn after turn": "draws",
    **dict.fromkeys(("samples that take long", "one worker, shuffled", "types of batches"), "workers"),
}
"""What does something in any case; how often depends on the machine."""


@pytest.mark.parametrize("name", fix_programs.PROGRAMS)
def test_the_result_is_the_same(name: str, tmp_path: Path) -> None:
    """Where it is known what is to be done, without a trial; tests/gpu has a trial in all of them."""
    source, path = fix_programs.HEAD + fix_programs.PROGRAMS[name], tmp_path / "train.py"
    expected, known = found_by(source, path), {fix: times for one, fix, times in DONE if one == name}
    assert expected != "[]"
    found, fixes = fixed(source, path, tried=not known and name not in WORKED)
    assert found == expected
    assert not any(one.off_because.startswith("a ") for one in fixes.switches)
    done = {one.name: one.done.total() for one in fixes.switches}
    assert {fix: done[fix] for fix in known} == known
    assert name not in WORKED or done[WORKED[name]] > 10


def test_a_fix_can_be_left_out() -> None:
    assert "copies" not in chosen(without=["copies"])
    assert not set(ASKED) & set(chosen())
    with pytest.raises(BadInput, match=r"^Unknown fix 'speed'\. Known fixes: copies, "):
        chosen(without=["speed"])


def test_what_goes_outside_of_the_loop_goes_at_its_own_collection() -> None:
    """As a model after its training, which is made of cycles: only what is called in each turn looks at new objects."""
    turn, patches = [0], Patches()
    fix = QuickCollection(lambda: turn[0])
    fix.patch(patches)
    fix.switch.on = True
    model = Node()
    try:
        for _ in range(4):
            turn[0] += 1
            gc.collect()
        assert sum(fix.switch.done.values()) == 2  # after the first of the loop, and the one that looks at all
        seen = weakref.ref(model)
        del model
        gc.collect()
        assert seen() is None
    finally:
        patches.undo()


class Node:
    def __init__(self) -> None:
        self.itself = self


def test_everything_is_put_back(tmp_path: Path) -> None:
    before = torch.Tensor.to, torch.Tensor.copy_, torch.tensor, torch.cuda.empty_cache, gc.collect
    fixed("found = [1]", tmp_path / "train.py")
    assert (torch.Tensor.to, torch.Tensor.copy_, torch.tensor, torch.cuda.empty_cache, gc.collect) == before
    assert not hasattr(builtins, "__keepbusy_late__")


@pytest.mark.parametrize("name", ["rand", "randn", "randint", "randperm", "normal"])
def test_draws_are_left_alone_where_the_device_draws_them(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `torch.set_default_tensor_type` has it, of which `torch.get_default_device` tells nothing."""
    given = {"randint": (9, (4, 4)), "randperm": (16,), "normal": (0.0, 1.0, (4, 4))}.get(name, (4, 4))
    plain = getattr(torch, name)
    monkeypatch.setattr(torch, name, lambda *given, **options: plain(*given, **{"device": "cuda", **options}))
    monkeypatch.setattr(torch._C, "_get_default_device", lambda: "cuda")
    monkeypatch.setattr("keepbusy.fix.live.host_numbers._SHORTEST_DRAW", 0)
    draws, patches = DrawsAhead(), Patches()
    draws.patch(patches)
    draws.switch.on = True
    try:
        for _ in range(12):
            assert getattr(torch, name)(*given).is_cuda
    finally:
        patches.undo()
    assert not draws.switch.done


def test_a_draw_that_fails_ahead_is_made_by_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keepbusy.fix.live.host_numbers._SHORTEST_DRAW", 0)
    draws, patches, plain = DrawsAhead(), Patches(), torch.randn

    def failing(*given: int, **options: Any) -> torch.Tensor:
        if "generator" in options:
            raise RuntimeError
        return plain(*given, **options)

    monkeypatch.setattr(torch, "randn", failing)
    draws.patch(patches)
    draws.switch.on = True
    try:
        assert all(torch.randn(4, 4).shape == (4, 4) for _ in range(12))
    finally:
        patches.undo()


def test_no_operator_passes_through_the_fixes() -> None:
    """What has nothing to be fixed costs what it did: only the end of a turn is looked at."""
    net, x = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)).cuda(), torch.ones(2, 4, device="cuda")
    fixes, optimizer, called = LiveFixes(chosen()), torch.optim.SGD(net.parameters(), momentum=0.9), set[str]()

    def see(frame: Any, event: str, _: Any) -> None:
        if event == "call" and "/keepbusy/fix/" in frame.f_code.co_filename:
            called.add(frame.f_code.co_name)

    fixes.begin()
    try:
        for turn in range(120):
            optimizer.zero_grad()
            nn.functional.mse_loss(net(x), x).backward()
            optimizer.step()
            (x.mul(2).add_(1).view(4, 2)[0] @ x.view(2, 4)).clamp_(0, 1).sum()
            if turn == 110:  # by when it is known which modules there are, and that they are too small
                sys.setprofile(see)
    finally:
        sys.setprofile(None)
        fixes.end()
    # `_comes` is a garbage collection, which may come at any time
    assert called - {"<lambda>", "_trained", "turn", "end", "backward", "is_ours", "_comes"} == set()


def test_a_copy_that_would_wait_for_nothing_is_made_as_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # of what makes every GPU seem busy
    fixes, x = LiveFixes(("copies",), tried=False), torch.ones(100, 100)
    small = torch.zeros(1, device="cuda")
    fixes.begin()
    try:
        for waits in range(3):
            torch.cuda.synchronize()
            for _ in range(waits):
                torch.cuda._sleep(10**9)
            assert x.to("cuda").sum().item() == 10_000
    finally:
        fixes.end()
    assert small.item() == 0
    assert fixes.switches[0].done.total() == 2


def test_what_is_left_alone_is_not_compiled_where_a_compiled_function_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs, patches = list[int](), Patches()

    def counted(graph: Any, _: Any) -> Any:
        graphs.append(len([one for one in graph.graph.nodes if one.op.startswith("call")]))
        return graph.forward

    def inner(x: torch.Tensor) -> torch.Tensor:
        return x.add(1).mul(2)

    @left_alone
    def seen(x: torch.Tensor) -> torch.Tensor:
        return inner(x).sub(3)

    LateGradients().patch(patches)
    asked: Any = torch.Tensor.grad.__get__.__self__  # type: ignore[attr-defined]
    try:
        assert (asked.__objclass__, asked.__name__) == (torch._C._TensorBase, "grad")  # as PyTorch 2.11 wants to know
        compiled = torch._dynamo.optimize(counted)(lambda x: (torch._dynamo.graph_break(), seen(x.add(5)).div(2))[1])
        assert compiled(torch.ones(2)).tolist() == [5.5, 5.5]
        leaf = torch.ones(2, requires_grad=True)
        torch._dynamo.optimize(counted)(lambda x: x.mul(3))(leaf).backward(torch.ones(2))
        assert leaf.grad is not None
    finally:
        patches.undo()
    assert graphs == [1, 1, 1]


def test_the_report_says_what_was_done_and_what_it_saved(tmp_path: Path) -> None:
    source = fix_programs.HEAD + fix_programs.PROGRAMS["many turns, with a trial in between"]
    told = fixed(source, tmp_path / "train.py")[1].told()
    assert "copies" in told
    assert "done both ways, all the same" in told
    assert "s per iteration, " in told
    assert told.endswith(", alternately")


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("x = torch.zeros(2, device='cuda')\n", "no fix was made"),
        (
            "net = model(); optimizer = sgd(net)\n"
            "for x, y in DataLoader(Rows(), batch_size=2):\n"
            "    train(net, x.to('cuda'), y.cuda(), optimizer)\n",
            "3 iterations are too few; a comparison needs 44 more",
        ),
    ],
)
def test_why_nothing_was_measured_is_said(source: str, why: str, tmp_path: Path) -> None:
    told = fixed(fix_programs.HEAD + source, tmp_path / "train.py")[1].told()
    assert f"saved         not measured: {why}\n" in f"{told}\n"


def test_a_program_that_only_infers_has_turns_too(tmp_path: Path) -> None:
    source = fix_programs.HEAD + fix_programs.PROGRAMS["a model that only infers"]
    fixes = fixed(source, tmp_path / "infer.py")[1]
    told = fixes.told()
    assert fixes.trial is not None
    assert 78 <= fixes.trial.turns <= 80, "a read is one turn, whether it is put off or not"
    assert "not measured" not in told
    assert " per iteration, " in told


def test_what_was_tried_before_the_training_says_nothing_of_it(tmp_path: Path) -> None:
    source = fix_programs.HEAD + fix_programs.PROGRAMS["validated before it is trained"]
    _, fixes = fixed(source, tmp_path / "train.py")
    assert fixes.trial is not None
    assert fixes.trial.turns == 8
    assert fixes.result is None
    assert not any(one.off_because for one in fixes.switches)


def planned(fix: str, gain: int, path: Path, line: int) -> PlannedFix:
    return PlannedFix(fix, (Where(str(path), line),), ("host_sync",), gain, Prediction(1, 1, 1), gain)


def test_what_was_predicted_stands_beside_what_was_measured(tmp_path: Path) -> None:
    fixes = LiveFixes(("cache", "copies"))
    cache, copies = fixes.switches = [FixSwitch("cache", "calls"), FixSwitch("copies", "copies")]
    path, fixes.trial = tmp_path / "train.py", FixTrial()
    cache.done[str(path), 3] += 1
    copies.done[str(path), 4] += 1
    cache.saved, copies.saved = 2_800_000, -5
    fixes.result = TrialResult([9_000_000], [6_000_000], range(3))
    told = fixes.told(
        (
            planned("keep_memory", 3_100_000, path, 3),
            planned("keep_memory", 1_000_000, path, 9),  # elsewhere
            planned("prefetch", 500_000, path, 4),
            planned("graph", 700_000, path, 4),  # nobody's here
        )
    )
    assert "predicted 3.1 ms per iteration, measured 2.8 ms\n" in told
    assert "predicted 500 µs per iteration, measured nothing\n" in told
    assert told.endswith("predicted 3.6 ms per iteration in total, measured 3.0 ms")


def test_where_nothing_is_saved_the_plan_says_what_is_left_to_the_author(tmp_path: Path) -> None:
    fixes, path = LiveFixes(("cache", "copies")), tmp_path / "train.py"
    fixes.switches, fixes.trial = [FixSwitch("cache", "calls"), FixSwitch("copies", "copies")], FixTrial()
    copies = fixes.switches[1]
    copies.done[str(path), 4] += 1
    plan = (planned("prefetch", 500_000, path, 4), replace(planned("graph", 700_000, path, 9), advice="capture it"))
    assert "by hand" not in fixes.told(plan)
    copies.stop("it saved nothing here")
    told = fixes.told(plan)
    assert "no fix that helps here is safe to apply while the program runs\n" in told
    assert told.endswith(f"first fix to make by hand: graph at {path}:9: capture it")
    assert fixes.told().endswith("`keepbusy run` lists the fixes to make by hand")


def test_a_difference_within_the_noise_is_no_saving(tmp_path: Path) -> None:
    """The medians differ by 12%, and the turns of one kind by more: it was switched off, for it saved nothing."""
    fixes, path = LiveFixes(("copies",)), tmp_path / "train.py"
    [copies] = fixes.switches = [FixSwitch("copies", "copies")]
    fixes.trial = FixTrial()
    copies.done[str(path), 4] += 1
    plain, fixed = [27_300_000, 31_000_000, 32_400_000, 55_800_000], [27_600_000, 27_700_000, 28_100_000, 62_400_000]
    fixes.result = TrialResult([*plain, 28_000_000, 33_000_000], [*fixed, 27_900_000, 60_000_000], range(3))
    assert not fixes.result.stands_out
    copies.saved = fixes.result.saved
    copies.stop("it saved nothing here")
    told = fixes.told((planned("prefetch", 500_000, path, 4),))
    assert "% shorter" not in told
    assert "saved         nothing above the noise: 31.7 → 28.0 ms per iteration\n" in told
    assert "without 27.3 ms to 55.8 ms, with 27.6 ms to 62.4 ms, alternately\n" in told
    assert "predicted 500 µs per iteration, measured nothing above the noise\n" in told
    assert "predicted 500 µs per iteration in total, measured nothing above the noise\n" in told


def test_what_two_fixes_are_for_is_foretold_once(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    draws, copies = FixSwitch("draws", "draws"), FixSwitch("copies", "copies")
    plan = (planned("make_on_device", 700_000, path, 3), planned("prefetch", 500_000, path, 3))
    assert foretold(plan, draws, copies) is None
    draws.done[str(path), 3] += 1
    copies.done[str(path), 3] += 1
    assert [foretold(plan, draws), foretold(plan, copies)] == [700_000, 1_200_000]
    assert foretold(plan, draws, copies) == 1_200_000


def test_without_a_gpu_the_lines_that_are_put_off_are_run_as_they_stand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    source = """
import torch
def run():
    sums, kept, total = [0.0] * 2, [], 0
    for step in range(4):
        x = torch.full((), float(step)); sums[step % 2] += x.item(); kept.append(x.item()); total += x.item()
        last = {"x": x.cpu()}; value = x.item()
    return sums, kept, total, value
found = run()
"""
    assert fixed(source, tmp_path / "train.py")[0] == "([2.0, 4.0], [0.0, 1.0, 2.0, 3.0], 6.0, 3.0)"


def test_two_optimizers_in_one_turn_are_one_turn() -> None:
    fixes = LiveFixes(("cache",))
    fixes.trial = FixTrial()
    critic, maker = (torch.optim.SGD(nn.Linear(1, 1).parameters()) for _ in range(2))
    for optimizer in (critic, maker, critic, maker, critic, critic, critic, maker):
        fixes._trained(optimizer)
    assert fixes.trial.turns == 5


def test_chance_alone_seldom_stands_out() -> None:
    """Of all the ways in which eight equal blocks may come to be longer or shorter, fewer than one in twenty does."""
    orders = [TrialResult([*plain], [*{*range(8)} - {*plain}], range(3)) for plain in combinations(range(8), 4)]
    assert sum(one.stands_out for one in orders) < 0.05 * len(orders)
    assert any(one.stands_out for one in orders)


def test_what_does_not_stand_out_of_a_busy_machine_is_no_gain() -> None:
    noisy = TrialResult([21_500, 32_000, 31_000, 28_000], [22_900, 32_600, 29_000, 24_000], range(3))
    assert noisy.gain > 0.1
    assert not noisy.stands_out
    assert TrialResult([21_500, 32_000, 31_000, 28_000], [20_900, 21_000, 22_000, 20_000], range(3)).stands_out


def test_a_fix_that_costs_is_switched_off_alone() -> None:
    fixes = LiveFixes(("cache", "copies"))
    helps, costs = fixes.switches = [FixSwitch("cache", "calls"), FixSwitch("copies", "copies")]
    fixes.trial = FixTrial()
    small = torch.zeros(1, device="cuda")
    fixes.trial.compare(partial(fixes._switch, fixes.switches), fixes._judge)
    for _ in range(140):
        for one in fixes.switches:
            if one.on:
                one.count()
        for _ in range(80 - 40 * helps.on + 20 * costs.on):
            small.add_(1)
        fixes.trial.turn()
    assert helps.on
    assert not helps.off_because
    assert not costs.on
    assert costs.off_because.startswith("an iteration took ")
    assert fixes.result is not None
    assert 0.1 < fixes.result.gain < 0.5
    assert "alone it saves " in fixes.told()


FUSED = """
net = model(); optimizer = torch.optim.{kind}(net.parameters(), lr=1e-3, weight_decay=0.1)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
for x, y in DataLoader(Rows(), batch_size=1):
    found.append(train(net, x.cuda(), y.cuda(), optimizer).item()); schedule.step()
found = torch.tensor(found)
"""


def fused(kind: str, folder: Path, also: tuple[str, ...]) -> tuple[dict[str, Any], LiveFixes]:
    source, held = fix_programs.HEAD + FUSED.format(kind=kind), dict[str, Any](__name__="__main__")
    fixes = LiveFixes(chosen(also=also))
    fixes.begin()
    try:
        exec(fixes.compile(source.encode(), str(folder / "train.py")), held)
    finally:
        fixes.end()
    return held, fixes


@pytest.mark.parametrize("kind", ["Adam", "AdamW", "SGD", "Adagrad"])
def test_fused_optimizers_stay_within_their_tolerance(kind: str, tmp_path: Path) -> None:
    plain, (held, fixes) = fused(kind, tmp_path, ())[0], fused(kind, tmp_path, ("fused",))
    assert held["optimizer"].param_groups[0]["fused"]
    assert torch.allclose(plain["found"], held["found"], rtol=1e-5)
    (switch,) = [one for one in fixes.switches if one.name == "fused"]
    assert switch.checked == 3
    assert fixes.trial is not None
    assert fixes.trial.turns == 6, "a step on copies is none of the program's"


def test_a_fused_step_that_came_out_different_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, adam = fused("Adam", tmp_path, ())[0], sys.modules["torch.optim.adam"]
    step = adam._fused_adam

    def wrong(params: list[Any], *given: Any, **named: Any) -> None:
        step(params, *given, **named)
        params[0].add_(0.01)

    monkeypatch.setattr(adam, "_fused_adam", wrong)
    held, fixes = fused("Adam", tmp_path, ("fused",))
    assert [one.off_because for one in fixes.switches if one.name == "fused"] == ["a step came out different"]
    assert torch.equal(plain["found"], held["found"])
    assert all(map(torch.equal, plain["net"].parameters(), held["net"].parameters()))


@pytest.fixture(scope="module")
def gradients() -> dict[str, Any]:
    """What two ranks over gloo found: `late_gradients_ranks.py`."""
    finished = warm().python("late_gradients_ranks.py", cwd=Path(fix_programs.__file__).parent, ranks=2)
    assert finished.returncode == 0, finished.stderr[-3000:]
    return json.loads(finished.stdout)


@pytest.mark.parametrize("name", late_gradients_ranks.PROGRAMS)
def test_gradients_travel_once_a_step_and_the_weights_are_the_same(gradients: dict[str, Any], name: str) -> None:
    late_gradients_ranks.check(name, gradients[name])


def test_a_child_that_the_program_forks_tells_nothing_of_its_fixes(run: Any) -> None:
    forks = "import os, sys, torch\nchild = os.fork()\nif not child: sys.exit()\nos.waitpid(child, 0)\n"
    assert run(forks, before=("--fix", "--clock", "modelled")).stdout.count("keepbusy --fix") == 1


def test_a_traceback_shows_the_programs_own_frames(run: Any) -> None:
    finished = run(
        """
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self): super().__init__(); self.inner, self.broken = nn.Linear(4, 4), False
    def forward(self, x):
        if self.broken: raise ValueError("broken")
        for _ in range(9): x = self.inner(x)
        return x
net = Net().cuda(); optimizer = torch.optim.SGD(net.parameters(), lr=0.1); x = torch.ones(2, 4, device="cuda")
for turn in range(14):
    net.broken = turn == 12
    optimizer.zero_grad()
    loss = net(x).sum()
    loss.backward()
    optimizer.step()
""",
        before=("--fix", "--clock", "modelled"),
    )
    assert finished.returncode == 1
    assert 'train.py", line 14' in finished.stderr
    assert "ValueError: broken" in finished.stderr
    assert "keepbusy/fix/" not in finished.stderr


def test_workers_that_are_let_go_are_not_waited_for_whatever_they_held() -> None:
    """A worker that is ended while it looks whether it shall go on takes that lock with it."""
    loader = DataLoader(torch.arange(64.0), batch_size=1)
    loop = FedLoop(MoreWorkers(lambda: None), loader, loader.__iter__)
    next(loop)
    loop._employ(1, torch.ones(1))
    next(loop)
    workers = loop._workers
    with workers._workers_done_event._cond:
        loop._let_go()
        collecting = threading.Thread(target=workers.__del__, daemon=True)
        collecting.start()
        collecting.join(timeout=30)
        assert not collecting.is_alive()
    assert all(one.exitcode is not None for one in map(joined, workers._workers))


def joined(worker: Any) -> Any:
    worker.join(timeout=30)
    return worker
