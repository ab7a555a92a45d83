"""Every link within the documents leads somewhere: to a file that is there, and to a heading of it."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("benchmarks/*.md"),
        *ROOT.glob("stallbench/*.md"),
        *ROOT.glob("tests/*/*.md"),
    ]
)
CODE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<!\\)\]\(([^)\s]+)\)|(?:src|href)=\"([^\"]+)\"")
HEADING = re.compile(r"^#+ +(.+?) *$", re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    found = list[str]()
    for heading in HEADING.findall(CODE.sub("", page.read_text(encoding="utf-8"))):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        name = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        found.append(f"{name}-{found.count(name)}" if name in found else name)
    return set(found)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    dead = []
    for link in (one or other for one, other in LINK.findall(CODE.sub("", page.read_text(encoding="utf-8")))):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            dead.append(link)
    assert dead == []


def test_the_site_has_every_page_and_builds(tmp_path: Path) -> None:
    told = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    pages = [str(page.relative_to(ROOT / "docs")) for page in PAGES if page.is_relative_to(ROOT / "docs")]
    assert [page for page in pages if f" {page}\n" not in told] == []
    if find_spec("mkdocstrings") is None or find_spec("material") is None:
        pytest.skip("there is no mkdocs-material: pip install 'keepbusy[site]'")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", str(tmp_path)]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, env={"NO_MKDOCS_2_WARNING": "1"})
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    for page in pages:
        assert tmp_path.joinpath(page.removesuffix(".md").replace("README", "index") + ".html").exists()
    api = (tmp_path / "reference" / "api.html").read_text(encoding="utf-8")
    import keepbusy

    assert [name for name in keepbusy.__all__ if f'.{name}"' not in api] == []
    assert (tmp_path / "search" / "search_index.json").stat().st_size > 100_000
