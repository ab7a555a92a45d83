"""An explanation shown, a run kept, as all verbs do it. Rooms are imported when needed: the command begins at once."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from keepbusy.cli.console.output import Screen, check_place, replacing, screen
from keepbusy.cli.console.sources import SAVED
from keepbusy.timeline.files import BadInput

if TYPE_CHECKING:
    from keepbusy.explain.comparison import Comparison
    from keepbusy.explain.diagnosis import Diagnosis
    from keepbusy.timeline.model import Timeline


def rendered(diagnosis: Diagnosis, json: bool, again: str, shape: Screen | None = None) -> str:
    if json:
        from keepbusy.report import as_json

        return as_json.render(diagnosis)
    from keepbusy.report import terminal

    shape = shape or screen()
    return terminal.render(
        diagnosis, shape.width, colour=shape.colour, unicode=shape.unicode, again=again, wrap=shape.is_terminal
    )


def rendered_comparison(done: Comparison, json: bool, shape: Screen | None = None) -> str:
    from keepbusy.report import as_json, terminal

    if json:
        return as_json.render_comparison(done)
    shape = shape or screen()
    return terminal.render_comparison(
        done, shape.width, colour=shape.colour, unicode=shape.unicode, wrap=shape.is_terminal
    )


def write_page(diagnosis: Diagnosis, path: Path, source: str) -> None:
    """Whole or not at all. `source`: what the reader knows the run by."""
    from keepbusy.report import page

    with replacing(path) as part:
        part.write_text(page.render(diagnosis, source), encoding="utf-8")


def write_comparison(done: Comparison, path: Path, before: str, after: str) -> None:
    """The same of two runs, as the user named them."""
    from keepbusy.report import page

    with replacing(path) as part:
        part.write_text(page.render_both(done, Path(before).name, Path(after).name), encoding="utf-8")


def check_name(path: Path) -> None:
    if path.suffix != SAVED:
        raise BadInput(f"--save {path}: a saved run is named *{SAVED}, so that it is known again.")
    check_place(path)


def save(timeline: Timeline, plain_step: int | None, path: Path) -> None:
    from keepbusy.timeline import busy_file

    if plain_step is not None:
        timeline = timeline.change_facts(plain_step=plain_step)
    busy_file.save(timeline, path)
