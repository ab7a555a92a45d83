"""A training that is recorded from within its own process, as the callbacks of trainers do it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from keepbusy.explain.diagnosis import Diagnosis
from keepbusy.instrument import ENDED
from keepbusy.integrations.trackers import PAGE, page_of
from keepbusy.timeline.errors import BadInput
from keepbusy.timeline.model import Timeline


class WatchedTraining:
    """From `begin` to `end`: on a real GPU recorded, on a virtual one taken from its clock.

    It is no reason for a training to fail: whatever goes wrong is one sentence on standard error.
    """

    def __init__(self) -> None:
        self.diagnosis: Diagnosis | None = None
        self._session: Any = None
        self._is_on = False

    def begin(self) -> None:
        import torch

        import keepbusy

        if self._is_on:
            return
        if not torch.cuda.is_available():
            _say("there is no GPU here, so nothing is recorded; `keepbusy run` lends a virtual one")
        elif _machine() is not None:
            self._is_on = True
        elif not ENDED:  # else `keepbusy run` looks on already, and its report follows
            self._is_on, self._session = True, keepbusy.record()
            self._session.__enter__()

    def end(self, folder: str | Path) -> Diagnosis | None:
        """What was found, once; its page lies in that folder."""
        import keepbusy

        if not self._is_on:
            return None
        self._is_on = False
        page = Path(folder) / PAGE
        try:
            self.diagnosis = keepbusy.explain(_steady(self._timeline()))
            page.parent.mkdir(parents=True, exist_ok=True)
            page.write_text(page_of(self.diagnosis), encoding="utf-8")
        except Exception as error:
            known = isinstance(error, BadInput | OSError)
            _say(str(error) if known else f"a bug of keepbusy: {type(error).__name__}: {error}")
        else:
            _say(f"{page} shows for what the GPU waited")
        return self.diagnosis

    def leave(self) -> Timeline | None:
        """What happened, once, for somebody who brings several ranks together."""
        if not self._is_on:
            return None
        self._is_on = False
        return self._timeline()

    def _timeline(self) -> Timeline:
        source = Path(sys.argv[0]).name or "this training"
        machine = _machine()
        if machine is None:
            self._session.__exit__(None, None, None)
            timeline: Timeline = self._session.timeline
            return timeline.change_facts(source=source)
        whole: Timeline = machine.clock.timeline(**machine.facts(), source=source)
        return whole


def _steady(timeline: Timeline) -> Timeline:
    """A virtual run begins with the program; a recording does not."""
    if not timeline.facts.virtual:
        return timeline
    from keepbusy.virtual.virtual_run import steady

    return steady(timeline)


def _machine() -> Any:
    """The virtual one of this process, if it has one."""
    module = sys.modules.get("keepbusy.virtual.machine")
    return module.MACHINE if module and hasattr(module.MACHINE, "clock") else None


def _say(sentence: str) -> None:
    sys.stderr.write(f"keepbusy: {sentence.rstrip('.')}.\n")
