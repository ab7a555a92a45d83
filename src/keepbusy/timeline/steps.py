"""Whole steps: the part of a recording that repeats, cut on the host in issue order.

A window may hold more device steps than host steps, or fewer. Cut on the host, each launch keeps
the commands it enqueued, whenever they ran.
"""

from __future__ import annotations

import numpy as np

from keepbusy.timeline.files import BadInput
from keepbusy.timeline.frame_roles import STEP_MARKS, Owner, Role, source_line
from keepbusy.timeline.model import NONE, FrameKind, Ints, Kind, LinkKind, Links, Mask, MemoryUse, Timeline
from keepbusy.timeline.replay import pace
from keepbusy.timeline.run_facts import LOOP, place_of_loop

NOISE_OF_A_SCRIPT = 0.03
"""Waits that take less than this share of a script are noise."""
ONE_CALL = (
    "The trace shows nothing that comes again, as the steps of a loop do: all of it is explained as one step, "
    "with whatever happens only the first time."
)
OTHER_PART = 0.1
"""Parts between marks whose numbers of commands differ by more are different parts of a step."""
_SETTLING = 0.5
"""At most this share of the steps counts as the beginning."""
FEWEST_PROVEN = 4
"""With so many iterations that only replay a graph, those that compare it are left out."""
LEAVES_LOOP = 4
"""An iteration that launches so many times as much as others has left its loop."""


def whole_steps(timeline: Timeline, plain_step: int | None = None) -> Timeline:
    """Cuts from the first mark to the last, so that only whole steps remain, each with one mark at its begin."""
    timeline = without_proofs(loop_alone(timeline))
    if not len(timeline.marks):
        guessed = by_pattern(timeline)
        timeline = guessed if not timeline.facts.is_whole or comes_again(guessed) else timeline
    marks = [timeline.marks_of(rank) for rank in timeline.ranks]
    count = min(map(len, marks))
    if timeline.facts.plain_runs:  # live recordings of ranks begin with the same step, and some may last longer
        timeline = timeline.marked(of_rank[:count] for of_rank in marks)
    if (step := _only_step(timeline, count)) is not None:
        return step
    first_marks = timeline.marks_of(timeline.ranks[0])[-count:]
    if count < 3 or not (counts := commands_between(timeline, first_marks)).any():
        raise BadInput(f"{timeline.facts.named} shows fewer than two whole steps; record at least three.")
    full = np.flatnonzero(counts)
    first, last = int(full[0]), int(full[-1]) + 1

    def cut_into(marks_a_step: int) -> Timeline:
        return _cut(timeline, count, np.arange(first + (last - first) % marks_a_step, last + 1, marks_a_step))

    length = 1 if timeline.facts.loop else period(counts[first:last], _places(timeline, first_marks[first:last]))
    whole = cut_into(length)
    if length > 1 or plain_step is None or timeline.facts.recorded is not None:  # live: one mark is one plain step
        return whole
    marks_a_step = _marks_a_step(whole, plain_step, (last - first) // 2)
    return cut_into(marks_a_step).change_facts(marks_a_step=marks_a_step) if marks_a_step > 1 else whole


def without_broken_off(timeline: Timeline) -> Timeline:
    """Without the last thing that a program did before it was cut short: the unfinished iteration, which a virtual run
    marks as if it were complete, or without iterations the line that raised."""
    ended, loop = timeline.facts.cut_short, place_of_loop(timeline.facts.loop)
    if ended is None or not timeline.facts.is_whole:  # no window of a live recording holds such an iteration
        return timeline
    lines = np.flatnonzero(timeline.frames.kind == FrameKind.LINE)
    written = [source_line(timeline.names[name]) or ("", 0, "") for name in timeline.frames.name[lines].tolist()]
    if not len(timeline.marks):
        raised = lines[np.array([f"{file}:{line}" == ended.place for file, line, _ in written], bool)]
        return _without_last_visit(timeline, lines, raised) if len(raised) and len(timeline.ranks) == 1 else timeline
    if not loop or (ended.within and loop not in ended.within):
        return timeline
    in_file = lines[np.array([file == loop.rpartition(":")[0] for file, _, _ in written], bool)]
    last = [int(timeline.marks_of(rank)[-1]) for rank in timeline.ranks]
    if all((timeline.frames.start[in_file] >= timeline.spans.start[mark]).any() for mark in last):
        return timeline  # the unfinished iteration begins at the last mark
    return timeline.change(marks=np.setdiff1d(timeline.marks, last))


def _without_last_visit(timeline: Timeline, lines: Ints, raised: Ints) -> Timeline:
    """Without what was done since the program's thread left the line before the last visit of the one that raised."""
    frames, within, count = timeline.frames, np.zeros(len(timeline.frames) + 1, bool), 0  # one more entry for no frame
    within[raised] = True
    while (inside := int(within.sum())) != count:
        within, count = within | np.append(within[frames.parent], False), inside
    others = lines[(frames.lane[lines] == frames.lane[raised[0]]) & ~within[lines]]
    last_visit = frames.start[raised].max()
    if (frames.start[others] > last_visit).any():
        return timeline  # only an earlier visit of that line was recorded, which did not raise
    ended_before = frames.end[others][frames.end[others] <= last_visit].max(initial=0)
    kept = timeline.on_device | (timeline.spans.start < ended_before)
    kept[timeline.launches.target] = kept[timeline.launches.source]
    return timeline.keep(kept)


def _marks_a_step(whole: Timeline, plain_step: int, most: int) -> int:
    """How many marks make one step, if the plain step is several times as long as what is between two marks; else 1."""
    ratio = plain_step / max(1.0, pace(sample(whole)))
    marks = min(most, round(ratio))
    return marks if abs(ratio - marks) < 0.2 * marks else 1


def _only_step(timeline: Timeline, count: int) -> Timeline | None:
    """A run with fewer than two whole steps, as its only step; None if that is not known."""
    facts = timeline.facts
    if count > 2 or not timeline.on_device.any():
        return None
    is_script = facts.is_whole and facts.reason is None  # not a window on one of its loops
    holds_a_step = count == 2 and not is_script
    step = _cut(timeline, count, np.array([0, 1])) if holds_a_step else timeline
    if holds_a_step and (facts.plain_step is not None or (facts.plain_runs and not facts.one_turn)):
        # a window may have just one long step of many: the host runs ahead into the next ones
        step = step.change_facts(one_turn=False)
    elif facts.is_whole or facts.one_turn or facts.traced:
        notes = (*facts.notes, ONE_CALL) if facts.traced else facts.notes
        step = as_one_step(step).change_facts(notes=notes)
    else:
        return None
    return step if step.on_device.any() else None


def as_one_step(timeline: Timeline) -> Timeline:
    """A whole script without steps as one step, from the launch of its first command on."""
    launched, rank = timeline.launches.source, timeline.rank_of_rows
    first = np.array([launched[rank[launched] == number].min(initial=len(timeline)) for number in timeline.ranks])
    kept = np.arange(len(timeline)) >= first[np.searchsorted(timeline.ranks, rank)]
    return timeline.change(marks=np.sort(first[first < len(timeline)])).keep(kept).change_facts(one_turn=True)


def without_timer_reads(timeline: Timeline) -> Timeline:
    """Without the waits in which DDP reads its own timers.

    PyTorch does that in a model's first ten iterations and then in every hundredth, so a window at the beginning of a
    run shows waits that other steps do not have.
    """
    spans, in_ddp = timeline.spans, np.append(timeline.frames.role & Role.DDP_FORWARD != 0, False)
    reads = (spans.kind == Kind.SYNC) & (spans.role & Role.AWAITS_EVENT != 0) & in_ddp[spans.frame]
    if not reads.any():
        return timeline
    links, note = timeline.links, "DDP waits for the GPU to read its own timers in its first ten steps: left out here."
    kind, awaits = (np.where(reads, value, column) for value, column in ((Kind.WORK, spans.kind), (NONE, spans.awaits)))
    return timeline.change(
        spans=spans.change(kind=kind.astype(spans.kind.dtype), awaits=awaits.astype(spans.awaits.dtype)),
        links=links.take(~(reads[links.target] & (links.kind == LinkKind.ORDER))),
    ).change_facts(notes=(*timeline.facts.notes, note))


def without_proofs(timeline: Timeline) -> Timeline:
    """Without the iterations in which `keepbusy.graph` compares a replay with the original step, as a long run has only
    few of them. If there are hardly any others, they stay."""
    proving = np.append(timeline.frames.role & Role.PROVES != 0, False)[timeline.spans.frame]
    if not proving.any():
        return timeline
    step = _step_of_rows(timeline)
    of_proofs = np.unique(step[proving & (step != NONE)])
    if min(len(timeline.marks_of(rank)) for rank in timeline.ranks) - len(of_proofs) < FEWEST_PROVEN:
        return timeline
    return _without(timeline, of_proofs)


def _without(timeline: Timeline, dropped: Ints) -> Timeline:
    """Without the steps of each rank with these numbers."""
    kept = ~np.isin(_step_of_rows(timeline), dropped)
    return timeline.marked(np.delete(timeline.marks_of(rank), dropped) for rank in timeline.ranks).keep(kept)


def loop_alone(timeline: Timeline, brief: bool = False) -> Timeline:
    """Without what lies beside the loop. `brief`: also without what lies before its first mark and after its last."""
    beside = np.array(timeline.facts.beside, np.int64)
    fewest = min((len(timeline.marks_of(rank)) for rank in timeline.ranks), default=0) - len(beside)
    alone = _without(timeline, beside).change_facts(beside=()) if len(beside) and fewest > 2 else timeline
    if not brief:
        return alone
    row = np.arange(len(alone))
    alone = alone.keep((row >= alone.marks[0]) & (row <= alone.marks[-1]))
    needed, frame = np.zeros(len(alone.frames) + 1, bool), np.unique(alone.spans.frame)
    while len(frame := frame[frame != NONE]):
        needed[frame] = True
        frame = np.unique(alone.frames.parent[frame])
    return alone.keep_frames(needed[:-1]).change(memory=MemoryUse.of(0))


def within_loop(timeline: Timeline) -> Timeline:
    """In a window on a loop: marks what lies beside it. The last iteration before the loop is left lasts until it is
    entered again, and includes all that the program does in between."""
    reason = timeline.facts.reason
    return marked_beside(timeline) if reason is not None and reason.why == LOOP else timeline


def marked_beside(timeline: Timeline) -> Timeline:
    """Marks iterations that last until the loop is entered again as beside it: they launch far more than others."""
    if timeline.facts.beside or len(timeline.marks) < 3:
        return timeline
    launched = commands_between(timeline, timeline.marks_of(timeline.ranks[0]))
    beside = np.flatnonzero(launched > LEAVES_LOOP * np.median(launched)).tolist()
    return timeline.change_facts(beside=tuple(beside))


def enclosing_iteration(timeline: Timeline) -> Timeline | None:
    """One iteration of the enclosing loop: from a loop's last iteration until it is entered again."""
    last = min(len(timeline.marks_of(rank)) for rank in timeline.ranks) - 1
    numbers = [number for number in timeline.facts.beside if number < last]
    return from_mark(timeline, numbers[-1], numbers[-1] + 2).change_facts(beside=(), recorded=()) if numbers else None


def from_mark(timeline: Timeline, first: int, last: int | None = None) -> Timeline:
    """With only the marks of each rank from `first` on, and before `last`."""
    beside = [number for number in timeline.facts.beside if first <= number and (last is None or number < last)]
    marked = timeline.marked(timeline.marks_of(rank)[first:last] for rank in timeline.ranks)
    return marked.change_facts(beside=tuple(number - first for number in beside))


def _step_of_rows(timeline: Timeline) -> Ints:
    """For each row, the number of its step in its rank."""
    step, row, rank = np.full(len(timeline), NONE, np.int64), np.arange(len(timeline)), timeline.rank_of_rows
    for number in timeline.ranks:
        of_rank = rank == number
        step[of_rank] = np.searchsorted(timeline.marks_of(number), row[of_rank], side="right") - 1
    return step


def _cut(timeline: Timeline, count: int, chosen: Ints) -> Timeline:
    """Only the rows between the first and the last chosen of each rank's last `count` marks."""
    rank, row = timeline.rank_of_rows, np.arange(len(timeline))
    kept, marks = np.zeros(len(timeline), bool), []
    for number in timeline.ranks:
        chosen_marks = timeline.marks_of(number)[-count:][chosen]
        marks.append(chosen_marks[:-1])
        kept |= (rank == number) & (row >= chosen_marks[0]) & (row < chosen_marks[-1])
    cut = timeline.marked(marks).keep(kept)
    return cut.change(links=Links.concatenate([cut.links, _into_next_pass(timeline, kept)]))


def _into_next_pass(timeline: Timeline, kept: Mask) -> Links:
    """What the last step releases in the next one, as links to the same rows of the first step, in the next pass."""
    spans, links, new = timeline.spans, timeline.links, np.cumsum(kept) - 1
    leaving = links.take(kept[links.source] & ~kept[links.target] & (links.kind != LinkKind.LAUNCH))
    next_target = np.full(len(leaving), NONE, np.int64)
    for lane in np.unique(spans.lane[leaving.target]).tolist():
        of_lane, rows = np.flatnonzero(spans.lane[leaving.target] == lane), timeline.rows_of(lane)
        inside = rows[kept[rows]]
        place = np.searchsorted(rows, leaving.target[of_lane]) - np.searchsorted(rows, inside.max(initial=NONE)) - 1
        place = np.where(place < 0, len(inside), np.minimum(place, len(inside)))  # a damaged link may point back
        next_target[of_lane] = np.append(inside, NONE)[place]
    alike = (next_target != NONE) & (spans.name[next_target] == spans.name[leaving.target])
    alike &= spans.kind[next_target] == spans.kind[leaving.target]
    return leaving.take(alike).change(source=new[leaving.source[alike]], target=new[next_target[alike]])


def commands_between(timeline: Timeline, marks: Ints) -> Ints:
    rank = timeline.rank_of_rows
    before = np.concatenate([[0], np.cumsum(timeline.on_device & (rank == rank[marks[0]]))])
    return np.diff(before[marks])


def period(counts: Ints, places: Ints) -> int:
    """How many marks make one step: a loop with two optimizers marks each step twice, with different launches after
    each mark, or else with marks at different lines."""
    for values, difference in ((counts, OTHER_PART), (places, 0)):
        for length in range(2, (len(values) - 1) // 2 + 1):
            repeated = values[:length]
            if (values[:-length] == values[length:]).all() and max(repeated) > (1 + difference) * min(repeated):
                return length
    return 1


def _places(timeline: Timeline, marks: Ints) -> Ints:
    """A number for the program's own lines around each mark."""
    own = np.where(timeline.frames.owner == Owner.USER, timeline.frames.name, NONE)
    chains = [own[[*timeline.frames.around(frame)]] for frame in timeline.spans.frame[marks].tolist()]
    return np.unique([str(chain[chain != NONE].tolist()) for chain in chains], return_inverse=True)[1]


SAMPLED_ROWS = 36_000
"""The approximate size of a sample."""


def sample(timeline: Timeline, most_rows: int = SAMPLED_ROWS, apart: bool = False) -> Timeline:
    """Few enough steps to be replayed often: chosen evenly from the fastest to the slowest, in their order. Far longer
    steps, as with a checkpoint now and then, keep their share. `apart`: without these if they are rare."""
    usual, long, _ = _by_length(timeline)
    if apart and _are_rare(usual, long):
        long = long[:0]
    count = len(usual) + len(long)
    wanted = max(8, most_rows * count // max(1, len(timeline)))
    if count > wanted:
        of_long = max(1, round(wanted * len(long) / count)) if len(long) else 0
        of_usual = min(round(of_long * len(usual) / len(long)), _MOST_FOR_LONG * wanted) if of_long else wanted
        if of_long / (of_long + of_usual) > 2 * len(long) / count:  # too large a share: leaving them out errs less
            of_long, of_usual = 0, wanted
        usual, long = _evenly(usual, min(of_usual, len(usual))), _evenly(long, of_long)
    chosen = np.sort(np.concatenate([usual, long]))
    return timeline if len(chosen) == len(timeline.marks_of(timeline.ranks[0])) else _of_steps(timeline, chosen)


def rare_steps(timeline: Timeline, most_rows: int = SAMPLED_ROWS) -> tuple[Timeline, int] | None:
    """A sample of the rare steps that take far longer than others, and how many there are; None if there are none, or
    if they take next to no time."""
    usual, long, lengths = _by_length(timeline)
    share = lengths[long].sum() / max(1, lengths.sum())
    if not _are_rare(usual, long) or share < NOISE_OF_A_SCRIPT:
        return None
    rows = np.isin(_step_of_rows(timeline), long).sum()  # an evaluation may launch as much as a hundred steps
    wanted = max(_FEWEST_RARE, most_rows * len(long) // max(1, rows))
    return _of_steps(timeline, np.sort(_evenly(long, min(len(long), wanted)))), len(long)


def _are_rare(usual: Ints, long: Ints) -> bool:
    return 1 < len(long) < _RARE * len(usual)


def _by_length(timeline: Timeline) -> tuple[Ints, Ints, Ints]:
    """Usual steps, those that take far longer, and how long each takes, on the rank where it takes longest."""
    of_ranks = list[Ints]()
    for rank in timeline.ranks:
        marks = timeline.marks_of(rank)
        main = timeline.rows_of(timeline.spans.lane[marks[0]])
        lasts = main[np.append(np.searchsorted(main, marks[1:]), len(main)) - 1]  # others may be left out between steps
        of_ranks.append(timeline.spans.end[lasts] - timeline.spans.start[marks])
    lengths = np.max([of_rank for of_rank in of_ranks if len(of_rank) == len(of_ranks[0])], axis=0)
    order = np.argsort(lengths, kind="stable")
    usual, long = np.split(order, [int((lengths <= _FAR_LONGER * np.median(lengths)).sum())])
    return usual, long, lengths


def _of_steps(timeline: Timeline, chosen: Ints) -> Timeline:
    kept = np.isin(_step_of_rows(timeline), chosen)
    marks = timeline.marks[kept[timeline.marks]]
    return timeline.change(marks=marks).keep(kept).keep_frames(_frames_within(timeline, chosen))


_FAR_LONGER = 3.0
"""A step that takes so many times the median did something that most do not."""
_MOST_FOR_LONG = 4
"""At most so many times as many steps are replayed so that far longer ones have their share."""
_RARE = 0.05
"""If far longer steps are a smaller share of the others, they are explained by themselves."""
_FEWEST_RARE = 4


def _evenly(steps: Ints, count: int) -> Ints:
    return steps[(np.arange(count) * len(steps) + len(steps) // 2) // max(1, count)]


def _frames_within(timeline: Timeline, steps: Ints) -> Mask:
    """Which frames are open at some time in these steps of their rank."""
    frames, ranks = timeline.frames, timeline.rank_of_lanes
    within = np.zeros(len(frames), bool)
    for rank in timeline.ranks:
        marks, of_rank = timeline.marks_of(rank), np.flatnonzero(ranks[frames.lane] == rank)
        borders = np.append(timeline.spans.start[marks], np.iinfo(np.int64).max)
        before = np.append(0, np.cumsum(np.isin(np.arange(len(marks)), steps)))  # how many chosen steps precede each
        first = np.maximum(np.searchsorted(borders, frames.start[of_rank], side="right") - 1, 0)
        last = np.maximum(np.searchsorted(borders, frames.end[of_rank], side="right"), first + 1)
        within[of_rank] = before[np.minimum(last, len(marks))] > before[np.minimum(first, len(marks))]
    return within


def comes_again(timeline: Timeline) -> bool:
    """Whether most of the GPU's idle time in a script recurs in each of these iterations. If not, they were a warm-up,
    and the script is explained as one step."""
    marks, spans = timeline.marks_of(timeline.ranks[0]), timeline.spans
    kernels = np.flatnonzero((spans.kind == Kind.KERNEL) & (timeline.rank_of_rows == timeline.ranks[0]))
    if len(marks) < 2 or not len(kernels):
        return len(marks) < 2 or not timeline.facts.is_whole  # iterations without kernels are a setup
    kernels = kernels[np.argsort(spans.start[kernels], kind="stable")]
    reached = np.maximum.accumulate(spans.end[kernels])
    gap = np.maximum(0, spans.start[kernels[1:]] - reached[:-1])
    step_of_gap = np.searchsorted(marks, kernels[1:], side="right") - 1
    waits = np.bincount(step_of_gap[step_of_gap >= 0], gap[step_of_gap >= 0], len(marks))
    repeated = len(marks) * np.median(waits)
    return bool(waits.sum() - repeated <= max(repeated, NOISE_OF_A_SCRIPT * (reached[-1] - spans.start[kernels[0]])))


def has_steps(timeline: Timeline) -> bool:
    """Whether the run has marks of steps: an optimizer's, the profiler's or the program's own."""
    names = [number for number, name in enumerate(timeline.names) if name.startswith(STEP_MARKS)]
    return bool(np.isin(timeline.frames.name, names).any())


def by_pattern(timeline: Timeline) -> Timeline:
    """Marks for a run without any: where the pattern of its launches repeats."""
    return timeline.marked(_pattern(timeline, rank) for rank in timeline.ranks)


def _pattern(timeline: Timeline, rank: int) -> Ints:
    spans, launches = timeline.spans, timeline.launches
    rows, first = np.unique(launches.source, return_index=True)
    of_rank = timeline.rank_of_rows[rows] == rank
    rows, commands = rows[of_rank], launches.target[first[of_rank]]
    length = repetition(spans.name[commands])
    if not length:
        return np.zeros(0, np.int64)
    # a step begins where the host works longest before a launch: for input, bookkeeping or a read
    before = spans.start[rows[1:]] - spans.end[rows[:-1]]
    pauses = [float(np.median(before[offset::length])) for offset in range(length)]
    main = np.bincount(spans.lane[rows]).argmax()
    begin = 1 + int(np.argmax(pauses))
    steps = spans.name[commands[begin : begin + (len(commands) - begin) // length * length]].reshape(-1, length)
    repeats = np.flatnonzero((steps[1:] == steps[:-1]).all(axis=1))  # a program creates tensors before its loop
    chosen = rows[begin + length * (int(repeats[0]) if len(repeats) else 0) :: length]
    lane = timeline.rows_of(int(main))
    return np.unique(lane[np.minimum(np.searchsorted(lane, chosen), len(lane) - 1)])


def repetition(names: Ints) -> int:
    """After how many launches the sequence repeats itself, found by autocorrelation; 0 if it does not."""
    count = len(names)
    if count < 6:
        return 0
    signs = np.random.default_rng(0).choice([-1.0, 1.0], size=(4, int(names.max()) + 1))[:, names]
    spectrum = np.fft.rfft(signs, 2 * count, axis=1)
    alike = np.fft.irfft(spectrum * spectrum.conj(), axis=1)[:, :count].mean(axis=0) / (count - np.arange(count))
    alike = alike[: count // 2 + 1]
    near = np.flatnonzero(alike[1:] >= 0.97 * alike[1:].max(initial=0.0))[:64] + 1
    # two names may have the same signs, so candidates are compared name by name
    same = np.array([np.mean(names[length:] == names[:-length]) for length in near.tolist()])
    return int(near[same >= 0.97 * same.max()][0]) if same.max(initial=0.0) > 0.8 else 0


def without_first_steps(timeline: Timeline) -> Timeline:
    """Without the marks of the first steps, so that these are not explained.

    A whole run begins with the program, and its first steps allocate memory, buckets and states as no later step does.
    """
    marks = [timeline.marks_of(rank) for rank in timeline.ranks]
    if min(map(len, marks), default=0) < 4:
        return timeline
    first = max(_first_steady(timeline, of_rank) for of_rank in marks)
    return from_mark(timeline, first).change_facts(first_steps=first)


def _first_steady(timeline: Timeline, marks: Ints) -> int:
    """The first step that launches as much as later ones, and requests no more memory from the driver."""
    before = np.concatenate([[0], np.cumsum(timeline.spans.kind == Kind.ALLOCATE)])
    steps = np.setdiff1d(np.arange(len(marks) - 1), timeline.facts.beside)
    launches, allocations = commands_between(timeline, marks)[steps], np.diff(before[marks])[steps]
    settling = int(_SETTLING * len(launches))
    half = len(launches) - settling
    usual = set(launches[half:].tolist())
    for step in range(settling):
        if launches[step] in usual and allocations[step] <= allocations[half:].max():
            return int(steps[step])
    return int(steps[settling])
