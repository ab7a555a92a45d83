"""What the page looks like: its main views beside pictures that a person has looked at, with room for other fonts.

`KEEPBUSY_SNAPSHOTS=write` takes them anew; look at each before you commit it.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from test_page import COPY, HEALTHY, ITEM, LATE, drawing, html, told, with_memory

from keepbusy.explain.comparison import compare
from keepbusy.explain.diagnosis import CAUSES
from keepbusy.report.page import render, render_both

Image = pytest.importorskip("PIL.Image", reason="there is no Pillow: pip install pillow")
PICTURES = Path(__file__).parent / "pictures"
COARSE = 8
"""Pixels of the kept picture that are compared as one: letters may be drawn a little apart."""
ALIKE, LOCALLY = 4.0, 70.0
"""Of 255: by so much the pictures may differ on average, and any part of a hundred of it."""


class View(NamedTuple):
    html: Callable[[], str]
    part: str
    width: int = 1280
    scheme: str = "light"
    act: Callable[[Any], None] = lambda page: None


def first_fix(page: Any) -> None:
    page.locator("#plan .flip").first.click()


def open_it(page: Any) -> None:
    for summary in page.locator("main > section > details > summary").all():
        summary.click()


def gap_and_fix(page: Any) -> None:
    drawing(page).focus()
    page.keyboard.press("n")
    first_fix(page)


def both() -> str:
    return render_both(compare(told(ITEM), told(HEALTHY)), "item.busy", "healthy.busy")


WATCHED = "fourth/rank0_saves.busy"
PLANNED = LATE
VIEWS = {
    "timeline": View(lambda: html(ITEM), "#timeline", act=gap_and_fix),
    "timeline_dark": View(lambda: html(COPY), "#timeline", scheme="dark", act=first_fix),
    "timeline_narrow": View(lambda: html(ITEM), "#timeline", width=390, act=gap_and_fix),
    "timeline_of_two": View(both, "#timeline", act=first_fix),
    "first_screen": View(lambda: html(PLANNED), "#headline"),
    "first_screen_narrow": View(lambda: html(PLANNED), "#headline", width=390),
    "timeline_of_streams": View(lambda: html("prefetched.busy"), "#timeline"),
    "plan": View(lambda: html(COPY), "#plan", act=first_fix),
    "plan_narrow_dark": View(lambda: html(COPY), "#plan", width=390, scheme="dark"),
    "ledger": View(lambda: html(ITEM), "#ledger", act=first_fix),
    "run": View(lambda: html(WATCHED), "#run"),
    "run_narrow_dark": View(lambda: html(WATCHED), "#run", width=390, scheme="dark"),
    "changed": View(both, "#changed"),
    "changed_narrow_dark": View(both, "#changed", width=390, scheme="dark"),
    "ranks": View(lambda: html(LATE), "#ranks", act=open_it),
    "collectives_dark": View(lambda: html(LATE), "#collectives", scheme="dark", act=open_it),
    "memory": View(lambda: render(with_memory(told(ITEM))), "#memory", act=open_it),
    "memory_narrow_dark": View(
        lambda: render(with_memory(told(ITEM))), "#memory", width=390, scheme="dark", act=open_it
    ),
    "copies": View(lambda: html("live/pageable_copy.busy"), "#copies", act=open_it),
    "causes_narrow": View(lambda: html(COPY), "#causes", width=390),
}


def picture_of(page: Any, part: str) -> Any:
    page.evaluate("() => document.querySelector('nav').style.setProperty('position', 'static')")  # not on tall parts
    taken = Image.open(io.BytesIO(page.locator(part).screenshot())).convert("RGB")
    return taken.resize((taken.width * 2 // 3, taken.height * 2 // 3), Image.Resampling.BOX)


def coarse(picture: Any, size: tuple[int, int]) -> np.ndarray:
    return np.asarray(picture.resize(size, Image.Resampling.BOX), np.float64)


LOOKED_AT_FIRST = {"timeline", "first_screen_narrow", "plan_narrow_dark", "ranks"}
SWEEP = pytest.mark.sweep(room="report")


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in LOOKED_AT_FIRST else SWEEP) for name in VIEWS])
def test_a_view_looks_as_it_did(name: str, opened: Any) -> None:
    view = VIEWS[name]
    page = opened(view.html(), width=view.width, scheme=view.scheme)
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


@pytest.fixture(scope="module")
def colours(tabs: Any) -> dict[str, Callable[[tuple[str, ...]], list[str]]]:
    """By scheme: the page's colours of these names."""
    found = {}
    for scheme in ("light", "dark"):
        page = tabs.open(html(ITEM), scheme=scheme)
        known = dict(zip(NAMED, page.evaluate(COLOURS, NAMED), strict=True))
        found[scheme] = lambda names, known=known: [known[name] for name in names]
    return found


def test_letters_stand_out_from_what_they_stand_on(colours: Any) -> None:
    """WCAG AA: 4.5 to 1 for text, light and dark."""
    for scheme in ("light", "dark"):
        for ink, paper in (
            ("ink", "panel"),
            ("soft", "panel"),
            ("soft", "paper"),
            ("accent", "panel"),
            ("gain", "panel"),
            ("ink", "band-odd"),
            ("panel", "accent"),
        ):
            assert contrast(*colours[scheme]((ink, paper))) >= 4.5, (scheme, ink, paper)


def test_letters_on_colours_stand_out_as_well(colours: Any) -> None:
    """What is drawn on a canvas: each colour that bears letters, with the ink that is chosen for it."""
    for scheme in ("light", "dark"):
        for name, fill in zip(INKED, colours[scheme](INKED), strict=True):
            assert max(contrast(fill, "#101418"), contrast(fill, "#ffffff")) >= 4.5, (scheme, name)


COLOURS = "names => names.map(name => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim())"
SOLID = ("computing", "copying", "collective")
HOST = ("work", "launch", "sync", "allocate")
INKED = (*SOLID, *HOST, *(cause for cause in CAUSES))
NAMED = (*INKED, "ink", "soft", "panel", "paper", "accent", "gain", "band-odd")
BLIND = {
    "red": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "green": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "blue": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
"""How linear light is seen without cones for one colour (Machado, Oliveira and Fernandes, 2009)."""
APART = 12.0
"""Between two colours of CIE Lab: a just noticeable difference is 2.3."""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("blind", BLIND)
def test_who_sees_two_colours_alone_tells_work_apart(blind: str, scheme: str, colours: Any) -> None:
    """Gaps have hatches; what is solid is told by its colour alone."""
    for group in (SOLID, HOST):
        seen = [lab(np.array(BLIND[blind]) @ linear(colour)) for colour in colours[scheme](group)]
        for (one, first), (other, second) in combinations(zip(group, seen, strict=True), 2):
            assert np.linalg.norm(first - second) >= APART, (one, other)


def lab(light: np.ndarray) -> np.ndarray:
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    part = np.cbrt(np.clip(to_xyz @ np.clip(light, 0, 1) / [0.9505, 1, 1.089], 1e-6, None))
    return np.array([116 * part[1] - 16, 500 * (part[0] - part[1]), 200 * (part[1] - part[2])])


OVERLAPS = """() => {
  const leaves = [...document.querySelectorAll("main *, nav *")].filter(one => {
    if (one.closest(".flame, .strip, .bar, .source, canvas, #bubble, .unseen, .knob, .wide")) return false;
    const own = [...one.childNodes].some(node => node.nodeType === 3 && node.textContent.trim());
    return own && one.checkVisibility();
  });
  const boxes = leaves.flatMap(one => [...one.childNodes].filter(node => node.nodeType === 3 && node.textContent.trim())
    .flatMap(node => { const range = document.createRange(); range.selectNodeContents(node);
      return [...range.getClientRects()].map(box => ({ one, text: node.textContent, box })); }));
  const met = [];
  for (let i = 0; i < boxes.length; i++) for (let j = i + 1; j < boxes.length; j++) {
    const [a, b] = [boxes[i].box, boxes[j].box];
    const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left);
    const high = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
    const together = !boxes[i].one.closest("nav") === !boxes[j].one.closest("nav");  // the bar floats above the page
    if (wide > 2 && high > 6 && together) met.push([boxes[i].text, boxes[j].text]);
  }
  return met.slice(0, 5);
}"""


@pytest.mark.parametrize(
    "width", [320, 1280, *(pytest.param(width, marks=SWEEP) for width in (390, 640, 800, 1100, 1920))]
)
def test_no_words_overlap_however_far_one_zooms(width: int, opened: Any) -> None:
    """A page that is zoomed to twice its size is one of half the width."""
    page = opened(both() if width % 100 else html(LATE), width=width)
    if width % 100:  # of the other one nothing can be switched on
        first_fix(page)
    assert page.evaluate(OVERLAPS) == []
    assert page.evaluate("() => document.documentElement.scrollWidth") <= width


def contrast(one: str, other: str) -> float:
    bright, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)


def linear(colour: str) -> np.ndarray:
    parts = np.array(list(bytes.fromhex(colour[1:] if len(colour) == 7 else "".join(2 * c for c in colour[1:])))) / 255
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def luminance(colour: str) -> float:
    return float(linear(colour) @ [0.2126, 0.7152, 0.0722])


def test_no_two_causes_are_hatched_alike(opened: Any) -> None:
    """Whoever sees no colours sees hatches."""
    hatches = opened(html(ITEM)).evaluate("() => keepbusy.choice.moment.causes.map(cause => keepbusy.hatches[cause])")
    assert len(set(hatches)) == len(hatches) == 12
