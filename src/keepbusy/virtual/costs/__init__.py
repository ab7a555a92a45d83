"""What things cost: device files, laws of kernels, links between GPUs."""

import tomllib
from pathlib import Path
from types import SimpleNamespace

_TABLES = tomllib.loads(Path(__file__).with_name("figures.toml").read_text(encoding="utf-8"))


def figures(section: str) -> SimpleNamespace:
    """What was measured and goes for every device, as attributes: figures.toml says what each figure is."""
    return SimpleNamespace(**_TABLES[section])
