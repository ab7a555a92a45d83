"""What the site's generator makes of a page before it reads it: GitHub shows the pages as they are (`make site`)."""

from __future__ import annotations

import posixpath
import re
from typing import Any

LINK = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+[^)#\s]+)(?:#[^)]*)?\)")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """What is folded is Markdown, too, and files outside of `docs` are named and not linked."""

    def named(found: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page.file.src_uri), found[2]))
        return found[0] if path.startswith("docs/") else f"{found[1]} (`{path}` of the sources)"

    return LINK.sub(named, markdown).replace("<details>", '<details markdown="1">')
