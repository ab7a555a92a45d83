"""One call of a step: its tensors, which a graph takes in, and its constants, which it keeps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from keepbusy.runtime.capture import Uncapturable
from keepbusy.runtime.names import PLAIN


class Call:
    """The arguments, taken apart."""

    def __init__(self, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        self.leaves, self.spec = tree_flatten((arguments, options))
        self.tensors = [one for one in self.leaves if isinstance(one, Tensor)]

    @property
    def kind(self) -> tuple[Any, ...]:
        """Equal for calls that one graph can stand in for."""
        return self.spec, *map(_kind, self.leaves)

    def run(self, step: Callable[..., Any], tensors: list[Tensor] | None = None) -> Any:
        """With its own tensors, or with others in their place."""
        others = iter(self.tensors if tensors is None else tensors)
        leaves = [next(others) if isinstance(one, Tensor) else one for one in self.leaves]
        arguments, options = tree_unflatten(leaves, self.spec)
        return step(*arguments, **options)

    def labels(self) -> list[str]:
        """What a person calls the parts of `kind`."""
        return ["the structure of the arguments", *map(_label, self.leaves)]

    def check(self) -> None:
        """Raises if there is an argument that a graph can neither take in nor keep."""
        for leaf in self.leaves:
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                raise Uncapturable("an argument requires a gradient, which a replay would not hand back; detach it")
            if any(isinstance(one, Tensor) for one in _held(leaf)):
                raise Uncapturable(
                    f"an argument is a {type(leaf).__name__} that holds tensors, which a graph would keep as they are; "
                    "pass them in tuples, lists or dicts"
                )


def _kind(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.stride(), leaf.dtype
    return (type(leaf), leaf) if type(leaf) in PLAIN else id(leaf)


def _label(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        return f"an input of shape {tuple(leaf.shape)}"
    return f"the argument {leaf!r}" if type(leaf) in PLAIN else f"a {type(leaf).__name__} among the arguments"


def _held(leaf: Any) -> list[Any]:
    ours = isinstance(leaf, (Tensor, torch.nn.Module, type))
    return [] if ours or not hasattr(leaf, "__dict__") else [*vars(leaf).values()]


class Outputs:
    """What the captured step returned. Its tensors are overwritten by the next replay, so callers get copies."""

    def __init__(self, returned: Any) -> None:
        self._leaves, self._spec = tree_flatten(returned)
        for leaf in self._leaves:
            if not (type(leaf) in PLAIN or (isinstance(leaf, Tensor) and leaf.is_cuda)):
                told = "a tensor of the host" if isinstance(leaf, Tensor) else f"a {type(leaf).__name__}"
                raise Uncapturable(
                    f"it returns {told}, which no replay would renew; "
                    "return tensors of the device, alone or in tuples, lists and dicts"
                )
        self.constants = [one for one in self._leaves if not isinstance(one, Tensor)]

    def copies(self) -> Any:
        """As they are after the replay that is under way."""
        return tree_unflatten(
            [one.detach().clone() if isinstance(one, Tensor) else one for one in self._leaves], self._spec
        )


def constants_of(returned: Any) -> list[Any]:
    """Numbers and texts that a step returns."""
    return [one for one in tree_flatten(returned)[0] if type(one) in PLAIN]


def differentiable(returned: Any) -> bool:
    return any(isinstance(one, Tensor) and one.requires_grad for one in tree_flatten(returned)[0])


def detached(returned: Any) -> Any:
    """As a replay would return it: without the graph of its gradients."""
    leaves, spec = tree_flatten(returned)
    return tree_unflatten([one.detach() if isinstance(one, Tensor) else one for one in leaves], spec)
