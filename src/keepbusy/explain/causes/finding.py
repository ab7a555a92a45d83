"""What a finder returns: the edit that would fix its cause, and which row is to blame for each edited one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from keepbusy.explain.edit import UNCHANGED, Edit
from keepbusy.explain.scene import Scene
from keepbusy.timeline.model import NONE, Ints, Mask


@dataclass(frozen=True, eq=False)
class Finding:
    """A cause as it was found."""

    cause: str
    edit: Edit
    owner: Ints  # of each row that the edit touches, the row to blame; NONE elsewhere
    seen: int  # how often it was met

    @property
    def rows(self) -> Ints:
        """The rows to blame."""
        return np.unique(self.owner[self.owner != NONE])

    def only(self, rows: Ints) -> Edit:
        """The edit of these culprits alone."""
        return self._restricted(np.isin(self.owner, rows))

    def without(self, rows: Mask) -> Finding:
        """The same finding, but for what another one already tells."""
        owner = np.where(rows, NONE, self.owner)
        return Finding(self.cause, self._restricted(~rows), owner, len(np.unique(owner[owner != NONE])))

    def _restricted(self, mine: Mask) -> Edit:
        edit = self.edit
        return Edit(
            edit.free & mine,
            edit.gone & mine,
            np.where(mine, edit.work, UNCHANGED),
            np.where(mine, edit.beside, 0),
            edit.captured & mine,
            np.where(mine, edit.scale, 1.0),
        )


class Draft:
    """An edit being written down."""

    def __init__(self, cause: str, scene: Scene) -> None:
        self.cause, self.edit = cause, Edit.nothing(scene.timeline)
        self.owner = np.full(len(scene.timeline), NONE, np.int64)

    def blame(self, rows: Ints, owner: Ints | int) -> None:
        self.owner[rows] = owner

    def done(self, seen: int | None = None) -> Finding:
        """`seen` where it is not the number of rows to blame."""
        owner = np.where(self.edit.touched, self.owner, NONE)
        return Finding(self.cause, self.edit, owner, len(np.unique(owner[owner != NONE])) if seen is None else seen)
