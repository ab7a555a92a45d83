"""`with keepbusy.record() as run`: records a block that uses a real GPU, from within its process."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Any

from keepbusy.log.program_log import start
from keepbusy.program.processes import make_folder
from keepbusy.timeline.files import BadInput
from keepbusy.timeline.model import Timeline

if TYPE_CHECKING:
    from keepbusy.log.program_log import ProgramLog


def record(memory: bool = False) -> Session:
    """Record what runs in a `with` block on a real GPU, and explain it afterwards.

    `memory`: record what takes the GPU's memory, too; the page draws it.
    """
    return Session(memory)


class Session:
    """Records what happens within the `with` block. Afterwards it can be explained as often as one likes."""

    def __init__(self, memory: bool = False) -> None:
        self._memory = memory
        self._log: ProgramLog | None = None
        self._why_not = "leave the `with keepbusy.record()` block first"

    def __enter__(self) -> Session:
        self.__dict__.pop("whole", None)
        self._folder = make_folder()
        self._log, self._why_not = start(self._folder, self._memory)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._log is not None:
            self._log.end()

    @cached_property
    def whole(self) -> Timeline:
        """The timeline of all that was recorded."""
        from keepbusy.log.logged_run import read_processes, timeline_of_processes

        if self._log is None or self._log.is_going_on:
            raise BadInput(f"there is nothing to explain: {self._why_not or 'leave the block first'}.")
        processes = read_processes(self._folder)
        if not processes:
            raise BadInput("this session used no GPU, so there is nothing that one could have waited for.")
        return timeline_of_processes(processes, "this session")

    @property
    def timeline(self) -> Timeline:
        """The iterations that were recorded, for example for `keepbusy.save`."""
        from keepbusy.timeline.steps import without_first_steps

        return without_first_steps(self.whole)

    def explain(self, what_if: Sequence[str] = (), workers: int | None = None) -> Any:
        """A `Diagnosis`: why the GPU waits. `print(keepbusy.render(...))` shows it."""
        import keepbusy

        return keepbusy.explain(self.timeline, what_if=what_if, workers=workers)
