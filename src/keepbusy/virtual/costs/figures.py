"""What was measured and goes for every device: figures.toml says what each figure is. It is read once."""

from __future__ import annotations

import tomllib
from pathlib import Path
from types import SimpleNamespace

_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def figures(section: str) -> SimpleNamespace:
    """A section, its figures as attributes."""
    return SimpleNamespace(**_TABLES[section])
