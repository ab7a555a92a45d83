"""Checkpoints that any layout writes and any other reads."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint import state_dict


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
    """What to save: parameters, buffers and the optimizer's states by the names they have in the model itself.

        keepbusy.save_later(state_of(model, optimizer), "step1000")

    All ranks call it. What is sharded stays so, and each rank writes its part.
    """
    own = _inner(model)
    state = {"model": state_dict.get_model_state_dict(own)}
    if optimizer is not None:
        state["optimizer"] = state_dict.get_optimizer_state_dict(own, optimizer)
    return state


def resume(model: nn.Module, optimizer: torch.optim.Optimizer | None, path: str | os.PathLike[str]) -> None:
    """Go on from a checkpoint of `state_of`, whatever the layout that wrote it: a file, or a folder of parts."""
    path, own = Path(path), _inner(model)
    if not path.exists():
        raise FileNotFoundError(f"there is no checkpoint {path} to resume from")
    whole = path.is_file()
    if whole:
        state = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    else:
        state = state_of(model, optimizer)
        checkpoint.load(state, checkpoint_id=path)
    options = state_dict.StateDictOptions(full_state_dict=whole)
    state_dict.set_model_state_dict(own, state["model"], options=options)
    if optimizer is not None:
        state_dict.set_optimizer_state_dict(own, optimizer, state["optimizer"], options=options)


def _inner(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
