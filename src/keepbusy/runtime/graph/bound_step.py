"""Arguments that are no input: modules, optimizers, weights, what holds settings.

A graph takes tensors in, and keeps numbers. Whatever else a step is given is bound to it, as if the step had found it
by a name of its own: what the step reads of it is watched, and another object there makes it another step.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from keepbusy.runtime.graph.names_read import PLAIN
from keepbusy.torch_names.pytorch import tree_leaves

_SETTINGS = (*PLAIN, torch.device, torch.dtype, torch.Size, torch.layout)
"""Equal ones are the same."""


class BoundArguments:
    """Which arguments of a step are no input, by what its first call was given."""

    def __init__(self, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        self._places = [place for place, argument in enumerate(arguments) if not _is_input(argument)]
        self._options = [name for name, option in options.items() if not _is_input(option)]
        self._inputs = [place for place in range(len(arguments)) if place not in self._places]
        self._count = len(arguments)

    def __bool__(self) -> bool:
        return bool(self._places or self._options)

    def split(self, arguments: tuple[Any, ...], options: dict[str, Any]) -> tuple[list[Any], list[Any], dict[str, Any]]:
        """Those that are bound, and the inputs."""
        bound = [arguments[place] for place in self._places if place < len(arguments)]
        inputs = [arguments[place] for place in self._inputs if place < len(arguments)]
        inputs += arguments[self._count :]
        if not options:
            return bound, inputs, options
        bound += [options[name] for name in self._options if name in options]
        return bound, inputs, {name: option for name, option in options.items() if name not in self._options}

    def bind(self, step: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]) -> BoundStep:
        by_place = {place: arguments[place] for place in self._places if place < len(arguments)}
        return BoundStep(step, by_place, {name: options[name] for name in self._options if name in options})


class BoundStep:
    """A step that is called with its inputs alone."""

    def __init__(self, step: Callable[..., Any], places: dict[int, Any], options: dict[str, Any]) -> None:
        self.__wrapped__, self._places, self._options = step, places, options
        self.__name__ = getattr(step, "__name__", type(step).__name__)

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        arguments = [*inputs]
        for place, argument in self._places.items():  # from the first on
            arguments.insert(place, argument)
        return self.__wrapped__(*arguments, **options, **self._options)

    def of(self, step: Callable[..., Any]) -> BoundStep:
        """The same arguments bound to another function."""
        return BoundStep(step, self._places, self._options)

    def named(self) -> dict[str, Any]:
        """What is bound, by the names of the step's parameters."""
        try:
            parameters = [*inspect.signature(self.__wrapped__).parameters]
        except (TypeError, ValueError):  # it is written in C
            parameters = []
        by_name = {
            parameters[place] if place < len(parameters) else f"argument {place}": place for place in self._places
        }
        return {name: self._places[place] for name, place in by_name.items()} | self._options


def identity(bound: list[Any]) -> tuple[Any, ...]:
    return tuple([argument if isinstance(argument, _SETTINGS) else id(argument) for argument in bound])


def _is_input(argument: Any) -> bool:
    """A tensor, a number or a text, or a container of nothing else."""
    return all(
        isinstance(leaf, PLAIN) or (isinstance(leaf, Tensor) and not (leaf.is_leaf and leaf.requires_grad))
        for leaf in tree_leaves(argument)
    )
