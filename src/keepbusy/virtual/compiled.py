"""`torch.compile`, which the virtual GPU runs in another way."""

from __future__ import annotations

import sys
from typing import Any

import torch


def patch() -> None:
    torch.compile = _compile
    torch.nn.Module.compile = _compile_module


_told: list[bool] = []


def _tell() -> None:
    """Once a process."""
    if not _told:
        _told.append(True)
        sys.stderr.write("keepbusy: torch.compile runs eagerly on the virtual GPU; its timing is that of eager code.\n")


def _compile(model: Any = None, **_options: Any) -> Any:
    _tell()
    return (lambda function: function) if model is None else model


def _compile_module(_module: torch.nn.Module, *_args: Any, **_options: Any) -> None:
    _tell()
