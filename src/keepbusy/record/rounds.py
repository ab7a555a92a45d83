"""Several optimizers make one step: the round in which each of them has stepped."""

from __future__ import annotations

GOES_ON, ENDS, BEGINS = 0, 1, 2
"""A round goes on; it ends, and with it a step; or rounds begin anew here, and what lies before was no step."""
PATIENCE = 8


class Rounds:
    """Whoever steps is told by number, which may be that of any object.

    Who has not been heard of while another one stepped `patience` times is not part of the round any more. Should it
    come back (a critic may well step ten times as often as its generator), the patience was too short.
    """

    def __init__(self) -> None:
        self._known: set[int] = set()
        self._stepped: dict[int, int] = {}
        self._missed: set[int] = set()
        self._patience = PATIENCE
        self._only: int | None = None
        self._fresh = True

    def ended(self, who: int) -> int:
        """Whether a round ends as this one has stepped: GOES_ON, ENDS or BEGINS."""
        if who == self._only:  # most programs have a single one
            return ENDS
        verdict = self._among(who)
        self._only = who if self._known == {who} else None
        return verdict

    def _among(self, who: int) -> int:
        if who in self._missed:
            self._missed.discard(who)
            self._patience *= 4
        self._known.add(who)
        self._stepped[who] = self._stepped.get(who, 0) + 1
        if len(self._stepped) == len(self._known):
            return self._next(BEGINS if self._fresh else ENDS)
        if self._stepped[who] > self._patience:
            self._missed |= self._known - self._stepped.keys()
            self._known = set(self._stepped)
            return self._next(BEGINS)
        return GOES_ON

    def _next(self, verdict: int) -> int:
        self._stepped.clear()
        self._fresh = False
        return verdict
