"""What the module tree says: which modules are gathered as one, which parameters are tied, and what is dropped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


def tied_parameters(model: nn.Module) -> dict[int, list[str]]:
    """By id, the names of each parameter that has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {key: held for key, held in names.items() if len(held) > 1}


def blocks_of(model: nn.Module) -> dict[str, nn.Module]:
    """The outermost modules of a kind that comes again and again in one list: each is gathered while the one before
    it computes. A parameter that is also held outside its block would be cut apart, so that block is left whole."""
    tied = tied_parameters(model)
    return {name: block for name, block in _repeated(model, "") if not _shares_with_others(name, block, tied)}


def _repeated(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    listed = isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict)
    kinds = Counter(type(child) for child in module.children() if _has_parameters(child))
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if listed and kinds[type(child)] > 1 and not isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield path, child
        else:
            yield from _repeated(child, f"{path}.")


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _shares_with_others(name: str, block: nn.Module, tied: dict[int, list[str]]) -> bool:
    return any(not other.startswith(f"{name}.") for one in block.parameters() for other in tied.get(id(one), ()))


def dropouts_of(model: nn.Module) -> dict[tuple[nn.Module, str], float]:
    """Attributes that are shares to drop."""
    return {
        (module, name): value
        for module in model.modules()
        for name, value in vars(module).items()
        if isinstance(value, float)
        and value > 0
        and ("drop" in name or (name == "p" and "Drop" in type(module).__name__))
    }


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Comparisons are of what is computed, not of what is drawn."""
    dropouts = dropouts_of(model)
    try:
        for module, name in dropouts:
            setattr(module, name, 0.0)
        yield
    finally:
        for (module, name), value in dropouts.items():
            setattr(module, name, value)
