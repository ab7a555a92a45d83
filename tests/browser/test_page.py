"""The page in a browser: that it opens, and that zooming, selecting, searching and switching fixes do what they say."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from build import HOME, MB, Run

from keepbusy.explain import explain
from keepbusy.explain.comparison import compare
from keepbusy.explain.diagnosis import Diagnosis, LoopDiagnosis
from keepbusy.report import verdict
from keepbusy.report.page import render, render_both
from keepbusy.timeline.busy_file import load
from keepbusy.timeline.model import MemoryUse
from keepbusy.timeline.races import STREAMS as BETWEEN_STREAMS
from keepbusy.timeline.races import DataRace, RacingUse
from keepbusy.timeline.run_facts import IMPORTS, LOOP, RUN, Part
from keepbusy.timeline.steps import as_one_step
from keepbusy.traces import read

TRUTH = Path(__file__).parents[1] / "gpu" / "truth"
TRACE = TRUTH.parents[1] / "snapshots" / "traces" / "images.trace.json.gz"
STATE = """() => {
  const { from, to, spot, found, recorded } = keepbusy.panel.state;
  return { from, to, found, recorded, kind: spot && spot.track.kind, part: spot && spot.part };
}"""


@functools.cache
def told(path: str) -> Diagnosis:
    return explain(load(TRUTH / path), turns=True)


@functools.cache
def html(path: str) -> str:
    return render(told(path), Path(path).name)


ITEM, COPY, LATE = "live/item_every_step.busy", "live/copy_in_line.busy", "fourth/both_late.busy"
HEALTHY = "live/healthy.busy"


@pytest.fixture
def item(opened: Any) -> Any:
    return opened(html(ITEM))


@pytest.fixture(scope="module")
def opened_once(tabs: Any) -> Any:
    """In a tab of its own."""
    return tabs.open(html(ITEM), device_scale_factor=1)


@pytest.fixture
def shared(opened_once: Any, tabs: Any) -> Iterator[Any]:
    """For who leaves nothing selected or switched on: to open the page takes longer than they do."""
    tabs.complaints.clear()
    opened_once.evaluate("() => keepbusy.panel.viewport.all()")
    yield opened_once
    assert tabs.complaints == []


def state(page: Any) -> dict[str, Any]:
    return page.evaluate(STATE)


def drawing(page: Any, number: int = 0) -> Any:
    return page.locator("#timeline .view canvas").nth(number)


def test_it_begins_with_the_verdict(shared: Any) -> None:
    said = verdict.summary(told(ITEM))
    [fix] = said.items
    shown = shared.locator("#headline").inner_text().split("\n\n")
    assert shown == [said.header, "18.0 → 13.2 ms per iteration", f"{fix.fix} at {fix.place}", said.statement]
    assert shared.title() == "item_every_step.busy · keepbusy"


@pytest.mark.parametrize("name", ["public/vae.stalled.busy", LATE, COPY])
def test_the_page_and_the_terminal_say_the_same(name: str, opened: Any) -> None:
    """Also how many more places there are, and what all fixes save together."""
    page, said = opened(html(name)), verdict.summary(told(name))
    rows = page.locator("#plan .entry")
    assert rows.count() == len(said.items) > 0
    for number, item in enumerate(said.items):
        text = rows.nth(number).inner_text()
        assert [part for part in item if part not in text] == []
    assert said.total in page.locator("#plan").inner_text()
    terminal = verdict.render(told(name), width=200)
    shown = page.locator("#headline").inner_text().split("\n\n")
    assert shown[1].removesuffix(" per iteration").split(" every ")[0] in terminal
    assert shown[3] in " ".join(terminal.split())


def test_a_run_with_nothing_to_save_says_so_first(opened: Any) -> None:
    page = opened(html(HEALTHY))
    assert page.locator("h1").inner_text() == verdict.statement(told(HEALTHY))
    assert page.locator("#plan").count() == page.locator("#causes").count() == 0


def test_the_ledger_sums_to_the_step(shared: Any) -> None:
    shares = shared.locator("#ledger .bar .part").evaluate_all(
        "parts => parts.map(part => parseFloat(part.style.flexBasis))"
    )
    assert sum(shares) == pytest.approx(100, abs=0.01)


def test_a_fix_that_is_switched_on_shows_the_step_that_was_predicted(shared: Any) -> None:
    fix = told(ITEM).plan[0]
    shared.locator("#plan .flip").first.click()
    assert f"takes {fix.predicted.step / 1e6:.1f} ms" in shared.locator("#plan .result").inner_text()
    assert drawing(shared, 1).is_visible()
    assert shared.evaluate("() => keepbusy.choice.then.step") == fix.predicted.step
    shared.locator("#plan .flip").first.click()
    assert not drawing(shared, 1).is_visible()


def test_a_gap_has_its_line_and_what_ends_it(item: Any) -> None:
    drawing(item).focus()
    item.keyboard.press("n")
    said = item.locator(".selected .said").inner_text()
    assert re.match(r"The GPU is idle for [45]\.\d+ ms: host sync at .*item_every_step\.py:25", said)
    assert "It ends when aten::to at stallbench/cases/item_every_step.py:18 launches" in said
    assert item.locator(".source li.chosen").get_attribute("data-line") == "25"


def test_keys_and_wheel_zoom_and_pan(shared: Any) -> None:
    before = state(shared)
    drawing(shared).focus()
    shared.keyboard.press("+")
    closer = state(shared)
    assert closer["to"] - closer["from"] == pytest.approx((before["to"] - before["from"]) / 1.6)
    shared.keyboard.press("ArrowRight")
    assert state(shared)["from"] > closer["from"]
    shared.keyboard.press("0")
    assert state(shared)["from"] < 0
    drawing(shared).hover()
    shared.mouse.wheel(0, -600)
    shared.wait_for_function(
        "() => keepbusy.panel.state.to - keepbusy.panel.state.from < 0.6 * keepbusy.panel.state.scene.length"
    )


def test_a_drag_moves_what_is_seen(shared: Any) -> None:
    drawing(shared).scroll_into_view_if_needed()
    box, before = drawing(shared).bounding_box(), state(shared)
    shared.mouse.move(box["x"] + 500, box["y"] + 60)
    shared.mouse.down()
    shared.mouse.move(box["x"] + 300, box["y"] + 60, steps=4)
    shared.mouse.up()
    after = state(shared)
    assert after["from"] > before["from"]
    assert after["to"] - after["from"] == pytest.approx(before["to"] - before["from"])


def test_a_search_counts_what_it_finds_and_goes_there(item: Any) -> None:
    turns = told(ITEM).turns
    item.locator("#search").fill("cudaStreamSynchronize")
    names = np.array(["cudaStreamSynchronize" in name for name in turns.timeline.names])
    assert state(item)["found"] == names[turns.timeline.spans.name].sum()
    item.keyboard.press("Enter")
    assert "Python waits here for" in item.locator(".selected .said").inner_text()


def test_a_line_of_the_source_comes_into_view(item: Any) -> None:
    item.locator('.source li[data-line="9"] button').click()
    assert item.evaluate("() => keepbusy.choice.moment.places[keepbusy.panel.above.marked.place].line") == 9


def test_what_was_recorded_is_shown_as_it_was(item: Any) -> None:
    item.locator("#timeline select").first.select_option("recorded")
    timeline = told(ITEM).turns.timeline
    assert item.evaluate("() => Array.from(keepbusy.panel.state.scene.end)") == (
        (timeline.spans.end - timeline.spans.start[timeline.marks[0]]).tolist()
    )


def test_ranks_have_their_lanes_and_the_late_one_is_a_stripe(opened: Any) -> None:
    page = opened(html(LATE))
    assert page.evaluate("() => new Set(keepbusy.panel.state.scene.tracks.map(track => track.rank)).size") == 2
    assert "the latest arrives" in page.locator("#ranks").inner_text()
    page.locator("#ranks summary").click()
    page.locator("#collectives summary").click()
    assert page.locator("#ranks").inner_text().count("Rank 0 arrives") >= 1
    waiting = page.locator("#collectives tbody tr").first.inner_text().split("\t")
    assert waiting[2:6] == ["2 times", "15.4 kB", "19 µs", "3.0 ms"]


def test_pointing_at_a_lane_a_colour_or_a_word_says_what_it_is(item: Any) -> None:
    canvas, bubble = drawing(item), item.locator("#bubble")
    canvas.scroll_into_view_if_needed()
    tracks = item.evaluate("() => keepbusy.panel.state.scene.tracks.map(track => [track.label, track.y, track.height])")
    for label, y, height in tracks:
        canvas.hover(position={"x": 30, "y": y + height / 2})
        assert re.match(rf"{re.escape(label)}: [A-Z].*\.$", bubble.inner_text()), label
    canvas.focus()
    item.keyboard.press("n")
    gap, y, height = item.evaluate(
        """() => { const { track, part } = keepbusy.panel.state.spot, { above } = keepbusy.panel;
        return [above.x((track.parts.start[part] + track.parts.end[part]) / 2), track.y, track.height]; }"""
    )
    canvas.hover(position={"x": gap, "y": y + height / 2})
    assert "Python blocks on the GPU, which then idles." in bubble.inner_text()
    item.locator("#timeline .legend li", has_text="launch").first.hover()
    assert bubble.inner_text() == "The call that hands the GPU its next kernel or copy."
    item.locator("#timeline .term", has_text="gap").hover()
    assert bubble.inner_text() == "A time in which the GPU is idle."


def test_a_copy_is_held_against_what_the_link_carries(opened: Any) -> None:
    page = opened(html("live/pageable_copy.busy"))
    rate = page.locator("#copies .rate").first
    assert "the link carries 52.0 GB/s from pinned memory" in rate.get_attribute("data-says")
    share = rate.locator(".meter span").evaluate("one => parseFloat(one.style.width)")
    assert share == pytest.approx(100 * 10.1 / 52, abs=0.5)


def test_copies_are_told_with_their_bandwidth(opened: Any) -> None:
    page = opened(html(COPY))
    page.locator("#copies summary").click()
    row = page.locator("#copies tbody tr").first.inner_text()
    assert "host to device · pinned" in row
    assert "copy not overlapped" in row


def with_memory(said: Diagnosis) -> Diagnosis:
    """Each turn takes 2 GB at its beginning, and gives them back in its middle; 1 GB is held throughout."""
    timeline = said.turns.timeline
    begun = np.repeat(timeline.spans.start[timeline.marks], 2) + np.tile([1_000, 9_000_000], len(timeline.marks))
    size = np.tile([2 * 10**9, -2 * 10**9], len(timeline.marks))
    held = MemoryUse.of(
        len(size), time=begun, block=np.full(len(size), 7), size=size, allocated=10**9 + np.maximum(size, 0)
    )
    held = held.change(reserved=np.full(len(size), 4 * 10**9))
    return replace(said, turns=replace(said.turns, timeline=timeline.change(memory=held)))


def test_memory_is_told_over_time_and_by_the_line_that_holds_the_peak(opened: Any) -> None:
    page = opened(render(with_memory(told(ITEM))))
    page.locator("#memory summary").click()
    assert "At most 3 GB allocated of 4 GB reserved" in page.locator("#memory").inner_text()
    first = page.locator("#memory .holders tr").first.inner_text()
    assert re.match(r"stallbench/\S+:\d+\s+2 GB\s+67%", first)
    assert "by an unknown line\t1 GB" in page.locator("#memory .holders tr").last.inner_text()
    canvas = page.locator("#memory canvas")
    canvas.hover(position={"x": 3, "y": 20})
    assert "3 GB allocated of 4 GB reserved" in canvas.get_attribute("data-says")


def test_dark_and_light_change_at_a_switch(shared: Any) -> None:
    paper = "() => getComputedStyle(document.body).backgroundColor"
    light = shared.evaluate(paper)
    shared.get_by_role("button", name="Dark").click()
    assert shared.evaluate(paper) != light
    shared.get_by_role("button", name="Light").click()
    assert shared.evaluate(paper) == light


def test_the_tour_has_five_steps(shared: Any) -> None:
    shared.get_by_role("button", name="Tour").click()
    for number in range(1, 6):
        assert f"{number} of 5" in shared.locator("dialog.tour").inner_text()
        shared.locator("dialog.tour .primary").click()
    assert shared.locator("dialog.tour").count() == 0


@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_is_wider_than_the_screen(opened: Any, width: int) -> None:
    page = opened(html(LATE), width=width)
    assert page.evaluate("() => document.documentElement.scrollWidth") <= width


def test_a_diagnosis_without_turns_is_a_page_as_well(opened: Any) -> None:
    page = opened(render(explain(load(TRUTH / COPY)), "copy_in_line"))
    assert page.locator("#ledger .bar").count() == 1
    assert page.locator("#timeline").count() == 0


HOSTILE = (
    "</script><script>window.hacked = 1</script>",
    '"><img src=x onerror="window.hacked = 1">',
    "'`${window.hacked = 1}`<!--<script>",
    "javascript:window.hacked=1//\u2028\u202e\ud800\x00\x1b[2J{block}%s",
)


def hostile() -> Diagnosis:
    """A real run whose every name and sentence is an attack, one of them very long."""
    said = told(COPY)
    names = tuple(f"{HOSTILE[index % 4]} {name}" for index, name in enumerate(said.turns.timeline.names))
    names = (names[0] + HOSTILE[0] * 300_000, *names[1:])
    lanes = tuple(lane._replace(name=HOSTILE[1] + lane.name) for lane in said.turns.timeline.lanes)
    places = tuple(replace(one, file=HOSTILE[0] + one.file, function=HOSTILE[1]) for one in said.turns.places)
    everywhere = tuple(replace(one, file=HOSTILE[0], around=HOSTILE[1]) for one in said.plan[0].where)
    return replace(
        said,
        sources=(HOSTILE[2],),
        device=HOSTILE[0],
        notes=HOSTILE,
        causes=tuple(replace(one, what=HOSTILE[0], advice=HOSTILE[1], remedy=HOSTILE[2]) for one in said.causes),
        plan=tuple(replace(one, fix=HOSTILE[3], code=HOSTILE[0], where=everywhere, needs=HOSTILE) for one in said.plan),
        turns=replace(said.turns, timeline=said.turns.timeline.change(names=names, lanes=lanes), places=places),
    )


def test_what_a_program_calls_itself_is_text_and_never_runs(opened: Any) -> None:
    text = render(hostile(), HOSTILE[0])
    assert len(text) < 2_000_000
    page = opened(text)
    drawing(page).focus()
    page.keyboard.press("n")
    page.locator("#plan .flip").first.click()
    page.locator("#search").fill("<script>")
    assert "</script><script>window.hacked = 1</script>" in page.locator("body").inner_text()
    assert page.evaluate("() => [window.hacked, document.scripts.length, document.images.length]") == [None, 1, 0]


def test_the_policy_lets_no_script_run_that_was_added(opened: Any, chromium: Any, tmp_path: Path) -> None:
    """Even if markup got in: what is not known by its hash does not run, and nothing is fetched."""
    added = "<script>window.hacked = 1</script><img src='https://example.org/x.png' onerror='window.hacked = 2'>"
    path = tmp_path / "added.html"
    path.write_text(html(COPY).replace("</body>", f"{added}</body>"))
    page = chromium.new_page()
    try:
        page.goto(path.as_uri())
        page.wait_for_selector("main:not([aria-busy])")
        assert page.evaluate("() => window.hacked") is None
    finally:
        page.close()


def with_a_tree(said: Diagnosis) -> Diagnosis:
    """A run of which the whole was watched, with a second loop."""
    second = 1_000_000_000
    inner = Part(
        LOOP, "train.py:9", "for batch in loader:", "main", 3 * second, 6 * second, 2 * second, 80, turn=75_000_000
    )
    other = Part(LOOP, "train.py:20", "while True:", "main", 9 * second, second // 2, turns=12)
    epochs = Part(LOOP, "train.py:8", "for epoch in epochs:", "", 3 * second, 7 * second, 2 * second, 2)
    epochs = replace(epochs, parts=(inner, other))
    start = Part(IMPORTS, time=3 * second)
    run = Part(RUN, time=10 * second, busy=2 * second, parts=(start, epochs), shares=(0, 10, 30, 40))
    return replace(said, run=run, loops=(LoopDiagnosis("train.py:20", 12, told(COPY)),))


KINDS = {
    "a trace": lambda: explain(read([TRACE]), plain_step=31_336_000, turns=True),
    "a recording without stacks": lambda: explain(load(TRUTH / "second" / "rank0_evaluates.stalled.busy"), turns=True),
    "a script without turns": lambda: explain(as_one_step(load(TRUTH / COPY)), turns=True),
    "a run with its tree and two loops": lambda: with_a_tree(told(ITEM)),
    "marks alone of a step": lambda: replace(told(COPY), turns=None),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_page_of_each_kind_of_run_opens(kind: str, opened: Any) -> None:
    said = KINDS[kind]()
    page = opened(render(said))
    assert verdict.statement(said) in page.locator("#headline").inner_text()
    assert f"{said.plain_step / 1e6:.3g}" in page.locator("#ledger").inner_text()
    assert page.locator("#timeline").count() == (0 if said.turns is None else 1)
    if said.turns is not None:
        page.evaluate("() => keepbusy.panel.viewport.all()")
        drawing(page).focus()
        page.keyboard.press("n")
        assert "The GPU" in page.locator(".selected .said").inner_text()


def test_the_tree_leads_to_the_line_and_another_loop_to_its_turns(opened: Any) -> None:
    page = opened(render(with_a_tree(told(ITEM))))
    page.locator("#run .flame .box").first.wait_for()
    assert page.locator("#run .flame .box").count() == 5
    shares = page.locator("#run .at-work > span").evaluate_all("all => all.map(one => one.style.left)")
    assert shares == [f"{25 * number}%" for number in range(4)]
    assert page.locator("#run .flame .box").first.inner_text() == "the run\n10.00 s"
    page.get_by_role("button", name="train.py:20").last.click()
    page.wait_for_selector("#copies")
    assert "copy_in_line" in page.locator("#causes").inner_text()


def test_the_hosts_lead_and_the_stalls_stand_over_the_run(shared: Any) -> None:
    """23 plain steps of 30; steps 10 to 14 were recorded."""
    assert shared.locator("#run .lead-strip > span").count() == 23
    lead = told(ITEM).plain_runs[0].course.lead[12] / 1e6
    assert f"Python is {lead:.1f} ms ahead" in shared.locator("#run .lead-strip > span").nth(12).get_attribute(
        "data-says"
    )
    assert shared.locator("#run .step-strip > .stalled").count() == 1
    shared.get_by_role("button", name="Steps 10 to 14 were recorded").click()
    shared.wait_for_function("() => document.getElementById('timeline').getBoundingClientRect().top < 100")


def test_a_notebook_shows_the_page_in_a_frame_of_its_own(chromium: Any, tmp_path: Path) -> None:
    path = tmp_path / "notebook.html"
    path.write_text(f"<!DOCTYPE html><body>{render(hostile())._repr_html_()}</body>", encoding="utf-8")
    page = chromium.new_page()
    try:
        page.goto(path.as_uri())
        frame = page.frame_locator("iframe")
        frame.locator("#ledger .bar").wait_for()
        frame.locator("#timeline .view canvas").first.wait_for()
        assert page.evaluate("() => window.hacked") is None
        assert "copy not overlapped" in frame.locator("#ledger").inner_text()
    finally:
        page.close()


def test_a_wait_that_is_known_by_its_function_alone_says_so(opened: Any) -> None:
    page = opened(render(explain(read([TRACE]), plain_step=31_336_000, turns=True)))
    assert page.locator(".source .wait-time.vague").count() >= 1
    assert "the recording does not know the line" in page.locator(".source").inner_text()


ITERATIONS_STAND_AT = """() => [keepbusy.panel.above, keepbusy.panel.below, keepbusy.panel.beside].map(drawing => {
  const seen = drawing.scene.iterations.map(iteration => drawing.x(iteration.start)).filter(x => x > drawing.gutter);
  return Math.round(seen[0]);
})"""


def test_two_runs_stand_beneath_each_other_iteration_by_iteration(opened: Any) -> None:
    done = compare(told(ITEM), told(HEALTHY))
    page = opened(render_both(done, "item.busy", "healthy.busy"))
    assert page.title() == "item.busy → healthy.busy · keepbusy"
    assert "18.0 → 37.5 ms per iteration: 2.1× as long." in page.locator("#changed").inner_text()
    assert (
        "fixed read the value later at stallbench/cases/item_every_step.py:25" in page.locator("#changed").inner_text()
    )
    widths = page.locator("#changed .bar").evaluate_all("bars => bars.map(bar => bar.getBoundingClientRect().width)")
    assert widths[0] / widths[1] == pytest.approx(done.step.before / done.step.after, rel=0.01)
    first_fix = page.locator("#plan .flip").first
    first_fix.click()
    one, fixed, other = page.evaluate(ITERATIONS_STAND_AT)
    assert one == fixed == other
    drawing(page, 2).click(position={"x": 400, "y": 60})
    assert page.evaluate("() => keepbusy.panel.beside.marked.spot.track.kind") == "host"
    assert "healthy.busy: 37.5 ms per iteration" in page.locator("#timeline").inner_text()


def test_the_run_after_can_be_looked_at_as_well(opened: Any) -> None:
    page = opened(render_both(compare(told(ITEM), told(HEALTHY)), "item.busy", "healthy.busy"))
    page.get_by_role("button", name="after, healthy.busy").click()
    page.wait_for_function("() => keepbusy.choice && keepbusy.choice.moment.analysis.step > 30e6")
    assert verdict.statement(told(HEALTHY)) in page.locator("#headline").inner_text()
    assert "before, item.busy: 18.0 ms per iteration" in page.locator("#timeline").inner_text()
    assert page.locator("#changed").count() == 1


def test_a_finger_selects_and_two_fingers_zoom(opened: Any) -> None:
    page = opened(html(ITEM), width=390, height=800, has_touch=True, is_mobile=True)
    canvas = drawing(page)
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    track = page.evaluate("() => keepbusy.panel.state.scene.tracks.find(track => track.kind === 'gpu').y")
    page.touchscreen.tap(box["x"] + 200, box["y"] + track + 8)
    assert state(page)["kind"] == "gpu"
    assert page.locator(".selected .said").inner_text().startswith("The GPU ")
    before = state(page)
    fingers = page.context.new_cdp_session(page)
    for kind, apart in (("touchStart", 20), ("touchMove", 40), ("touchMove", 60), ("touchEnd", None)):
        points = [
            {"x": box["x"] + 200 + way * apart, "y": box["y"] + track + 8, "id": way + 1}
            for way in (-1, 1)
            if apart is not None
        ]
        fingers.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})
    after = state(page)
    assert after["to"] - after["from"] < 0.6 * (before["to"] - before["from"])


NAMELESS = """() => [...document.querySelectorAll("button, input, select, canvas, [role=img], section")].filter(one =>
  one.checkVisibility() && !one.closest("[aria-hidden=true]") &&
  !(one.getAttribute("aria-label") || one.textContent.trim() || one.labels?.length ||
    document.getElementById(one.getAttribute("aria-labelledby") ?? ""))).map(one => one.outerHTML.slice(0, 90))"""


def test_who_hears_the_page_hears_what_each_thing_is(shared: Any) -> None:
    assert shared.evaluate(NAMELESS) == []
    ledger = shared.locator("#ledger").aria_snapshot()
    assert 'row "computing 12.1 ms 67% The GPU computes"' in ledger
    assert 'switch "1' in shared.locator("#plan").aria_snapshot()
    levels = shared.evaluate("() => [...document.querySelectorAll('h1, h2, h3')].map(one => Number(one.tagName[1]))")
    assert levels[0] == 1
    assert all(after - before <= 1 for before, after in pairwise(levels))


LINES_OF_THE_HEADLINE = """() => {
  const range = document.createRange();
  range.selectNodeContents(document.querySelector("h1"));
  return range.getClientRects().length;
}"""


@pytest.mark.parametrize("name", [ITEM, LATE])
def test_a_headline_fits_a_phone_on_one_line(name: str, opened: Any) -> None:
    assert opened(html(name), width=390, height=844).evaluate(LINES_OF_THE_HEADLINE) == 1


def test_each_colour_stands_once_in_the_legend(opened: Any) -> None:
    for name in (ITEM, LATE):
        page = opened(html(name))
        names = page.locator("#timeline .legend li:not(.legend-name)").all_inner_texts()
        assert sorted(set(names)) == sorted(names) != []


def test_details_are_closed_until_somebody_asks(opened: Any) -> None:
    page = opened(html(LATE))
    for part, inside in (("ranks", "canvas"), ("collectives", "table"), ("copies", "table")):
        assert page.locator(f"#{part} {inside}").is_hidden()
        page.locator(f"#{part} summary").click()
        assert page.locator(f"#{part} {inside}").is_visible()
    wide = page.wait_for_function("() => document.querySelector('#ranks canvas').width > 600")
    assert wide.json_value() is True


STREAMS = TRUTH.parents[1] / "snapshots" / "streams"
BOXES = """() => {
  const { places } = keepbusy.choice.moment;
  const streams = keepbusy.panel.state.scene.tracks.filter(track => track.boxes);
  return streams.map(({ label, boxes }) => [label, [...new Set(boxes.parts.what)].map(place => places[place].source)]);
}"""


def test_two_streams_are_two_rows_with_boxes_named_by_the_users_lines(opened: Any, monkeypatch: Any) -> None:
    """The host runs ahead and its iterations are short: those of the GPU are shown."""
    monkeypatch.chdir(STREAMS)  # where the program is
    said = explain(load(STREAMS / "two_streams.busy"), turns=True)
    page = opened(render(said))
    shown = state(page)
    assert shown["to"] - shown["from"] >= 2 * said.plain_step
    assert page.evaluate(BOXES) == [
        ["stream 7 (compute)", ["result = batch @ weights"]],
        ["stream 8 (copies)", ['on_gpu = batch.to("cuda", non_blocking=True)']],
    ]


SEEN = """() => {
  const { above } = keepbusy.panel, { scene } = above;
  return { events: above.events().length, missing: scene.missing.length };
}"""
RED = """() => {
  const { canvas } = keepbusy.panel.above;
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  let found = 0;
  for (let at = 0; at < data.length; at += 4) found += data[at] === 0xc4 && data[at + 1] === 0 && data[at + 2] === 0x2f;
  return found;
}"""
NAMED = """() => {
  const streams = keepbusy.panel.above.scene.tracks.filter(track => track.boxes);
  return streams.map(({ label, boxes }) => [label, boxes.count, boxes.boxes.count]);
}"""


def on_paper(body: Callable[[Run], object], *races: DataRace) -> str:
    run = Run.of()
    body(run)
    return render(explain(as_one_step(run.timeline(virtual=True, races=races)), turns=True))


def at(line: int) -> list[str]:
    return [f"script.py({line}): <module>"]


def prefetching(run: Run) -> None:
    for _ in range(3):
        run.copy(MB, 900, blocking=False, pinned=True, stream=8, at=at(7))
        run.order(8, 7)
        run.launch(2_000, at=at(14))
    run.sync(None, at=at(18))


def test_a_short_script_shows_each_run_of_a_line_and_what_waits_for_an_event(opened: Any) -> None:
    page = opened(on_paper(prefetching))
    assert page.evaluate(NAMED) == [["stream 8 (copies)", 1, 3], ["stream 7 (compute)", 1, 3]]
    assert page.evaluate(SEEN)["events"] == 3
    drawing(page).focus()
    page.keyboard.press("n")
    assert page.evaluate(SEEN)["events"] == 0  # while something else is looked at
    assert page.locator("p.race").count() == 0


def test_the_edge_that_a_race_misses_is_drawn_and_said(opened: Any) -> None:
    def forgetting(run: Run) -> None:
        run.launch(2_000, stream=7, at=at(7))
        run.copy(MB, 900, HOME, pinned=True, blocking=False, stream=8, at=at(10))
        run.sync(8, at=at(11))

    uses = RacingUse("script.py:7", True, "stream 7"), RacingUse("script.py:10", False, "stream 8")
    page = opened(
        on_paper(forgetting, DataRace(BETWEEN_STREAMS, *uses, 400, 1, "side.wait_event(ready)", "script.py:10"))
    )
    said = "script.py:10 reads memory that script.py:7 may still be writing on stream 7."
    said = f"{said} Add side.wait_event(ready) before script.py:10."
    assert page.locator("#headline p.race").inner_text() == f"Data race: {said}"
    assert page.locator("#timeline p.race").inner_text() == f"✗ {said}"
    seen = page.evaluate(SEEN)
    assert (seen["missing"], seen["events"]) == (1, 0)
    assert page.evaluate(RED) > 20


RECTANGLES = """() => [".source", ".drawings", ".source ol", ".source li.chosen"].map(one => {
  const { top, bottom } = document.querySelector(one).getBoundingClientRect();
  return [top, bottom];
})"""


def test_the_source_is_as_high_as_the_drawing_and_shows_where_the_gpu_idles(opened: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(TRUTH.parents[2])
    page = opened(html("prefetched.busy"))  # whose program is in the repository
    source, drawings, lines, worst = page.evaluate(RECTANGLES)
    assert source == pytest.approx(drawings, abs=1)
    assert lines[0] <= worst[0] < worst[1] <= lines[1]
    assert page.locator(".source li.chosen .wait-time").count() == 1
