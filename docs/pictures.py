"""The page in pictures, of recordings of an H200 that the tests keep.

`make pictures`; `python docs/pictures.py NAME…` draws those alone. Needs Chromium and Playwright.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path

from playwright.sync_api import Browser, Page, sync_playwright

from keepbusy.explain import explain
from keepbusy.report.page import render
from keepbusy.timeline.busy_file import load

ROOT = Path(__file__).parents[1]
TRUTH, OUT = ROOT / "tests" / "gpu" / "truth", ROOT / "docs" / "pictures"
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]


def as_it_opens(page: Page) -> None:
    """One iteration, or two."""


def switch_on(page: Page) -> None:
    page.locator("#plan .flip").first.click()


def longest_gap(page: Page) -> None:
    page.locator("#causes .card button", has_text="Show the longest").first.click()
    page.evaluate("() => keepbusy.panel.oneIteration()")


def gap_and_fix(page: Page) -> None:
    longest_gap(page)
    switch_on(page)


def longest_copy(page: Page) -> None:
    """On a stream of its own, beside what is computed meanwhile."""
    page.evaluate("""() => {
      const { panel } = keepbusy;
      const { scene } = panel.state;
      const track = scene.tracks.filter(one => one.kind === "stream").pop();
      const { start, end } = track.parts;
      const length = at => end[at] - start[at];
      const settled = Array.from(start.keys()).filter(at => Math.abs(start[at] / scene.length - 0.4) < 0.15);
      const longest = settled.reduce((one, other) => (length(other) > length(one) ? other : one));
      panel.viewport.show(start[longest] - 2 * length(longest), end[longest] + 3 * length(longest));
      panel.select({ track, part: longest }, panel.above);
    }""")


def open_memory(page: Page) -> None:
    page.locator("#memory summary").click()


PICTURES: dict[str, tuple[str, str, str, Callable[[Page], None]]] = {
    "sync": ("live/item_every_step.busy", "light", "#timeline", gap_and_fix),
    "copies": ("live/copy_in_line.busy", "light", "#timeline", gap_and_fix),
    "serialised": ("live/copy_in_line.busy", "light", "#timeline", as_it_opens),
    "overlapped": ("prefetched.busy", "light", "#timeline", longest_copy),
    "memory": ("prefetched.busy", "light", "#memory", open_memory),
    "two_ranks": ("third/rank0_accuracy.busy", "light", "#timeline", as_it_opens),
    "run": ("fourth/rank0_saves.busy", "light", "#run", as_it_opens),
    "late_rank": ("live/late_rank.busy", "dark", "#timeline", longest_gap),
}
"""Of each picture the recording, light or dark, what is shown of the page, and what is done before."""


def main() -> None:
    with (
        sync_playwright() as started,
        tempfile.TemporaryDirectory() as folder,
        chdir(ROOT),
    ):  # from where its program was run
        browser = started.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
        for name in sys.argv[1:] or PICTURES:
            recording, scheme, part, act = PICTURES[name]
            path = Path(folder) / f"{name}.html"
            path.write_text(render(explain(load(TRUTH / recording), turns=True)), encoding="utf-8")
            draw(browser, path, scheme, part, act, OUT / f"{name}.png")
        browser.close()


def draw(browser: Browser, page_file: Path, scheme: str, part: str, act: Callable[[Page], None], out: Path) -> None:
    page = browser.new_page(viewport={"width": 1280, "height": 1400}, color_scheme=scheme)  # type: ignore[arg-type]
    page.goto(page_file.as_uri())
    page.wait_for_selector("main:not([aria-busy])")
    act(page)
    page.evaluate("() => document.activeElement.blur()")
    page.wait_for_timeout(400)
    page.locator(part).screenshot(path=out)
    page.close()


if __name__ == "__main__":
    main()
