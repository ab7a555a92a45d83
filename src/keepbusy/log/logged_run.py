"""Builds the timeline of a run from the folders of its logged processes."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import compress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from keepbusy.log.joined_ranks import rebuild_ranks
from keepbusy.log.kernel_times import KernelTimes, shared_by_ranks
from keepbusy.log.log_file import CLOCK, RESUMED, THINNED, DriverLog, StackFrame, gaps_of, read_log
from keepbusy.log.log_timeline import HostSide, LogTimeline
from keepbusy.log.memory_history import memory_use
from keepbusy.log.profiler_window import CallOperators, learn_from_windows
from keepbusy.log.program_log import FACTS, SAMPLES
from keepbusy.log.rebuild import RebuiltRun, RebuiltWait, how_close, rebuild
from keepbusy.program.lines import TEXTS, set_program
from keepbusy.program.loops.codes import CodeObjects, read_source
from keepbusy.program.loops.iteration_counts import IterationCounts
from keepbusy.program.loops.log_gaps import LogGaps
from keepbusy.program.loops.run_loops import GapSamples, LoopEvidence, with_loops
from keepbusy.program.script import COMPILE
from keepbusy.timeline.figures import duration
from keepbusy.timeline.files import typed
from keepbusy.timeline.frame_roles import STEP_MARKS
from keepbusy.timeline.model import NONE, Ints, Lane, Spans, Timeline
from keepbusy.timeline.ranks import merge
from keepbusy.timeline.run_facts import CutShort, LoaderUse, Part, RunFacts
from keepbusy.timeline.steps import without_first_steps

_LETS_GO, _FEWEST = 2, 4
"""So many iterations after a window are slow, in this rank or in those that wait for it; so many others are needed."""
WINDOW_TIMES = ("opens", "clock", "closes", "closed")
"""Times of a window of the profiler, on the clock of the log."""
_SLOWS_DOWN, _HOLDS_UP = [("opens", "closed")], [("opens", "clock"), ("closes", "closed")]
"""Between these times a window slows the program down, and holds it up."""
_LATER = "What the program did after its log had ended is not in this report"
_LEAST_KNOWN, _MOST_KNOWN = 0.5, 0.95
"""Shares of known durations: below the first nothing is said of the GPU; from the second on it is not mentioned."""
_FEWEST_WAITS = 20
"""Long waits that are needed for a median error."""


@dataclass
class LoggedProcess:
    """A process that has launched kernels."""

    folder: Path
    facts: dict[str, Any]
    log: DriverLog
    """In recorded time, like the times of `facts`."""
    times: KernelTimes
    operators: CallOperators
    gaps: LogGaps

    @property
    def rank(self) -> int:
        return int(self.facts.get("rank", 0))

    @property
    def began(self) -> int:
        return int(self.facts.get("began", 0)) or int(self.log.begin[0])

    @property
    def recorded(self) -> int:
        """Nanoseconds until the last call."""
        return int((self.log.begin + self.log.took).max()) - self.began

    @property
    def lasted(self) -> int:
        """Nanoseconds of the run, or those that were recorded if the process was killed."""
        ended = int(self.facts.get("ended", 0))
        return (ended - self.began if ended else self.recorded) + self.gaps.time

    @property
    def has_stopped(self) -> bool:
        """Whether the program went on after its log was full."""
        return bool(self.facts.get("stopped"))


def read_processes(folder: Path) -> list[LoggedProcess]:
    """The process with most calls of each rank."""
    of_rank = dict[int, LoggedProcess]()
    for folder_of_process in folder.iterdir():
        if (folder_of_process / "rows").exists() and (process := _process(folder_of_process)) is not None:
            other = of_rank.get(process.rank)
            if other is None or len(process.log.rows) > len(other.log.rows):
                of_rank[process.rank] = process
    processes = [of_rank[rank] for rank in sorted(of_rank)]
    if len(processes) > 1 and len({process.facts.get("device") for process in processes}) == 1:
        shared = shared_by_ranks([process.log for process in processes], [process.times for process in processes])
        return [replace(process, times=times) for process, times in zip(processes, shared, strict=True)]
    return processes


def _process(folder: Path) -> LoggedProcess | None:
    try:
        facts: dict[str, Any] = json.loads((folder / FACTS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        facts = {}  # the process was killed
    log = read_log(folder)
    # the observing thread calls the driver, too, through the profiler; its rows also mark where calls are left out
    observing = [line["thread"] for line in log.threads if line["id"] == facts.get("own_thread", 0)]
    log = log.take(~np.isin(log.rows["thread"], observing) | np.isin(log.kinds(), (THINNED, RESUMED)))
    log = log.take((log.begin >= facts.get("began", 0)) & (log.begin <= (facts.get("ended") or math.inf)))
    if not (log.kinds() == "launch").any():
        return None
    TEXTS.update(facts.get("texts", {}))
    if facts.get("program"):
        set_program(facts["program"])
    gaps = gaps_of(log, facts.get("ended", 0))
    if len(gaps):
        log = replace(log, begin=gaps.recorded(log.begin))
        windows = [
            window | {name: gaps.recorded_at(window[name]) for name in WINDOW_TIMES if name in window}
            for window in facts.get("windows", ())
        ]
        facts |= {"windows": windows, "ended": gaps.recorded_at(facts["ended"]) if facts.get("ended") else 0}
    times, operators = learn_from_windows(log, folder, facts.get("windows", ()))
    return LoggedProcess(folder, facts, log, times, operators, gaps)


def timeline_in(folder: Path, source: str, missing: Sequence[str] = ()) -> Timeline:
    """The timeline of the run whose logs are in this folder. `missing`: sentences about ranks without a log."""
    processes = read_processes(folder)
    if not processes:
        return Timeline((Lane(0, None, 0),), (), Spans.of(0)).change_facts(
            source=source, logged=True, notes=tuple(missing)
        )
    whole = timeline_of_processes(processes, source)
    return without_first_steps(whole.change_facts(notes=(*whole.facts.notes, *missing)))


def timeline_of_processes(processes: Sequence[LoggedProcess], source: str) -> Timeline:
    """The timeline of all ranks of a run."""
    logs, times = [process.log for process in processes], [process.times for process in processes]
    clock_files = [process.folder / CLOCK for process in processes]
    clocks = [int(file.read_text()) if file.exists() else 0 for file in clock_files]
    runs = rebuild_ranks(logs, times, clocks) if len(processes) > 1 else [rebuild(logs[0], times[0])]
    alone = [_timeline(process, run, source) for process, run in zip(processes, runs, strict=True)]
    timelines = _without_windows(alone, processes)
    whole = merge(timelines) if len(timelines) > 1 else timelines[0]
    if min(run.known for run in runs) < _LEAST_KNOWN:  # the idle time of the GPU would be a guess
        tree = whole.facts.run and _without_gpu(whole.facts.run)
        whole = Timeline(whole.lanes[:1], (), Spans.of(0), facts=replace(whole.facts, run=tree))
    notes = _quality_note(processes, runs), *_complaints(processes)
    kernel_waits = list[RebuiltWait]()  # without copies, whose durations vary
    for process, run in zip(processes, runs, strict=True):
        kinds = process.log.kinds()
        kernel_waits += [wait for wait in run.waits if not kinds[wait.row].startswith("copy")]
    return whole.change_facts(notes=notes, rebuilt_within=_median_error(kernel_waits), sources=())


def _without_gpu(part: Part) -> Part:
    lines, parts = (replace(line, idle=NONE) for line in part.lines), map(_without_gpu, part.parts)
    return replace(part, busy=NONE, shares=(), lines=tuple(lines), parts=tuple(parts))


def _timeline(process: LoggedProcess, run: RebuiltRun, source: str) -> Timeline:
    facts, log = process.facts, process.log
    codes = CodeObjects(read_source, COMPILE[-1])
    began = process.began
    samples = _Samples.load(process.folder)
    in_gaps = process.gaps.holds(samples.times)
    ended = int((log.begin + log.took).max()) if process.has_stopped else int(facts.get("ended", 0))
    host = HostSide(
        began=began,
        ended=ended,
        notes=facts.get("notes", ("",)),
        operators=process.operators,
        sample_times=process.gaps.recorded(samples.times[~in_gaps]).tolist(),
        sample_chains=[*compress(samples.chains, ~in_gaps)],
        codes=codes,
    )
    cut_short = facts.get("cut_short")
    known = RunFacts(
        source=source,
        device=facts.get("device", ""),
        torch=facts.get("torch", ""),
        allocator=facts.get("allocator"),
        world=facts.get("world"),
        loaders=tuple(typed(LoaderUse, use) for use in facts.get("loaders", ())),
        logged=True,
        cut_short=typed(CutShort, cut_short) if cut_short else None,
    )
    built = LogTimeline(log, run, process.times, process.rank, known, host)
    timeline = built.timeline(np.array(_steps(log, host), np.int64))
    lines, gap_samples = built.source_lines, None
    if len(process.gaps):
        seen = [lines.code_lines(chain) for chain in compress(samples.chains, in_gaps)]
        gap_samples = GapSamples(process.gaps - began, samples.times[in_gaps] - began, seen)
    evidence = LoopEvidence(
        lines.of_name,
        counts=IterationCounts.load(process.folder, codes, began),
        is_announced=any(name.startswith(STEP_MARKS[:2]) for name in host.notes),
        exact=built.exact_frames,
        gap_samples=gap_samples,
        other_threads=[((lines.code(frame), frame.line), time) for frame, time in samples.other_threads],
        ran=samples.ran,
    )
    timeline = with_loops(timeline, evidence)
    return timeline.change(memory=memory_use(process.folder, began, process.gaps))


def _without_windows(timelines: Sequence[Timeline], processes: Sequence[LoggedProcess]) -> list[Timeline]:
    """Leave out iterations within a window of the profiler, in any rank, because they are slower, and those that were
    not wholly recorded. If hardly any others are left, leave out only those in which a window opened or closed."""
    fewest = min(len(timeline.marks) for timeline in timelines)
    for parts in (_SLOWS_DOWN, _HOLDS_UP):
        slowed = [_slowed(*pair, parts) for pair in zip(timelines, processes, strict=True)]
        if fewest - len(set[int]().union(*slowed)) >= _FEWEST:
            pairs = zip(timelines, slowed, strict=True)
            return [timeline.change_facts(beside=tuple(sorted(iterations))) for timeline, iterations in pairs]
    return [*timelines]


def _slowed(timeline: Timeline, process: LoggedProcess, parts: Sequence[tuple[str, str]]) -> set[int]:
    """Iterations of this rank from shortly before such a part of a window to shortly after it."""
    began = process.began
    starts = timeline.spans.start[timeline.marks]
    end = began + int(timeline.spans.end.max(initial=0))
    cuts = process.gaps.recorded(process.gaps.begins).tolist()
    slowed = {*timeline.facts.beside}
    for window in [*process.facts.get("windows", ()), *(dict.fromkeys(WINDOW_TIMES, cut) for cut in cuts)]:
        times = {"closed": end, "closes": window.get("closed", end)} | window  # a killed process has not closed it
        for opens, closes in parts:
            first, last = np.searchsorted(starts, (times[opens] - began, times[closes] - began)).tolist()
            slowed |= {*range(max(0, first - 1), last + _LETS_GO)}
    return slowed & {*range(len(starts))}


class _Samples(NamedTuple):
    """Samples of the program's stack between its calls."""

    times: Ints = np.zeros(0, np.int64)
    chains: Sequence[tuple[StackFrame, ...]] = ()
    """The stack of each sample, from the outside in."""
    other_threads: Sequence[tuple[StackFrame, int]] = ()
    """The processor time of other threads, by line."""
    ran: int = NONE
    """The processor time of the program's own thread."""

    @classmethod
    def load(cls, folder: Path) -> _Samples:
        if not (folder / SAMPLES).exists():
            return cls()
        with np.load(folder / SAMPLES) as saved:
            names, times, chains = json.loads(saved["names"].tobytes()), saved["times"], saved["chains"].tolist()

        def frame(code: int, line: int) -> StackFrame:
            file, name, _ = names["codes"][code]
            return StackFrame(file, line, name)

        stacks = [tuple(frame(*line) for line in chain) for chain in names["chains"]]
        other_threads = [(frame(code, line), time) for code, line, time in names.get("beside", ())]
        return cls(times, [stacks[chain] for chain in chains], other_threads, names.get("ran", NONE))


def _steps(log: DriverLog, host: HostSide) -> Sequence[int]:
    """When steps ended, from the most reliable kind of mark that was noted more than once."""
    notes = np.flatnonzero(log.kinds() == "note")
    values = log.rows["value"][notes]
    for beginning in STEP_MARKS:
        numbers = [number for number, name in enumerate(host.notes) if name.startswith(beginning)]
        ends = log.begin[notes[np.isin(values, numbers)]]
        if len(ends) > 1:
            return ends.tolist()
    return ()


def _median_error(waits: Sequence[RebuiltWait]) -> float:
    """The median relative error of predicted waits; 0 if there are too few long ones."""
    errors, _, share = how_close(waits)
    return float(np.median(errors)) if len(errors) >= _FEWEST_WAITS and share >= 0.5 else 0.0


def _quality_note(processes: Sequence[LoggedProcess], runs: Sequence[RebuiltRun]) -> str:
    """The note about how much was recorded, and how well the rebuilt run agrees with measured waits."""
    calls = sum(int((~np.isin(process.log.kinds(), ("note", THINNED, RESUMED))).sum()) for process in processes)
    waits = [wait for run in runs for wait in run.waits]
    relative, absolute, _ = how_close(waits)
    known = float(np.mean([run.known for run in runs]))
    time = sum(process.lasted for process in processes)
    cost = sum(int(process.facts.get("held_up", 0)) for process in processes) / max(1, time)
    if error := _median_error(waits):
        agrees = f"rebuilt within {100 * error:.1f}% of {len(relative):,} real waits"
    else:
        agrees = f"{len(waits):,} real waits rebuilt within {np.median(absolute) / 1e3:.1f} µs" if waits else ""
    part = _part_recorded(processes, time)
    kernels = f"{known:.0%} of kernel times known" if known < _MOST_KNOWN else ""
    windows = f"the profiler's windows held it up for {cost:.1%} of the time"
    return f"{'; '.join(filter(None, [f'recorded: {calls:,} calls, {part}', agrees, kernels, windows]))}."


def _part_recorded(processes: Sequence[LoggedProcess], time: int) -> str:
    """The part of the run that was recorded. `time` is that of the whole run."""
    if stopped := next((process for process in processes if process.has_stopped), None):
        return f"the first {duration(stopped.recorded)} of the run"
    [gaps, *_] = [process.gaps for process in processes]
    if not len(gaps):  # with gaps, there is only one process
        return "all of the run"
    began = int(processes[0].facts["began"])
    later = int((gaps.ends < began + time).sum())
    portions = f" and {later} later stretches" if later > 1 else " and a later stretch" if later else ""
    first = duration(int(gaps.begins[0]) - began)
    return f"in {duration(time - gaps.time)} of the run's {duration(time)}: its first {first}{portions}"


def _complaints(processes: Sequence[LoggedProcess]) -> list[str]:
    sentences = list[str]()
    for process in processes:
        facts = process.facts
        if facts.get("stopped"):
            sentences.append(f"{_LATER} ({facts['stopped']}).")
        if facts.get("faults"):
            sentences.append(f"Looking at the run failed at times ({facts['faults'][0]}).")
        if not process.times.durations:
            why = "the program profiled itself" if facts.get("profiled") else "the run ended too soon"
            sentences.append(f"No kernel was timed, because {why}: what the GPU did is not known.")
    return [*dict.fromkeys(sentences)]
