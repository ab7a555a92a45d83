"""Which rules of the explanation carry their weight: each is switched off alone, over all measured truth.

    python benchmarks/ablation.py [--only NAME...] [--sets SET...] [--write docs/explanation/rules.md]

A program is right as stallbench's score.py has it: one of the planted causes is named with at least half of its gain
(several: together), or silence is kept. It is lost without a rule if it is no longer right, or if its prediction errs
by 5% of the step more; gained if the other way round. A rule stays if two independent programs are lost without it.
The two recordings of one program, with stacks and without or live, are one program.

A rule is only switched off for programs in which it was asked, and that is where its answer changes something.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from accuracy import recorded

import keepbusy
import keepbusy.explain
from keepbusy.explain import rules
from keepbusy.timeline.model import Timeline

HERE = Path(__file__).resolve().parent
TRUTH, STALLBENCH = HERE.parent / "tests/gpu/truth", HERE.parents[1] / "shared/stallbench/truth"
PLANTED = {
    "with_stack": HERE / "stalls/planted.json",
    "without_stack": HERE / "stalls/planted.json",
    "second": HERE / "stalls/second/planted.json",
    "public": HERE / "stalls/public.json",
    "live": HERE / "stallbench_planted.json",
    "live_uneven": HERE / "stallbench_planted.json",
}
BLAMES = {
    "host_sync",
    "blocking_copy",
    "copy_not_overlapped",
    "input_late",
    "made_on_host",
    "allocator",
    "peer_late",
    "exposed_collective",
}
NOTICEABLE = 0.05
"""Of the stalled step: a prediction that errs by so much more is worse."""


@dataclass(frozen=True)
class Outcome:
    right: bool
    error: float  # of the stalled step

    def is_better_than(self, other: Outcome) -> bool:
        return self.right > other.right or (self.right == other.right and self.error < other.error - NOTICEABLE)


@dataclass(frozen=True)
class Case:
    path: Path
    planted: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.path.parent.name}/{self.path.stem}"

    @property
    def is_live(self) -> bool:
        return self.path.with_suffix(".busy").exists()

    def timeline(self) -> Timeline:
        if self.is_live:
            return keepbusy.load(self.path.with_suffix(".busy"))
        return recorded(self.path)


@dataclass
class Ablation:
    """Of one rule: the programs that need it, and those that are better off without."""

    lost: list[str] = field(default_factory=list)
    gained: list[str] = field(default_factory=list)


def cases(sets: Sequence[str]) -> Iterator[Case]:
    for name, file in PLANTED.items():
        planted = json.loads(file.read_text())
        folders = [TRUTH / name]
        if name in ("with_stack", "without_stack"):
            folders.append(STALLBENCH / name)
        for path in (path for folder in folders for path in sorted(folder.glob("*.json"))):
            # what the live runs of stallbench were planted with holds for its traces, too
            causes = planted.get(path.stem) or json.loads((HERE / "stallbench_planted.json").read_text()).get(path.stem)
            if name in sets and (path.stem in planted or causes is not None):
                yield Case(path, tuple(planted.get(path.stem, causes)))


def outcome(case: Case, timeline: Timeline) -> Outcome:
    truth = json.loads(case.path.read_text())
    stalled, fixed = truth["stalled_ms"], truth["fixed_ms"]
    noise = max(0.03, (truth["gain_high"] - truth["gain_low"]) / 2)
    step = None if case.is_live else round(stalled * 1e6)
    gains_nothing = stalled - fixed < noise * stalled
    planted = () if gains_nothing else case.planted
    found = keepbusy.explain(timeline, plain_step=step, what_if=planted)
    named = {one.cause: one.predicted.step / 1e6 for one in reversed(found.causes)}
    if not planted:
        predicted = min([stalled, *(step for cause, step in named.items() if cause in BLAMES)])
        return Outcome(predicted >= (1 - max(0.05, noise)) * stalled, abs(predicted - fixed) / stalled)
    predicted = found.predicted.step / 1e6
    if len(planted) == 1:
        predicted = named.get(planted[0], stalled)
    return Outcome(stalled - predicted >= 0.5 * (stalled - fixed), abs(predicted - fixed) / stalled)


def ablate(case: Case, only: Sequence[str]) -> tuple[Case, Outcome, dict[str, Outcome]]:
    keepbusy.explain.plan_of = lambda *_: ()  # what is judged are causes; searching for sets takes most of the time
    timeline = case.timeline()
    rules.asked()
    with_all = outcome(case, timeline)
    without = {}
    for name in sorted(rules.asked() & set(only)):
        with rules.without(name):
            without[name] = outcome(case, timeline)
    return case, with_all, without


def program_of(case: str) -> str:
    return case.rpartition("/")[2]


def table(found: dict[str, Ablation], right: int, count: int) -> Iterator[str]:
    yield "| rule | what it says | programs lost without it | programs gained without it |"
    yield "|---|---|---|---|"
    for name, ablation in found.items():
        lost, gained = (
            ", ".join(sorted(set(map(program_of, one)))) or "none" for one in (ablation.lost, ablation.gained)
        )
        yield f"| `{name}` | {rules.RULES[name]} | {lost} | {gained} |"
    yield ""
    yield f"With all rules {right} of {count} recordings are right."


INTRODUCTION = """\
# The rules of the explanation, and what needs them

What `explain` says follows from replaying the run. Where that does not settle a question, a rule with a threshold does.
Each has a name in `explain/rules.py`, and `benchmarks/ablation.py` switches each off alone over all programs whose
truth was measured on H200. This page is its output. A program is *lost* if it is no longer right, or if its prediction
errs by 5% of the step more. Recordings of one program with stacks, without them and live count once.

"""


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--only", nargs="+", default=list(rules.RULES), metavar="RULE")
    arguments.add_argument("--sets", nargs="+", default=list(PLANTED), choices=list(PLANTED))
    arguments.add_argument("--jobs", type=int, default=1)
    arguments.add_argument("--write", type=Path)
    options = arguments.parse_args()
    found = {name: Ablation() for name in options.only}
    right, every = 0, list(cases(options.sets))
    with ProcessPoolExecutor(options.jobs) as pool:
        for case, with_all, without in pool.map(ablate, every, [options.only] * len(every)):
            right += with_all.right
            for name, one in without.items():
                if with_all.is_better_than(one):
                    found[name].lost.append(case.name)
                elif one.is_better_than(with_all):
                    found[name].gained.append(case.name)
            moved = [name for name, one in without.items() if one != with_all]
            print(f"{case.name:44} {'right' if with_all.right else 'WRONG'} {with_all.error:6.1%}  {moved}", flush=True)
    text = "\n".join(table(found, right, len(every)))
    print("\n" + text)
    if options.write:
        options.write.write_text(INTRODUCTION + text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
