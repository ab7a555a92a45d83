"""All places of a run at which Python waits for the GPU, counted step by step, also those that cost nothing today.

They are compared with limits, and shown as text, GitHub's annotations, a JUnit file and SARIF.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape, quoteattr

import numpy as np

from keepbusy.causes.cause_inputs import CauseInputs
from keepbusy.causes.places import Where, by_place
from keepbusy.explain.step_analysis import covered
from keepbusy.fix.gate import BLOCKING_COPY, PLURALS, RACE, SYNC, AllowList, several
from keepbusy.report import race_words
from keepbusy.report.exports import lines_of, sarif_document
from keepbusy.report.source import source_of
from keepbusy.timeline.figures import duration
from keepbusy.timeline.files import BadInput
from keepbusy.timeline.frame_roles import source_line
from keepbusy.timeline.model import NONE, Ints, Kind, Timeline
from keepbusy.timeline.races import DataRace
from keepbusy.timeline.run_facts import ran_nothing
from keepbusy.timeline.steps import whole_steps

_FEWEST_STEPS = 2
_SHOWN = 20
"""Places that are listed; all of them stand in the JUnit file."""


@dataclass(frozen=True)
class CountedPlace:
    """A line, what kind of wait it is, and how often it comes."""

    kind: str  # SYNC or BLOCKING_COPY
    where: Where
    most: int  # in one step
    steps: int  # that have it
    total: int
    waited: int  # nanoseconds that Python waits there, over all steps
    reason: str = ""  # why it is allowed, where it is


@dataclass(frozen=True)
class WaitTally:
    """What was counted of a run."""

    source: str
    device: str
    steps: int
    is_one_step: bool  # a script without steps, which counts as one
    modelled: bool
    places: tuple[CountedPlace, ...]  # the most frequent first
    races: tuple[DataRace, ...]  # but for those that are allowed
    counts: tuple[tuple[str, tuple[int, ...]], ...]  # of each kind, what is not allowed: how many in each step

    def most(self, kind: str) -> int:
        """In one step, of what is not allowed."""
        return max(dict(self.counts)[kind], default=0)


def tally(timeline: Timeline, allow: Sequence[str] = ()) -> WaitTally:
    """Count them. A run that has begun to take steps needs two whole ones: a start-up waits, and is no step."""
    if not timeline.on_device.any():
        raise BadInput(ran_nothing(timeline.facts.source or "The run", timeline.has_operators))
    marks = min(len(timeline.marks_of(rank)) for rank in timeline.ranks)
    whole = whole_steps(timeline)
    if whole.facts.one_turn and marks:
        raise BadInput(
            f"{timeline.facts.source or 'the run'} took {marks} steps, too few to tell a step from the start; "
            f"let it take {_FEWEST_STEPS + 1} or more."
        )
    inputs, allowed = CauseInputs(whole), AllowList(allow)
    step = _step_of(whole)
    steps = len(whole.marks_of(whole.ranks[0]))
    rank_index = np.searchsorted(whole.ranks, whole.rank_of_rows)
    places, counts = [], []
    for kind, rows in _rows_of_kinds(inputs):
        not_allowed = np.zeros((len(whole.ranks), steps), np.int64)
        for where, rows_at_place in by_place(inputs, rows).items() if len(rows) else ():
            at_place = np.zeros((len(whole.ranks), steps), np.int64)
            np.add.at(at_place, (rank_index[rows_at_place], step[rows_at_place]), 1)
            reason = allowed.reason(_stack(whole, int(rows_at_place[0])))
            if not reason:
                not_allowed += at_place
            waited = int((whole.spans.end - whole.spans.start)[rows_at_place].sum())
            of_steps = at_place.max(axis=0)
            most, steps_with_it = int(of_steps.max()), int((of_steps > 0).sum())
            places.append(CountedPlace(kind, where, most, steps_with_it, len(rows_at_place), waited, reason))
        counts.append((kind, tuple(not_allowed.max(axis=0).tolist())))
    places.sort(key=lambda place: (bool(place.reason), -place.total, str(place.where)))
    facts = whole.facts
    races = tuple(race for race in facts.races if not _is_allowed(race, allowed))
    return WaitTally(
        facts.source, facts.device, steps, facts.one_turn, facts.modelled, tuple(places), races, tuple(counts)
    )


def _is_allowed(race: DataRace, allowed: AllowList) -> bool:
    lines = [Where.of(use.place) for use in (race.first, race.second)]
    return bool(allowed.reason((where.file, where.line, "") for where in lines))


def hidden_share(timeline: Timeline, since: int) -> float | None:
    """The share of the time of copies in which kernels ran as well; None where nothing was copied."""
    spans = timeline.spans
    copies, kernels = (spans.kind == Kind.COPY) & (spans.start >= since), spans.kind == Kind.KERNEL
    whole = float(spans.end.max(initial=0)) + 1
    copying, computing, either = (
        covered(spans.start[mask], spans.end[mask], whole) for mask in (copies, kernels, copies | kernels)
    )
    return (copying + computing - either) / copying if copying else None


def _rows_of_kinds(inputs: CauseInputs) -> Iterator[tuple[str, Ints]]:
    copies = inputs.waits_for_large_copy
    counted = inputs.is_sync & ~_reuses_memory(inputs)
    yield SYNC, np.flatnonzero(counted & ~copies)
    yield BLOCKING_COPY, np.flatnonzero(counted & copies)


def _reuses_memory(inputs: CauseInputs) -> np.ndarray:
    """Our own runtime asks for an event that has passed before it uses memory again, which holds nobody up."""
    spans, names = inputs.timeline.spans, inputs.timeline.names
    events = np.array(["EventSynchronize" in name for name in names], bool)[spans.name]
    return events & (spans.end - spans.start <= spans.work)


def _step_of(timeline: Timeline) -> Ints:
    """For each row the number of its rank's step."""
    step = np.zeros(len(timeline), np.int64)
    for rank in timeline.ranks:
        rows = np.flatnonzero(timeline.rank_of_rows == rank)
        step[rows] = np.searchsorted(timeline.marks_of(rank), rows, side="right") - 1
    return np.maximum(step, 0)


def _stack(timeline: Timeline, row: int) -> Iterator[tuple[str, int, str]]:
    """The source lines around a row, from the inside out."""
    frame = int(timeline.spans.frame[row])
    while frame != NONE:
        line = source_line(timeline.names[timeline.frames.name[frame]])
        if line:
            yield line
        frame = int(timeline.frames.parent[frame])


@dataclass(frozen=True)
class GateVerdict:
    """A tally and the limits of a step; a kind without a limit is counted and not judged."""

    tally: WaitTally
    limits: Mapping[str, int | None]
    refuses_races: bool = False

    @property
    def over(self) -> list[str]:
        """The kinds of which there are too many."""
        over = [kind for kind, limit in self.limits.items() if limit is not None and self.tally.most(kind) > limit]
        return over + [RACE] * bool(self.races)

    @property
    def races(self) -> tuple[DataRace, ...]:
        """That count."""
        return self.tally.races if self.refuses_races else ()

    def sentence(self, kind: str) -> str:
        limit, most = self.limits[kind], self.tally.most(kind)
        allowed = "no limit" if limit is None else f"limit {limit}"
        if self.tally.is_one_step:
            return f"{several(most, kind)} in the script ({allowed})"
        return f"{'up to ' if most else ''}{several(most, kind)} per step in {self.tally.steps} steps ({allowed})"

    def blamed(self) -> list[CountedPlace]:
        """Places of the kinds of which there are too many."""
        return [place for place in self.tally.places if place.kind in self.over and not place.reason]


def text(verdict: GateVerdict) -> str:
    """For people: the verdict, then every place, those that are too many first."""
    tally = verdict.tally
    clock = ", modelled clock" if tally.modelled else ""
    lines = [f"keepbusy check · {tally.source} · {tally.device}{clock}", ""]
    for kind in verdict.limits:
        mark = "too many" if kind in verdict.over else "fine" if verdict.limits[kind] is not None else "counted"
        lines.append(f"{mark:<11}{verdict.sentence(kind)}")
    if verdict.refuses_races:
        lines.append(f"{'too many' if tally.races else 'fine':<11}{race_words.several(len(tally.races))}")
    for race in verdict.races:
        lines += ["", *race_words.paragraph(race)]
    blamed = verdict.blamed()
    others = [place for place in tally.places if place not in blamed]
    for place in (*blamed, *others)[:_SHOWN]:
        lines += ["", *_paragraph(verdict, place)]
    if len(tally.places) > _SHOWN:
        lines += ["", f"and {len(tally.places) - _SHOWN} more places; --junit keeps all of them"]
    return "\n".join(lines)


def _paragraph(verdict: GateVerdict, place: CountedPlace) -> Iterator[str]:
    operator = f" · {place.where.operator}" if place.where.operator else ""
    library = f" · {place.where.library}" if place.where.library else ""
    yield f"{place.where}{operator}{library}"
    source = source_of(place.where)
    if source is not None:
        yield f"  {source.text}"
    yield f"  {_count(verdict, place)}"
    if place.reason:
        yield f"  allowed: {place.reason}"


def _count(verdict: GateVerdict, place: CountedPlace) -> str:
    waits = f"Python waits there for {duration(place.waited // verdict.tally.steps)}"
    if verdict.tally.is_one_step:
        return f"{several(place.total, place.kind)} in the script; {waits}"
    if place.steps == verdict.tally.steps:
        return f"{several(place.most, place.kind)} per step; {waits}"
    return f"{several(place.most, place.kind)} in {place.steps} of {verdict.tally.steps} steps; {waits} per step"


def github(verdict: GateVerdict) -> str:
    """GitHub's workflow commands: an error at each line that is too many, a notice at the others."""
    blamed = verdict.blamed()
    raced = [
        f"::error {_place_of(Where.of(race.at))}title=keepbusy: {RACE}::"
        f"{_escaped(f'{race_words.sentence(race)} {race_words.remedy(race)}')}"
        for race in verdict.races
    ]
    waiting = [
        f"::{'error' if place in blamed else 'notice'} {_place_of(place.where)}title=keepbusy: {place.kind}::"
        f"{_message(verdict, place)}"
        for place in verdict.tally.places
        if not place.reason
    ]
    return "\n".join(raced + waiting)


def new_waits(before: WaitTally, after: WaitTally) -> list[str]:
    """Functions that wait more often in a step than they did, a sentence each. Lines move, functions seldom do."""
    was, now = _by_function(before), _by_function(after)
    sentences = []
    for key, places in now.items():
        old = sum(place.most for place in was.get(key, ()))
        new = sum(place.most for place in places)
        if new > old:
            lines = ", ".join(str(place.where) for place in places)
            sentences.append(
                f"{several(new, key[0])} per step at {lines} ({places[0].where.operator}), {old or 'none'} before"
            )
    return sentences


def _by_function(tally: WaitTally) -> dict[tuple[str, str, str], list[CountedPlace]]:
    by_function: dict[tuple[str, str, str], list[CountedPlace]] = {}
    for place in tally.places:
        where = place.where
        by_function.setdefault((place.kind, where.file, where.function or where.operator), []).append(place)
    return by_function


def _place_of(where: Where) -> str:
    """As a path below the folder that GitHub knows."""
    if not where.file:
        return ""
    path = os.path.relpath(where.file, os.environ.get("GITHUB_WORKSPACE") or None)
    return f"file={_escaped(path)},line={where.line},"


def _message(verdict: GateVerdict, place: CountedPlace) -> str:
    operator = f" ({place.where.operator})" if place.where.operator else ""
    return _escaped(f"{_count(verdict, place)}{operator}")


def _escaped(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def junit(verdict: GateVerdict) -> str:
    """A test case for each limit, which fails with its lines."""
    limits = [kind for kind, limit in verdict.limits.items() if limit is not None]
    tests = len(limits) + verdict.refuses_races
    name = quoteattr(f"keepbusy check {verdict.tally.source}")
    lines = [
        '<?xml version="1.0" encoding="utf-8"?>',
        f'<testsuites><testsuite name={name} tests="{tests}" failures="{len(verdict.over)}" errors="0">',
    ]
    for kind in limits:
        case = f"<testcase classname={name} name={quoteattr(PLURALS[kind])}"
        places = [place for place in verdict.tally.places if place.kind == kind]
        paragraphs = escape("\n\n".join("\n".join(_paragraph(verdict, place)) for place in places))
        if kind in verdict.over:
            lines.append(
                f"{case}><failure message={quoteattr(verdict.sentence(kind))}>{paragraphs}</failure></testcase>"
            )
        else:
            lines.append(f"{case}><system-out>{paragraphs}</system-out></testcase>")
    if verdict.refuses_races:
        details = escape("\n\n".join("\n".join(race_words.paragraph(race)) for race in verdict.races))
        number = race_words.several(len(verdict.races))
        failure = f'<failure message="{number}">{details}</failure>' if details else ""
        lines.append(f'<testcase classname={name} name="data races">{failure}</testcase>')
    return "\n".join([*lines, "</testsuite></testsuites>\n"])


def sarif(verdict: GateVerdict) -> str:
    """An error at each line that is too many, a note at the others; what is allowed is suppressed, with its reason."""
    blamed, results = verdict.blamed(), []
    for race in verdict.races:
        if lines := lines_of(Where.of(race.at)):
            text = f"{race_words.sentence(race)} {race_words.remedy(race)}"
            results.append({"ruleId": RACE.replace(" ", "_"), "level": "error", "message": {"text": text}, **lines})
    for place in verdict.tally.places:
        if lines := lines_of(place.where):
            text = f"{_count(verdict, place)} ({place.where.operator}). In all {verdict.sentence(place.kind)}."
            level = "error" if place in blamed else "note"
            result = {"ruleId": place.kind.replace(" ", "_"), "level": level, "message": {"text": text}, **lines}
            allowed = {"suppressions": [{"kind": "external", "justification": place.reason}]} if place.reason else {}
            results.append(result | allowed)
    return sarif_document(results)
