"""keepbusy: which line of a PyTorch program makes the GPU wait, and what fixing it saves.

    timeline = keepbusy.read(["rank0.trace.json.gz"])
    diagnosis = keepbusy.explain(timeline, plain_step=25_000_000)  # nanoseconds
    print(keepbusy.render(diagnosis))

Names are loaded when they are first used: `import keepbusy` costs nothing.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from keepbusy.explain import explain as explain
    from keepbusy.explain.comparison import compare as compare
    from keepbusy.explain.diagnosis import Diagnosis
    from keepbusy.fix.gate.guard import TooManyWaits as TooManyWaits
    from keepbusy.fix.gate.guard import guard as guard
    from keepbusy.fix.source.step_parts import graph as graph
    from keepbusy.integrations.session import record as record
    from keepbusy.program import step as step
    from keepbusy.report.terminal import render_full as render_full
    from keepbusy.report.verdict import render as render
    from keepbusy.runtime.accumulate import accumulate as accumulate
    from keepbusy.runtime.agree import agree as agree
    from keepbusy.runtime.prefetch.prefetch_iterator import prefetch as prefetch
    from keepbusy.runtime.readback import readback as readback
    from keepbusy.runtime.save_later import save_later as save_later
    from keepbusy.runtime.spread.spread_model import spread as spread
    from keepbusy.timeline.busy_file import load as load
    from keepbusy.timeline.busy_file import save as save
    from keepbusy.timeline.model import Timeline
    from keepbusy.traces import read as read

__version__ = "0.2.0"

_HOMES = {
    "TooManyWaits": "keepbusy.fix.gate.guard",
    "accumulate": "keepbusy.runtime.accumulate",
    "agree": "keepbusy.runtime.agree",
    "compare": "keepbusy.explain.comparison",
    "explain": "keepbusy.explain",
    "guard": "keepbusy.fix.gate.guard",
    "graph": "keepbusy.fix.source.step_parts",
    "load": "keepbusy.timeline.busy_file",
    "prefetch": "keepbusy.runtime.prefetch.prefetch_iterator",
    "read": "keepbusy.traces",
    "readback": "keepbusy.runtime.readback",
    "record": "keepbusy.integrations.session",
    "render": "keepbusy.report.verdict",
    "render_full": "keepbusy.report.terminal",
    "save": "keepbusy.timeline.busy_file",
    "save_later": "keepbusy.runtime.save_later",
    "spread": "keepbusy.runtime.spread.spread_model",
    "step": "keepbusy.program",
}
__all__ = sorted(_HOMES)  # noqa: PLE0605


def in_a_notebook(shown: Timeline | Diagnosis) -> str | None:
    """A run, and what was explained, as a notebook shows them: the page, or nothing of what cannot be explained."""
    from keepbusy.explain import explain as explained
    from keepbusy.explain.diagnosis import Diagnosis
    from keepbusy.report.page import render as page
    from keepbusy.timeline.files import BadInput

    try:
        return page((shown if isinstance(shown, Diagnosis) else explained(shown)).with_turns())._repr_html_()
    except BadInput:
        return None


def load_ipython_extension(shell: Any) -> None:
    """By `%load_ext keepbusy`: the magic `%%keepbusy` runs a cell and explains it."""
    from keepbusy.integrations.notebook import load as load_magic

    load_magic(shell)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'keepbusy' has no attribute {name!r}")
    try:
        value = getattr(import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ImportError(
            f"keepbusy.{name} needs PyTorch, which {sys.executable} does not have; install it with "
            f"`{sys.executable} -m pip install 'torch>=2.9'`."
        ) from None
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


class _Verb(ModuleType):
    """A room that is called like the verb it holds: `keepbusy.explain` is both, and neither may hide the other."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return getattr(self, self.__name__.rpartition(".")[2])(*arguments, **options)


class _Package(ModuleType):
    """Importing a room hangs it here under its name, before or after the verb of that name was asked for."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _HOMES and isinstance(value, ModuleType):
            value.__class__ = _Verb
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
