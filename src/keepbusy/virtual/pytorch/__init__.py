"""Where PyTorch meets the virtual machine."""

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

NAMES: dict[str, Any] = tomllib.loads(Path(__file__).with_name("operator_names.toml").read_text(encoding="utf-8"))
"""What must be known of operators and types by their names: operator_names.toml says what."""
OPERATORS = {kind: tuple(names.split()) for kind, names in NAMES.items() if isinstance(names, str)}
"""Lists of operators in it."""


def refusal(why: str) -> Callable[..., NoReturn]:
    """Stands for what the virtual GPU does not have, or cannot do."""

    def refuse(*_args: Any, **_kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"keepbusy's virtual GPU {why}.")

    return refuse
