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
PATIENCE = 600_000
"""Milliseconds that a page may take: on a machine that others use, half a minute can be too short."""


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


class Tabs:
    """One for each kind of screen, and in it one page after the other: to begin a tab costs more than most tests."""

    def __init__(self, chromium: Any, folder: Path) -> None:
        self._chromium, self._folder, self._pages = chromium, folder, dict[object, Any]()
        self.path = folder
        self.complaints: list[str] = []
        """What the console of the page says, and whatever it wants to fetch."""

    def open(self, html: str, width: int = 1280, height: int = 900, scheme: str = "light", **screen: Any) -> Any:
        """From its text, as from a mail attachment."""
        page = self._page(**screen)
        self.path = self._folder / f"run{len(list(self._folder.iterdir()))}.html"
        self.path.write_text(html, encoding="utf-8")
        page.set_viewport_size({"width": width, "height": height})
        page.emulate_media(color_scheme=scheme, reduced_motion="reduce")  # nobody is to wait for a switch that slides
        page.mouse.move(-9, -9)
        page.goto(self.path.as_uri())
        page.wait_for_selector("main:not([aria-busy])")
        return page

    def _page(self, **screen: Any) -> Any:
        kind = tuple(screen.items())
        if kind not in self._pages:
            page = self._chromium.new_context(viewport={"width": 1280, "height": 900}, **screen).new_page()
            page.set_default_timeout(PATIENCE)
            page.on("console", lambda said: self._complain(said.type in ("error", "warning"), said.text))
            page.on("pageerror", lambda error: self._complain(True, str(error)))
            page.on("request", lambda asked: self._complain(self._is_fetched(asked.url), asked.url))
            self._pages[kind] = page
        return self._pages[kind]

    def _complain(self, really: bool, what: str) -> None:
        self.complaints += [what] if really else []

    def _is_fetched(self, url: str) -> bool:
        return not url.startswith(("data:", "blob:")) and url != self.path.as_uri()


@pytest.fixture(scope="session")
def tabs(chromium: Any, tmp_path_factory: pytest.TempPathFactory) -> Tabs:
    return Tabs(chromium, tmp_path_factory.mktemp("pages"))


@pytest.fixture
def opened(tabs: Tabs) -> Iterator[Open]:
    """Opens a page in place of the one before it. Whatever its console complains of fails the test."""
    tabs.complaints.clear()
    yield tabs.open
    assert tabs.complaints == []
