"""Costs of kernels, calls and links: device files and laws."""

import tomllib
from pathlib import Path
from types import SimpleNamespace

_TABLES = tomllib.loads(Path(__file__).with_name("figures.toml").read_text(encoding="utf-8"))


def figures(section: str) -> SimpleNamespace:
    """Figures that hold for every device, as attributes; figures.toml describes them."""
    return SimpleNamespace(**_TABLES[section])
