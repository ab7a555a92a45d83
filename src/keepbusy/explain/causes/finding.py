"""What a finder returns: the edit that would fix its cause, and which row is to blame for each edited one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from keepbusy.explain.edit import Edit
from keepbusy.explain.scene import Scene
from keepbusy.timeline.model import NONE, Ints, Mask


@dataclass(frozen=True, eq=False)
class Finding:
    """A cause as it was found."""

    cause: str
    edit: Edit
    culprit: Ints  # of each row that the edit touches, the row to blame; NONE elsewhere
    count: int  # how often it was met

    @property
    def rows(self) -> Ints:
        """The rows to blame."""
        return np.unique(self.culprit[self.culprit != NONE])

    def only(self, rows: Ints) -> Edit:
        """The edit of these culprits alone."""
        return self.edit.only(np.isin(self.culprit, rows))

    def without(self, rows: Mask) -> Finding:
        """The same finding, but for what another one already tells."""
        culprit = np.where(rows, NONE, self.culprit)
        return Finding(self.cause, self.edit.only(~rows), culprit, len(np.unique(culprit[culprit != NONE])))


class Draft:
    """An edit being written down."""

    def __init__(self, cause: str, scene: Scene) -> None:
        self.cause, self.edit = cause, Edit.nothing(scene.timeline)
        self.culprit = np.full(len(scene.timeline), NONE, np.int64)

    def blame(self, rows: Ints, culprit: Ints | int) -> None:
        self.culprit[rows] = culprit

    def finding(self, count: int | None = None) -> Finding:
        """`count` where it is not the number of rows to blame."""
        culprit = np.where(self.edit.touched, self.culprit, NONE)
        met = len(np.unique(culprit[culprit != NONE])) if count is None else count
        return Finding(self.cause, self.edit, culprit, met)
