"""Where PyTorch meets the virtual machine."""

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

NAMES: dict[str, Any] = tomllib.loads(Path(__file__).with_name("operator_names.toml").read_text(encoding="utf-8"))
"""Lists of names of operators and types; operator_names.toml describes them."""
OPERATORS = {kind: tuple(names.split()) for kind, names in NAMES.items() if isinstance(names, str)}
"""The lists in it that are given as text."""


def refusal(why: str) -> Callable[..., NoReturn]:
    """A function in place of what the virtual GPU does not have; it raises `NotImplementedError`."""

    def refuse(*_args: Any, **_kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"keepbusy's virtual GPU {why}.")

    return refuse
