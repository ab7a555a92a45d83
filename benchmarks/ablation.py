"""Which rules and thresholds carry their weight: each is switched off alone, over all measured truth.

    python benchmarks/ablation.py [--only NAME...] [--sets SET...] [--jobs N] [--write stallbench/rules.md]

Two kinds of truth. *Recordings* of H200s whose fixed programs were timed: rules and thresholds of the explanation are
switched off while it explains them, and those of ranks while they are read, also into 32 ranks of which it is known who
is late (`many_ranks.py`). *Programs* whose loops are known because they were written that way
(`ablation_programs.py`): thresholds of loops and turns are switched off while they run on a virtual GPU.

A recording is right twice: by its causes, as stallbench's score.py has it (one of the planted causes is named with at
least half of its gain, several together, or silence is kept), and by its plan (the fixes of planted causes gain at
least half of it). It is lost without a rule if it is no longer right, or if its prediction errs by 5% of the step more;
gained if the other way round. A program is right if what is told of it is what was written into it; one that changes is
run twice more, and the majority counts. A rule stays if two independent programs are lost without it. The recordings of
one program, with stacks and without or live, are one program.

On a machine of many cores, from the root of the tree (with stallbench's truth copied to `stallbench-truth/`, 29 MB,
which the tree itself does not hold; without it only the tree's own recordings count):

    PYTHONPATH=src python benchmarks/ablation.py --jobs 48 --stallbench stallbench-truth --write $OUT/rules.md

needs Python 3.12, PyTorch, NumPy, msgspec, isal and rich. The programs mostly sleep, so there may be three jobs a core.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import pickle
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ablation_programs import PROGRAMS, Told
from accuracy import recorded
from many_ranks import OF_HOST, late_of, write
from thresholds import EXPLAINED, MERGED, THRESHOLDS, VIRTUAL, all_of, switched_off

import keepbusy
import keepbusy.explain
from keepbusy.timeline.model import Timeline

HERE = Path(__file__).resolve().parent
TRUTH = HERE.parent / "tests/gpu/truth"
STALLBENCH = HERE.parents[1] / "shared/stallbench/truth"
SETS = {
    "with_stack": HERE / "stalls/planted.json",
    "without_stack": HERE / "stalls/planted.json",
    "second": HERE / "stalls/second/planted.json",
    "public": HERE / "stalls/public.json",
    "live": HERE / "stallbench_planted.json",
}
MANY_RANKS = {"two_late": ("peer_late",), "none_late": ()}
RUNS = ("fourth", "sixth", "seventh")
"""Sets of whole runs, whose truth is the seconds that they took stalled and fixed."""
MANY, RANKS = "many", 32
"""Ranks of a run of which some are late, or none, made of the traces of four."""
PROGRAM_SET = "programs"
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
ALL_SETS = [*SETS, *RUNS, MANY, PROGRAM_SET]
NOTICEABLE = 0.05
"""Of the stalled step: a prediction that errs by so much more is worse."""
TRIES = 3
"""Of a program that was told otherwise without a threshold, and of each with all of them."""


@dataclass(frozen=True)
class Outcome:
    right: bool
    error: float = 0.0  # of the stalled step, or run

    def is_better_than(self, other: Outcome) -> bool:
        return self.right > other.right or (self.right == other.right and self.error < other.error - NOTICEABLE)


Outcomes = dict[str, Outcome]
"""Of one recording: of its causes, and of its plan."""


@dataclass
class Ablation:
    """Of one rule: the programs that need it, and those that are better off without."""

    lost: list[str] = field(default_factory=list)
    gained: list[str] = field(default_factory=list)


# recordings


@dataclass(frozen=True)
class Case:
    path: Path
    planted: tuple[str, ...]
    kind: str = ""

    @property
    def name(self) -> str:
        return f"{self.path.parent.name}/{self.path.stem}"

    @property
    def is_live(self) -> bool:
        return self.path.with_suffix(".busy").exists()

    def timeline(self) -> Timeline:
        if self.kind == MANY:
            with tempfile.TemporaryDirectory() as folder:
                write(Path(folder), RANKS, self.path.parents[1], bool(self.planted))
                return keepbusy.read(sorted(Path(folder).iterdir()))
        if self.is_live:
            return keepbusy.load(self.path.with_suffix(".busy"))
        return recorded(self.path)


def cases(sets: Sequence[str], stallbench: Path) -> Iterator[Case]:
    of_stallbench = json.loads((HERE / "stallbench_planted.json").read_text())
    for name, file in SETS.items():
        planted = json.loads(file.read_text())
        folders = [TRUTH / name, *([stallbench / name] if name in ("with_stack", "without_stack") else [])]
        for path in (path for folder in folders for path in sorted(folder.glob("*.json"))):
            # what the live runs of stallbench were planted with holds for its traces, too
            causes = planted.get(path.stem, of_stallbench.get(path.stem))
            if name in sets and causes is not None:
                yield Case(path, tuple(causes))
    for name in [one for one in RUNS if one in sets]:
        groups = json.loads((HERE / f"stalls/{name}/planted.json").read_text()).values()
        planted = {case: one["causes"] for group in groups for case, one in group.items()}
        for path in sorted((TRUTH / name).glob("*.busy")):
            yield Case(path, tuple(planted[path.stem]), name)
    if MANY in sets and stallbench.exists():
        yield from (Case(stallbench / MANY / name, causes, MANY) for name, causes in MANY_RANKS.items())


def outcomes(case: Case, timeline: Timeline) -> Outcomes:
    if case.kind in RUNS:
        return {"run": _of_run(case, timeline)}
    if case.kind == MANY:
        return {"ranks": _of_many_ranks(case, timeline)}
    truth = json.loads(case.path.read_text())
    stalled, fixed = truth["stalled_ms"], truth["fixed_ms"]
    noise = max(0.03, (truth["gain_high"] - truth["gain_low"]) / 2)
    step = None if case.is_live else round(stalled * 1e6)
    planted = () if stalled - fixed < noise * stalled else case.planted
    found = keepbusy.explain(timeline, plain_step=step, what_if=planted)
    named = {one.cause: one.predicted.step / 1e6 for one in reversed(found.causes)}
    gains = sum(one.gain / 1e6 for one in found.plan if set(one.causes) & (set(planted) or BLAMES))
    if not planted:
        predicted = min([stalled, *(step for cause, step in named.items() if cause in BLAMES)])
        least = (1 - max(0.05, noise)) * stalled
        return {
            "causes": Outcome(predicted >= least, abs(predicted - fixed) / stalled),
            "plan": Outcome(stalled - gains >= least, abs(stalled - gains - fixed) / stalled),
        }
    predicted = found.predicted.step / 1e6
    if len(planted) == 1:
        predicted = named.get(planted[0], stalled)
    half = 0.5 * (stalled - fixed)
    return {
        "causes": Outcome(stalled - predicted >= half, abs(predicted - fixed) / stalled),
        "plan": Outcome(gains >= half, abs(stalled - gains - fixed) / stalled),
    }


def _of_run(case: Case, timeline: Timeline) -> Outcome:
    truth = json.loads((case.path.parent / "seconds.json").read_text())[case.path.stem]
    stalled, fixed = (sum(truth[form]) / len(truth[form]) for form in ("stalled_s", "fixed_s"))
    promised = sum(one.run_gain for one in keepbusy.explain(timeline).plan) / 1e9
    error = abs(promised - (stalled - fixed)) / stalled
    if not case.planted:
        return Outcome(promised <= 0.05 * stalled, error)
    return Outcome(promised >= 0.5 * (stalled - fixed), error)


def _of_many_ranks(case: Case, timeline: Timeline) -> Outcome:
    rank, host = late_of(RANKS)
    late = {(rank,), tuple(range(host * OF_HOST, (host + 1) * OF_HOST))} if case.planted else set()
    cluster = timeline.facts.cluster
    return Outcome(cluster is not None and {one.ranks for one in cluster.stragglers} == late)


def ablate(case: Case, only: Sequence[str]) -> tuple[Outcomes, dict[str, Outcomes]]:
    """Thresholds of ranks are switched off as these are read."""
    timeline = case.timeline()
    with_all = outcomes(case, timeline)
    without = {}
    for name in sorted(all_of(MERGED).keys() & set(only)) if len(timeline.ranks) > 1 and not case.is_live else ():
        with switched_off(name):
            without[name] = outcomes(case, case.timeline())
    if case.kind == MANY:
        return with_all, without
    for name in sorted(all_of(EXPLAINED).keys() & set(only)):
        with switched_off(name):
            without[name] = outcomes(case, timeline)
    return with_all, without


# programs


def told_of(name: str, without: str) -> Told:
    """In a process of its own, which is forked from one that has PyTorch already."""
    with tempfile.TemporaryDirectory() as folder:
        left = Path(folder) / "told"
        child = os.fork()
        if not child:
            try:
                _run(name, without, left)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        return pickle.loads(left.read_bytes())


def _run(name: str, without: str, left: Path) -> None:
    from keepbusy.program.script import run_file
    from keepbusy.virtual.virtual_run import Options, start

    with switched_off(without) if without else nullcontext():
        timeline = start(Options(measured=False))
        run_file(str(HERE / "ablation_programs.py"), [name])
        run = timeline().facts.run
    left.write_bytes(pickle.dumps(Told(asdict(run))))


def is_told_rightly(name: str, without: str) -> tuple[bool, str]:
    try:
        told = told_of(name, without)
        right = bool(PROGRAMS[name].is_right(told))
        return right, str([f"{loop['source']} {loop['turns']}" for loop in told.loops()])
    except Exception as error:
        return False, f"{type(error).__name__}: {error}"


def majority(name: str, without: str, usual: bool | None) -> tuple[bool, str]:
    """As usual at once, or else most of three tries."""
    right, said = is_told_rightly(name, without)
    if right == usual:
        return right, said
    tries = Counter([right, *(is_told_rightly(name, without)[0] for _ in range(TRIES - 1))])
    return tries[True] > tries[False], said


# the table


def program_of(case: str) -> str:
    return case.rpartition("/")[2]


def table(found: dict[str, Ablation], right: Counter[str], count: Counter[str]) -> Iterator[str]:
    says = {name: one.says for name, (_, one) in all_of(THRESHOLDS).items()}
    yield "| rule | what it says | programs lost without it | programs gained without it |"
    yield "|---|---|---|---|"
    for name, ablation in found.items():
        lost, gained = (
            ", ".join(sorted(set(map(program_of, one)))) or "none" for one in (ablation.lost, ablation.gained)
        )
        yield f"| `{name}` | {says[name]} | {lost} | {gained} |"
    yield ""
    yield (
        "With all rules "
        + ", ".join(f"{right[kind]} of {count[kind]} are right by their {kind}" for kind in count)
        + "."
    )


INTRODUCTION = """\
# The rules, and what needs them

What `explain` says follows from replaying the run, and what a recording keeps follows from how long turns take. Where
that does not settle a question, a rule or a threshold does. Each has a name in `benchmarks/thresholds.py`, and
`benchmarks/ablation.py` switches each off alone: those of the explanation over all recordings whose fixed programs
were timed on H200s, those of recording over programs that it runs. This page is its output. A recording is *lost* if
its causes or its plan are no longer right, or if the prediction errs by 5% of the step more; a program, if what is
told of it is no longer what was written into it. Recordings of one program with stacks, without them and live count
once.

"""


def main() -> None:
    names = list(all_of(THRESHOLDS))
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--only", nargs="+", default=names, metavar="RULE")
    arguments.add_argument("--sets", nargs="+", default=ALL_SETS, choices=ALL_SETS)
    arguments.add_argument("--programs", nargs="+", default=list(PROGRAMS), choices=list(PROGRAMS), metavar="PROGRAM")
    arguments.add_argument("--stallbench", type=Path, default=STALLBENCH)
    arguments.add_argument("--jobs", type=int, default=1)
    arguments.add_argument("--write", type=Path)
    options = arguments.parse_args()
    found = {name: Ablation() for name in options.only}
    right, count = Counter[str](), Counter[str]()

    def compared(case: str, name: str, with_all: Outcome, one: Outcome) -> None:
        if with_all.is_better_than(one):
            found[name].lost.append(case)
            print(f"{case:44} lost without {name}", flush=True)
        elif one.is_better_than(with_all):
            found[name].gained.append(case)
            print(f"{case:44} gained without {name}", flush=True)

    context = multiprocessing.get_context("fork")
    programs = options.programs if PROGRAM_SET in options.sets else []
    every = list(cases(options.sets, options.stallbench))
    with ProcessPoolExecutor(options.jobs, context, _be_ready) as pool:
        runs = {pool.submit(majority, name, "", None): name for name in programs}
        explained = {pool.submit(ablate, case, options.only): case for case in every}
        usual: dict[str, bool] = {}
        for done in as_completed(runs):
            name = runs[done]
            usual[name], said = done.result()
            right["programs"] += usual[name]
            count["programs"] += 1
            print(f"{name:44} {'right' if usual[name] else 'WRONG'} {said}", flush=True)
        without = {
            pool.submit(majority, name, threshold, usual[name]): (name, threshold)
            for name in programs
            for threshold in all_of(VIRTUAL).keys() & set(options.only)
        }
        for done in as_completed([*without, *explained]):
            if done in without:
                name, threshold = without[done]
                told, said = done.result()
                compared(name, threshold, Outcome(usual[name]), Outcome(told))
                if told != usual[name]:
                    print(f"{name:44} {'right' if told else 'WRONG'} without {threshold}: {said}", flush=True)
                continue
            case, (with_all, others) = explained[done], done.result()
            for name, one in others.items():
                for kind in one:
                    compared(case.name, name, with_all[kind], one[kind])
            moved = [name for name, one in others.items() if one != with_all]
            for kind, one in with_all.items():
                right[kind] += one.right
                count[kind] += 1
                print(f"{case.name:44} {kind:6} {'right' if one.right else 'WRONG'} {one.error:6.1%}", flush=True)
            print(f"{'':44} moved by {moved}", flush=True)
    text = "\n".join(table(found, right, count))
    print("\n" + text)
    if options.write:
        options.write.write_text(INTRODUCTION + text + "\n", encoding="utf-8")


def _be_ready() -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import torch

    torch.set_num_threads(1)


if __name__ == "__main__":
    main()
