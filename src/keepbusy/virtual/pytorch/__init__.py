"""Where PyTorch meets the virtual machine."""

import tomllib
from pathlib import Path

_NAMES = tomllib.loads(Path(__file__).with_name("operator_names.toml").read_text(encoding="utf-8"))
OPERATORS: dict[str, tuple[str, ...]] = {kind: tuple(names.split()) for kind, names in _NAMES.items()}
"""What must be known of operators by their names: operator_names.toml says what."""
