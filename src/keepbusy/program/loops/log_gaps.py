"""Stretches of a run that its log leaves out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from keepbusy.timeline.model import Ints, Mask


class LogGaps:
    """Stretches of a run in which its calls left no row. Recorded time passes in all others alone."""

    def __init__(self, begins: Sequence[int] = (), ends: Sequence[int] = ()) -> None:
        self.begins, self.ends = np.array(begins, np.int64), np.array(ends, np.int64)
        self._upto = np.concatenate([[0], np.cumsum(self.ends - self.begins)])
        """How much was left out before each, and in all."""

    def __len__(self) -> int:
        return len(self.begins)

    def __sub__(self, origin: int) -> LogGaps:
        """With times that count from there."""
        return LogGaps((self.begins - origin).tolist(), (self.ends - origin).tolist())

    @property
    def time(self) -> int:
        return int(self._upto[-1])

    def recorded(self, times: Ints) -> Ints:
        """The recorded time by then."""
        begun = np.searchsorted(self.begins, times, side="right")
        inside = np.append(0, self.ends)[begun] - times
        return times - self._upto[begun] + np.maximum(0, inside)

    def recorded_alone(self, times: Ints) -> Ints:
        """The same, of those moments that were recorded."""
        return self.recorded(times[~self.holds(times)])

    def recorded_at(self, time: int) -> int:
        return int(self.recorded(np.array([time]))[0])

    def holds(self, times: Ints) -> Mask:
        """Whether each lies in such a stretch."""
        begun = np.searchsorted(self.begins, times, side="right")
        return np.append(np.int64(np.iinfo(np.int64).min), self.ends)[begun] > times

    def real(self, recorded: Ints) -> Ints:
        """When so much recorded time had passed; of a moment at which a stretch was left out, its end."""
        return recorded + self._upto[np.searchsorted(self.begins - self._upto[:-1], recorded, side="right")]
