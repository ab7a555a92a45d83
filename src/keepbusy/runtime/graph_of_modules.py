"""Modules that a step calls, each with graphs of its own: where the step cannot be captured, most of its work is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from keepbusy.torch_names.pytorch import tree_leaves

_FEWEST = 8
"""So many functions of PyTorch that work on the device are worth a graph: a replay takes as long as a few of them."""


class CalledModule:
    """A module that was called, and the modules that it called."""

    def __init__(self, module: nn.Module | None) -> None:
        self.module, self.launches = module, 0
        self.called: list[CalledModule] = []

    def worth_a_graph(self) -> list[CalledModule]:
        """Of the modules that it called, those with enough work; each once."""
        of_module: dict[nn.Module, CalledModule] = {}
        for call in self.called:
            if call.launches >= _FEWEST and call.module is not None and may_have_graphs(call.module):
                of_module.setdefault(call.module, call)
        return [*of_module.values()]


class CalledModules(TorchFunctionMode):  # type: ignore[misc]  # PyTorch is not typed here
    """While a step runs: which modules it calls, and how much work each has for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.step = CalledModule(None)
        self._running = [self.step]

    def __enter__(self) -> CalledModules:
        self._hooks = ExitStack()
        self._hooks.callback(register_module_forward_pre_hook(self._called).remove)
        self._hooks.callback(register_module_forward_hook(self._returned, always_call=True).remove)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._hooks.close()

    def _called(self, module: nn.Module, _arguments: Any) -> None:
        call = CalledModule(module)
        self._running[-1].called.append(call)
        self._running.append(call)

    def _returned(self, module: nn.Module, _arguments: Any, _result: Any) -> None:
        if self._running[-1].module is module:
            self._running.pop()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if any(isinstance(leaf, Tensor) and leaf.is_cuda for leaf in tree_leaves(result)):
            for call in self._running:
                call.launches += 1
        return result


def may_have_graphs(module: nn.Module) -> bool:
    """Unless something else stands in for its calls already, or it waits for other ranks."""
    has_own = "forward" in vars(module) or getattr(module, "_compiled_call_impl", None) is not None
    return not has_own and not isinstance(module, torch.jit.ScriptModule) and not meets_other_ranks(module)


def meets_other_ranks(module: nn.Module) -> bool:
    is_ddp = isinstance(module, nn.parallel.DistributedDataParallel)
    return is_ddp or hasattr(module, "set_requires_all_reduce")


class GraphedModules:
    """Stands in for the forward calls of modules while a step runs. One that cannot be captured gives way to those that
    it calls."""

    def __init__(self, called: CalledModule, graph: Callable[[Any, str], Any]) -> None:
        """`graph`: makes what stands in for a module's `forward`, and has a place for what is done `instead`."""
        self.graphed: list[Any] = []
        self._graph, self._forwards = graph, dict[nn.Module, Any]()
        self._add(called)

    def __bool__(self) -> bool:
        return bool(self._forwards)

    def _add(self, called: CalledModule) -> None:
        for inner in called.worth_a_graph():
            self._add_graph(inner, inner.module)

    def _add_graph(self, called: CalledModule, module: Any) -> None:
        def instead() -> None:
            self._forwards.pop(module, None)
            self.graphed.remove(made)
            self._add(called)

        made = self._graph(module.forward, type(module).__name__)
        made.instead = instead
        self._forwards[module] = made
        self.graphed.append(made)

    @contextmanager
    def standing_in(self) -> Iterator[None]:
        forwards = [*self._forwards.items()]
        for module, forward in forwards:
            vars(module)["forward"] = forward
        try:
            yield
        finally:
            for module, _ in forwards:
                vars(module).pop("forward", None)
