"""`with keepbusy.record() as run`: a stretch of a program, or of a notebook, looked at from within."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from keepbusy.timeline.errors import BadInput
from keepbusy.timeline.model import Timeline

if TYPE_CHECKING:
    from keepbusy.record.run import Run


class Session:
    """What happens within the `with` block is recorded; afterwards it can be explained, again and again."""

    def __init__(self, after: int | None) -> None:
        self._after = after
        self._run: Run | None = None
        self._timeline: Timeline | None = None

    def __enter__(self) -> Session:
        from keepbusy.record.run import Options, Run

        self._timeline = None
        self._run = Run(Options(after=self._after))
        self._run.begin()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._run is not None:
            self._run.end()

    @property
    def timeline(self) -> Timeline:
        """The recorded steps, for `keepbusy.save` and whoever likes to look himself."""
        if self._timeline is None:
            if self._run is None or self._run.is_going_on:
                raise BadInput("there is nothing to explain yet; leave the `with keepbusy.record()` block first.")
            self._timeline = self._run.timeline(source="this session")
            shutil.rmtree(self._run.folder, ignore_errors=True)
        return self._timeline

    def explain(self, mend: Sequence[str] = (), workers: int = 8) -> Any:
        """A `Diagnosis`: why the GPU waits. `print(keepbusy.render(...))` shows it."""
        import keepbusy

        return keepbusy.explain(self.timeline, mend=mend, workers=workers)
