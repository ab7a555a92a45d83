"""Pages in a real browser: Chromium, without a screen. Where there is none, these tests are skipped by name."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--font-render-hinting=none", "--force-color-profile=srgb"),
]
Open = Callable[..., Any]


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="there is no Playwright: pip install playwright")
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip("there is no Chromium: apt-get install chromium")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=path, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def opened(chromium: Any, tmp_path: Path) -> Iterator[Open]:
    """Opens a page from its text, as from a mail attachment. Whatever its console complains of fails the test."""
    complaints: list[str] = []
    contexts = []

    def open_page(html: str, width: int = 1280, height: int = 900, scheme: str = "light", **more: Any) -> Any:
        path = tmp_path / "run.html"
        path.write_text(html, encoding="utf-8")
        context = chromium.new_context(viewport={"width": width, "height": height}, color_scheme=scheme, **more)
        contexts.append(context)
        page = context.new_page()
        _listen(page, path, complaints)
        _show(page, path)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []


@pytest.fixture(scope="session")
def opened_in_turn(chromium: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Any]]:
    """Opens one page after the other in the same tab: for tests that ask their programs and look at nothing."""
    complaints: list[str] = []
    path = tmp_path_factory.mktemp("page") / "run.html"
    context = chromium.new_context(viewport={"width": 320, "height": 240})
    page = context.new_page()
    _listen(page, path, complaints)

    def open_page(html: str) -> Any:
        path.write_text(html, encoding="utf-8")
        _show(page, path)
        assert complaints == []
        return page

    yield open_page
    context.close()


def _listen(page: Any, path: Path, complaints: list[str]) -> None:
    page.on("console", lambda said: complaints.append(said.text) if said.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda asked: complaints.append(asked.url) if _is_fetched(asked.url, path) else None)


def _show(page: Any, path: Path) -> None:
    page.goto(path.as_uri())
    page.wait_for_selector("main:not([aria-busy])")


def _is_fetched(url: str, path: Path) -> bool:
    return not url.startswith(("data:", "blob:")) and url != path.as_uri()
