"""Spans before they stand in issue order."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from keepbusy.timeline.model import Ints, Spans


@dataclass(frozen=True, eq=False)
class Rows:
    """`key` is when a span was issued. `turn` settles ties: a wait for room, the call, its commands, its wait."""

    spans: Spans
    key: Ints
    turn: Ints

    @staticmethod
    def of(spans: Spans, key: Ints | None = None, turn: int = 0) -> Rows:
        return Rows(spans, spans.start if key is None else key, np.full(len(spans), turn, np.int64))

    @staticmethod
    def concatenate(parts: list[Rows]) -> Rows:
        return Rows(
            Spans.concatenate([part.spans for part in parts]),
            np.concatenate([part.key for part in parts]),
            np.concatenate([part.turn for part in parts]),
        )

    def in_issue_order(self) -> tuple[Spans, Ints]:
        """The spans sorted, and where each of them went."""
        order = np.lexsort((self.turn, self.key))
        place = np.empty(len(order), np.int64)
        place[order] = np.arange(len(order))
        return self.spans.take(order), place
