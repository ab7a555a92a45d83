"""Which fixes `keepbusy fix` tries, in which order, and what it says of those that it does not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("libcst")

from diagnoses import MS, STALLED, ms

from keepbusy.causes.places import Where
from keepbusy.cli.fix import CandidateRuns, DifferentResults, FixSearch, TrialRun
from keepbusy.explain.diagnosis import PlannedFix, Prediction
from keepbusy.fix.source.proof import RunResults
from keepbusy.fix.source.rewritten_run import refusal_of
from keepbusy.timeline.files import BadInput

SOURCE = """\
import torch
loader = torch.utils.data.DataLoader(data, 8)
optimizer = torch.optim.Adam(model.parameters())
for x in loader:
    torch.cuda.synchronize()
    loss = model(x.to("cuda"))
    if seen(loss):
        loss.backward()
        optimizer.step()
"""
OWN = TrialRun(STALLED, 100 * MS, RunResults())


def planned(fix: str, line: int, gain: float) -> PlannedFix:
    where = (Where("train.py", line, exact=True),)
    return PlannedFix(fix, where, (), ms(gain), Prediction(0, 0, 0), ms(gain), code=f"{fix}()")


PLAN = (
    replace(planned("graph", 4, 0), loop="train.py:2"),
    planned("graph", 4, 9),
    planned("prepare_in_workers", 4, 5),
    planned("drop_sync", 5, 3),
    planned("rewrite", 6, 1),
)
"""No graph can be written, since the turn decides something. A fused optimizer serves that of the steps, of which it is
judged, and not that of the other loop."""


class Runs:
    """Of each change what comes of it: a gain, or why it is left out."""

    name = "train.py"

    def __init__(self, *outcomes: str | type[BaseException], enough: int = 99) -> None:
        self.outcomes, self.enough, self.tried_so_far = list(outcomes), enough, list[str]()

    def announced(self, changes: int) -> str:
        return f"{changes} to come\n"

    def end_of_search(self) -> str:
        return "" if len(self.tried_so_far) < self.enough else "time is over"

    def tried(self, sources: dict[str, str], what: str) -> TrialRun:
        self.tried_so_far.append(what)
        outcome = self.outcomes[0]
        if not isinstance(outcome, str):
            raise outcome
        return OWN

    def proven(self, planned: PlannedFix, *_: object) -> str:
        assert not planned.is_beside_steps
        outcome = str(self.outcomes.pop(0))
        if outcome.startswith("gains"):
            return outcome
        raise (DifferentResults if outcome.startswith("its ") else BadInput)(outcome)


@pytest.fixture
def search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SOURCE)
    return lambda runs: FixSearch(runs, replace(OWN, diagnosis=replace(STALLED, plan=PLAN)))


def test_the_plan_s_own_fixes_come_first_then_what_may_serve_in_their_place(search, capsys) -> None:  # type: ignore[no-untyped-def]
    runs = Runs("gains 5 ms", "its weights differ.", "gains 1 ms")
    found = search(runs)
    found.go()
    assert runs.tried_so_far == [
        "change 1 of 3, 'use more loader workers'",
        "change 2 of 3, 'remove the synchronization'",
        "change 3 of 3, 'use a fused optimizer'",
    ]
    [source] = found.sources.values()
    assert "num_workers=4" in source
    assert "synchronize" in source
    assert "fused=True" in source
    assert (
        capsys.readouterr().out
        == """\
train.py: a step takes 31.3 ms; the plan has 5 fixes
3 to come

use more loader workers at train.py:2
  gains 5 ms

remove the synchronization at train.py:5
  left out: its weights differ

use a fused optimizer at train.py:3
  instead of 'capture as a CUDA graph' at train.py:4
  gains 1 ms

capture as a CUDA graph at train.py:4
  by hand, since keepbusy cannot change these lines itself: graph()

capture as a CUDA graph at train.py:4
  by hand, since keepbusy cannot change these lines itself: graph()

rewrite at train.py:6
  by hand: rewrite()
"""
    )


def test_workers_that_change_the_results_are_tried_as_others_that_start_in_each_epoch(search, capsys) -> None:  # type: ignore[no-untyped-def]
    found = search(Runs("its losses differ by 2%", "gains 4 ms", "its weights differ.", "gains 1 ms"))
    found.go()
    [source] = found.sources.values()
    assert "num_workers=4, pin_memory=True)" in source
    assert "  instead of 'use more loader workers' at train.py:4\n  gains 4 ms\n" in capsys.readouterr().out


def test_workers_that_save_nothing_are_not_tried_as_others(search) -> None:  # type: ignore[no-untyped-def]
    runs = Runs("it saves nothing", "gains 3 ms", "gains 1 ms")
    search(runs).go()
    assert [what for what in runs.tried_so_far if "workers" in what] == ["change 1 of 3, 'use more loader workers'"]


@pytest.mark.parametrize("ends", ["no time", "Ctrl-C"])
def test_what_was_not_tried_is_named_and_what_holds_stays(search, capsys, ends: str) -> None:  # type: ignore[no-untyped-def]
    found = search(Runs("gains 5 ms", KeyboardInterrupt, enough=1 if ends == "no time" else 99))
    if ends == "no time":
        found.go()
    else:
        with pytest.raises(KeyboardInterrupt):
            found.go()
        found.end("time is over")
    assert "num_workers=4" in found.sources["train.py"]
    assert (
        """
not tried, since time is over:
  remove the synchronization at train.py:5, predicted to save 3.0 ms per step
  use a fused optimizer at train.py:4, instead of 'capture as a CUDA graph'

capture as a CUDA graph at train.py:4
  by hand"""
        in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("last", "after", "said"),
    [
        (1.5, 1.5, "results within 0.01% of the program with `capturable=True`"),
        (1.4, 1.5, "its weights differ by up to 50%"),
        (1.002, 1.005, "results within 0.5%, at most 4 times as far apart as with `capturable=True` alone"),
        (1.001, 1.005, "its weights differ by up to 0.5%"),
        (1.6, 1.5, "its weights differ by up to 50%"),  # of a program that it changes so much nothing is known
    ],
)
@pytest.mark.parametrize("again", [1.0, 1.1])
def test_a_graph_is_held_against_optimizers_that_round_as_it_does(
    last: float, after: float, said: str, again: float
) -> None:
    """Where their rounding grows: what the graph itself changes shows then. First of all the program has to compute the
    same twice."""

    def computed(last: float) -> RunResults:
        return RunResults(losses=[1.0], weights=[1], last=[last])

    class Stub(CandidateRuns):
        def tried(self, sources: dict[str, str], what: str, capturable: bool = False) -> TrialRun:
            return TrialRun(STALLED, 100 * MS, computed(last if capturable else again))

    runs = Stub.__new__(Stub)
    runs._computes, runs._is_modelled, runs._unprovable, runs._capturable = True, True, None, None
    own, graph = TrialRun(STALLED, 100 * MS, computed(1.0)), planned("graph", 4, 9)
    quick = replace(STALLED, plain_step=STALLED.plain_step // 2)
    try:
        found = runs.proven(graph, "graph", own, ({}, own), TrialRun(quick, 50 * MS, computed(after)))
    except BadInput as error:
        found = str(error)
    assert (said if again == 1.0 else "this program does not compute the same twice") in found


def test_what_is_made_along_with_a_graph_stands_beside_it(search, capsys) -> None:  # type: ignore[no-untyped-def]
    found = search(Runs("gains 5 ms", "its weights differ.", "gains 1 ms"))
    found._edits_held.add("graph")
    found.go()
    assert (
        "use a fused optimizer at train.py:3\n  beside 'capture as a CUDA graph' at train.py:4\n"
        in capsys.readouterr().out
    )


REFUSED = "captured_main: 0 replayed, 0 captured, 9 eager; keepbusy.graph runs main eagerly: at train.py:6 it counts"


@pytest.mark.parametrize(
    ("reports", "known", "reason"),
    [
        ([REFUSED], [], "keepbusy.graph runs main eagerly: at train.py:6 it counts"),
        (["captured_main: 0 replayed, 0 captured, 1 eager"], [], "it was called too seldom"),
        ([REFUSED, "captured_main_2: 5 replayed, 1 captured, 2 eager"], [], ""),
        ([REFUSED], ["captured_main"], ""),
        ([], [], ""),
    ],
)
def test_a_graph_that_was_never_replayed_is_left_out_and_why(reports: list[str], known: list[str], reason: str) -> None:
    assert refusal_of(reports, known) == reason
    own = TrialRun(STALLED, 100 * MS, RunResults(), tuple(f"{name}: 0 replayed" for name in known))
    after = TrialRun(replace(STALLED, plain_step=1), 50 * MS, RunResults(), tuple(reports))
    runs = CandidateRuns.__new__(CandidateRuns)
    runs._computes, runs._is_modelled = False, True
    if reason:
        with pytest.raises(BadInput, match=f"no graph was replayed: {reason}"):
            runs.proven(planned("graph", 4, 9), "graph", own, ({}, own), after)
    else:
        assert runs.proven(planned("graph", 4, 9), "graph", own, ({}, own), after).startswith("saves ")
