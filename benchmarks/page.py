"""The page of a million spans: how large it is, when it first shows, and how many frames a second panning has.

    python benchmarks/page.py [SPANS]

Turns of a real recording (a launch-bound loop on an H200) are laid behind one another until there are so many spans,
each time moved by less than a microsecond by chance, so that nothing is smaller than it would be.
Needs Playwright and Chromium, which draws without a GPU here.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from playwright.sync_api import Page, sync_playwright

from keepbusy.explain.diagnosis import Diagnosis, Prediction
from keepbusy.explain.step_analysis import turns_of
from keepbusy.report.page import render
from keepbusy.timeline.busy_file import load, to_bytes
from keepbusy.timeline.model import NONE, Frames, Links, Spans, Timeline
from keepbusy.timeline.steps import whole_steps

RECORDING = Path(__file__).parents[1] / "tests" / "gpu" / "truth" / "live" / "launch_bound.busy"
JITTER = 400
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
PANNING = """async (seconds) => {
  const { panel } = keepbusy;
  const wide = panel.state.to - panel.state.from;
  let frames = 0;
  const began = performance.now();
  while (performance.now() - began < 1000 * seconds) {
    panel.viewport.pan(panel.state.to > panel.state.scene.length ? -0.8 * panel.state.scene.length / wide : 0.01);
    await new Promise(requestAnimationFrame);
    frames++;
  }
  return frames / ((performance.now() - began) / 1000);
}"""


def behind_one_another(timeline: Timeline, times: int) -> Timeline:
    """The same turns so many times; each begins where the one before ended."""
    spans, links, frames = timeline.spans, timeline.links, timeline.frames
    length, rows, held = int(spans.end.max() - spans.start.min()), len(spans), len(frames)
    chance = np.random.default_rng(0).integers(0, JITTER, (2, times, rows))
    inside = links.take(np.flatnonzero(links.source < links.target))
    return timeline.change(
        spans=Spans.concatenate(
            [
                spans.change(
                    start=spans.start + turn * length + chance[0, turn],
                    end=spans.end + turn * length + JITTER + chance[1, turn],
                    frame=np.where(spans.frame == NONE, NONE, spans.frame + turn * held),
                )
                for turn in range(times)
            ]
        ),
        links=Links.concatenate(
            [
                inside.change(source=inside.source + turn * rows, target=inside.target + turn * rows)
                for turn in range(times)
            ]
        ),
        frames=Frames.concatenate(
            [
                frames.change(
                    start=frames.start + turn * length,
                    end=frames.end + turn * length,
                    parent=np.where(frames.parent == NONE, NONE, frames.parent + turn * held),
                )
                for turn in range(times)
            ]
        ),
        marks=np.concatenate([timeline.marks + turn * rows for turn in range(times)]),
    )


def page_of(timeline: Timeline) -> str:
    step = int((timeline.spans.end.max() - timeline.spans.start.min()) / len(timeline.marks))
    known = Prediction(step, step, step)
    turns = turns_of(timeline, 1.0, (), 0)
    return render(Diagnosis(step, False, step, len(timeline.marks), {"computing": step}, (), (), known, 0, turns=turns))


def main(wanted: int) -> None:
    whole = whole_steps(load(RECORDING))
    timeline = behind_one_another(whole, -(-wanted // len(whole)))
    began = time.perf_counter()
    text = page_of(timeline)
    took = time.perf_counter() - began
    print(f"{len(timeline):,} spans, {len(timeline.links):,} links, {len(timeline.marks)} turns")
    kept = len(to_bytes(timeline)) / 1e6
    print(f"page       {len(text) / 1e6:.1f} MB, written in {took:.1f} s (a .busy file: {kept:.1f} MB)")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as started:
        path = Path(folder) / "run.html"
        path.write_text(text, encoding="utf-8")
        browser = started.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        began = time.perf_counter()
        page.goto(path.as_uri())
        page.wait_for_selector("main:not([aria-busy])")
        ready = time.perf_counter() - began
        report(page, ready)
        browser.close()


def report(page: Page, ready: float) -> None:
    paint = page.evaluate("() => performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? 0")
    print(f"shows      first paint {paint / 1e3:.1f} s, the timeline {ready:.1f} s after opening")
    for name, look in (("one turn", "oneTurn()"), ("ten turns", "viewport.zoom(10)"), ("everything", "viewport.all()")):
        page.evaluate(f"() => keepbusy.panel.{look}")
        print(f"panning    {name:11} {page.evaluate(PANNING, 3):5.1f} frames a second")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000)
