"""The page: a run explained in one HTML file, which a browser opens from a mail attachment as well as from a disk.

It holds the bundled script and styles, and the run as a block of base64.

Names come from other people's programs, so they are never part of the markup: they are inside the block, whose base64
cannot end its element, and the script puts them on the page as text. The policy in the head allows only the bundled
script and styles, by their hashes, and no request to any server.
"""

from __future__ import annotations

import base64
import hashlib
import html
from importlib.resources import files

from keepbusy.explain.comparison import Comparison
from keepbusy.explain.diagnosis import Diagnosis
from keepbusy.report.page.contents import block_of, compared

_PAGE_TEMPLATE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; script-src 'sha256-{script_hash}'; \
style-src 'sha256-{style_hash}'; img-src data:; base-uri 'none'; form-action 'none'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<meta name="color-scheme" content="light dark">
<title>keepbusy</title>
<link rel="icon" href="data:,">
<style>{style}</style>
</head>
<body>
<noscript>This page needs JavaScript, which is switched off. `keepbusy explain` shows the run as text.</noscript>
<main id="page" aria-busy="true"></main>
{blocks}
<script>{script}</script>
</body>
</html>
"""
_BLOCK_ELEMENT = '<script type="application/octet-stream">{}</script>'


class Page(str):
    """A page as text. A notebook shows it in a frame that may run scripts and nothing else."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        style = "width: 100%; height: 620px; border: 0"
        return f'<iframe sandbox="allow-scripts" srcdoc="{html.escape(self)}" style="{style}"></iframe>'


def render(diagnosis: Diagnosis, source: str = "") -> Page:
    """The page of a diagnosis, with a timeline if the diagnosis has its iterations. `source` names the run."""
    return _page(block_of(diagnosis, source))


def render_both(comparison: Comparison, before: str = "", after: str = "") -> Page:
    """The page of two runs, with one timeline beneath the other. `before` and `after` name the runs."""
    changed = {"compared": compared(comparison)}
    return _page(block_of(comparison.before, before, changed), block_of(comparison.after, after))


def _page(*blocks: bytes) -> Page:
    script, style = _bundled("page.js"), _bundled("page.css")
    return Page(
        _PAGE_TEMPLATE.format(
            script_hash=_hash(script),
            style_hash=_hash(style),
            style=style,
            script=script,
            blocks="\n".join(_BLOCK_ELEMENT.format(base64.b64encode(block).decode("ascii")) for block in blocks),
        )
    )


def _bundled(name: str) -> str:
    """A file that `make page` builds from the folder page/."""
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")
