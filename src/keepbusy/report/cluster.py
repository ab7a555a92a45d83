"""Very many ranks on a few lines: which of them, and which hosts, the others wait for, and what each of them costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from rich.console import RenderableType

from keepbusy.report import words
from keepbusy.report.paper import FAINT, GAIN, PLACE, STRONG, line
from keepbusy.report.words import duration, share, tame
from keepbusy.timeline.run_facts import Cluster, Straggler

NAMED = 8
"""Stragglers that have a line of their own."""
NEGLIGIBLE_SHARE = 0.02
"""Of a step: what less of it goes beyond what the slowest rank needs is not worth a sentence."""


def told(cluster: Cluster) -> Iterator[RenderableType]:
    """Who is late, then what the others are like."""
    yield line(("Who is late", STRONG), (f"   a step of these recordings takes {duration(cluster.step)}", FAINT))
    before = cluster.step
    for number, one in enumerate(cluster.stragglers[:NAMED], 1):
        where = "the GPU computes" if one.computing else "the host takes"
        yield line(
            f"{number}  ", (_who(one), PLACE), f": {where} {duration(one.late)} a step longer than elsewhere   ",
            (f"{words.transition(before, one.left)} without", GAIN),
        )  # fmt: skip
        before = one.left
    if more := cluster.stragglers[NAMED:]:
        ranks = sum(len(one.ranks) for one in more)
        yield line(f"   {len(more)} more, {ranks:,} ranks together: {words.transition(before, more[-1].left)}")
    if not cluster.stragglers:
        yield line("   No rank and no host takes much longer than the others of its kind.")
    yield line((" ".join(_of_the_others(cluster)), FAINT), indent=3)


def _who(one: Straggler) -> str:
    host = tame(one.host, 40)
    if len(one.ranks) == 1:
        return f"rank {one.ranks[0]}{f' on {host}' if host else ''}"
    return f"{host}, {len(one.ranks)} ranks ({_ranks(one.ranks)})"


def _ranks(ranks: Sequence[int]) -> str:
    whole = ranks[-1] - ranks[0] == len(ranks) - 1
    return f"{ranks[0]}–{ranks[-1]}" if whole else words.listing([str(rank) for rank in ranks])


def _of_the_others(cluster: Cluster) -> Iterator[str]:
    late = {rank for one in cluster.stragglers for rank in one.ranks}
    others = [one for one in cluster.ranks if one.rank not in late]
    hosts = len({one.host for one in others if one.host})
    on_hosts = f" on {hosts:,} hosts" if hosts > 1 else ""
    if others:
        own = sorted(one.own for one in others)
        name = f"The other {len(others):,}" if late else f"All {len(others):,}"
        yield (
            f"{name} ranks{on_hosts} take {words.span_of(own[0], own[-1], own[-1])} {duration(own[-1]).split()[-1]} "
            f"a step by themselves, and half of all ranks {duration(cluster.typical)} or less."
        )
    beyond = cluster.step - max(one.own for one in cluster.ranks)
    if beyond > NEGLIGIBLE_SHARE * cluster.step:
        part = f"{duration(beyond)} of the step ({share(beyond, cluster.step)})"
        yield f"{part} is more than the slowest needs: data travels, or now one comes last and now another."
    yield from _different_work(cluster)


def _different_work(cluster: Cluster) -> Iterator[str]:
    kinds = Counter(one.kind for one in cluster.ranks)
    if len(kinds) > 1:
        first = {kind: next(one.rank for one in cluster.ranks if one.kind == kind) for kind in kinds}
        each = [f"{count:,} like rank {first[kind]}" for kind, count in kinds.most_common(4)]
        yield f"By their collectives they do {len(kinds)} different things: {words.listing(each)}."
