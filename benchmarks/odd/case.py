"""One odd script: what it is, how it is started, and which differences are allowed to it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

ASPECTS = ("stdout", "stderr", "exit", "files", "temporary", "report")
"""What is compared: the script's own output; how it ended; the files that it left beside itself and in the folder for
temporary ones; and whether the run that was asked for by `--save` is there."""
DEVICE = 'import torch\ndevice = "cuda" if torch.cuda.is_available() else "cpu"\n'
"""How a script that is to run with and without a GPU begins."""
SAVED = "r.busy"


@dataclass(frozen=True)
class Case:
    name: str
    source: str | bytes = ""
    """Of `script.py`; none is written if this is empty."""
    files: Mapping[str, str | bytes] = field(default_factory=dict)
    prepare: Callable[[Path], object] | None = None
    """Makes in the folder what cannot be written down as a file."""
    start: tuple[str, ...] = ("script.py",)
    """What stands behind `python` or `keepbusy run`: the script and its arguments, or -m and a module."""
    python: tuple[str, ...] = ()
    """Options of Python itself."""
    options: tuple[str, ...] = ()
    """Options of `keepbusy run`, beside `--save` where there is work for a device."""
    environment: Mapping[str, str] = field(default_factory=dict)
    stdin: bytes | None = b""
    """None: standard input is closed."""
    shell: str = 'exec "$@"'
    """How bash starts it."""
    signal: int | None = None
    """Sent once the script has printed `ready`."""
    group: bool = False
    """The signal goes to all processes of the session, as a terminal's or a batch system's does."""
    device: int = 0
    """So many commands of a device, at least, stand in the saved run."""
    since: tuple[int, int] = (3, 0)
    """The version of Python with which this can first be tried."""
    allowed: Mapping[str, str] = field(default_factory=dict)
    """An aspect in which the two may differ, and why."""

    def can_run(self) -> bool:
        return sys.version_info >= self.since
