"""What the page looks like: its main views beside pictures that a person has looked at, with room for other fonts.

`KEEPBUSY_SNAPSHOTS=write` takes them anew; look at each before you commit it.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from test_page import COPY, ITEM, drawing, html

Image = pytest.importorskip("PIL.Image", reason="there is no Pillow: pip install pillow")
PICTURES = Path(__file__).parent / "pictures"
COARSE = 8
"""Pixels of the kept picture that are compared as one: letters may be drawn a little apart."""
ALIKE, LOCALLY = 4.0, 70.0
"""Of 255: by so much the pictures may differ on average, and any part of a hundred of it."""


class View(NamedTuple):
    recording: str
    part: str
    width: int = 1280
    scheme: str = "light"
    act: Callable[[Any], None] = lambda page: None


def first_fix(page: Any) -> None:
    page.locator("#plan .flip").first.click()


def gap_and_fix(page: Any) -> None:
    drawing(page).focus()
    page.keyboard.press("n")
    first_fix(page)


VIEWS = {
    "turn": View(ITEM, "#turn", act=gap_and_fix),
    "turn_dark": View(COPY, "#turn", scheme="dark", act=first_fix),
    "turn_narrow": View(ITEM, "#turn", width=390, act=gap_and_fix),
    "plan": View(COPY, "#plan", act=first_fix),
    "plan_narrow_dark": View(COPY, "#plan", width=390, scheme="dark"),
    "ledger": View(ITEM, "#ledger", act=first_fix),
}


def picture_of(page: Any, part: str) -> Any:
    page.wait_for_timeout(300)  # a switch slides
    taken = Image.open(io.BytesIO(page.locator(part).screenshot())).convert("RGB")
    return taken.resize((taken.width * 2 // 3, taken.height * 2 // 3), Image.Resampling.BOX)


def coarse(picture: Any, size: tuple[int, int]) -> np.ndarray:
    return np.asarray(picture.resize(size, Image.Resampling.BOX), np.float64)


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_looks_as_it_did(name: str, opened: Any) -> None:
    view = VIEWS[name]
    page = opened(html(view.recording), width=view.width, scheme=view.scheme)
    view.act(page)
    page.evaluate("() => document.activeElement.blur()")
    taken, kept = picture_of(page, view.part), PICTURES / f"{name}.png"
    if os.environ.get("KEEPBUSY_SNAPSHOTS") == "write":
        PICTURES.mkdir(exist_ok=True)
        taken.save(kept, optimize=True)
    known = Image.open(kept).convert("RGB")
    assert abs(taken.width - known.width) <= 2
    assert abs(taken.height - known.height) <= 0.08 * known.height
    size = (known.width // COARSE, known.height // COARSE)
    apart = np.abs(coarse(taken, size) - coarse(known, size)).mean(axis=2)
    assert apart.mean() <= ALIKE
    assert np.quantile(apart, 0.99) <= LOCALLY


def test_letters_stand_out_from_what_they_stand_on(opened: Any) -> None:
    """WCAG AA: 4.5 to 1 for text, light and dark."""
    for scheme in ("light", "dark"):
        page = opened(html(ITEM), scheme=scheme)
        for ink, paper in (
            ("--ink", "--panel"),
            ("--soft", "--panel"),
            ("--soft", "--paper"),
            ("--accent", "--panel"),
            ("--gain", "--panel"),
            ("--ink", "--band-odd"),
            ("--panel", "--accent"),
        ):
            colours = page.evaluate(
                "names => names.map(name => getComputedStyle(document.documentElement).getPropertyValue(name).trim())",
                [ink, paper],
            )
            assert contrast(*colours) >= 4.5, (scheme, ink, paper)


def contrast(one: str, other: str) -> float:
    bright, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)


def luminance(colour: str) -> float:
    parts = np.array(list(bytes.fromhex(colour[1:] if len(colour) == 7 else "".join(2 * c for c in colour[1:]))))
    linear = np.where(parts / 255 <= 0.04045, parts / 255 / 12.92, ((parts / 255 + 0.055) / 1.055) ** 2.4)
    return float(linear @ [0.2126, 0.7152, 0.0722])


def test_no_two_causes_are_hatched_alike(opened: Any) -> None:
    """Whoever sees no colours sees hatches."""
    hatches = opened(html(ITEM)).evaluate("() => keepbusy.choice.moment.causes.map(cause => keepbusy.hatches[cause])")
    assert len(set(hatches)) == len(hatches) == 12
