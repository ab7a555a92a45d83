"""What a module is made of, found without calling methods that its class may define with other arguments."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import nn


def own_weights(module: nn.Module) -> Iterator[nn.Parameter]:
    """A module's own parameters: `parameters(recurse=False)` unless its class takes no such argument."""
    return (weight for weight in module._parameters.values() if weight is not None)


def submodules(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """The modules and all within them, each once, in the order of `modules()`."""
    found: dict[nn.Module, None] = {}
    ahead = [*modules][::-1]
    while ahead:
        module = ahead.pop()
        if module not in found:
            found[module] = None
            ahead += [part for part in module._modules.values() if part is not None][::-1]
    return [*found]
