"""The folder in which a process leaves what it saw: its facts, and of its window the profiler's trace and the lines.

While it runs it may leave the figures of its last steps there, too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FACTS, TRACE, LINES, LIVE = "facts.json", "window.json", "lines.npz", "live"


def write_facts(folder: Path, facts: Mapping[str, Any]) -> None:
    """They appear once they are whole."""
    part = folder / f"{FACTS}.part"
    part.write_text(json.dumps(facts, default=str), encoding="utf-8")
    part.replace(folder / FACTS)


def facts_in(folder: Path) -> dict[str, Any]:
    """What the process knew of itself; nothing if it did not live to write it."""
    try:
        facts: dict[str, Any] = json.loads((folder / FACTS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return facts
