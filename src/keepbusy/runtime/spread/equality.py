"""Checks that a spread model trains like one process: on an example before the loop, and at the first step."""

from __future__ import annotations

import linecache
import logging
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from keepbusy.runtime.spread.layout import RankLayout, own_part, share_of
from keepbusy.runtime.spread.module_tree import orders_of, reordered, without_dropout
from keepbusy.torch_names.distributed import COLLECTIVES, REDISTRIBUTION
from keepbusy.torch_names.pytorch import CALLED_AS, TorchDispatchMode, tree_leaves, tree_map

TOLERANCES = {torch.float64: 1e-6, torch.float32: 2e-3}
"""Allowed differences of a gradient, as a share of its norm, by the coarsest dtype of the model; 5e-2 for other dtypes.
Sums in another order differ by 1e-6, with TF32 by 1e-3, and gradients that are not averaged, or incomplete, by 0.1."""
_KINDS = {kind.replace("-", ""): kind for kind in ("all-reduce", "all-gather", "reduce-scatter", "broadcast")}
"""Collectives, by parts of their operators' names without underscores."""


class NotEqual(RuntimeError):  # noqa: N818 -- what was found
    """The spread model computes something else than one process."""


class Example:
    """An example batch, with the loss and all gradients of one process."""

    def __init__(self, model: nn.Module, batch: Any, device: torch.device) -> None:
        def of_first_rank(value: Any) -> Any:
            """All ranks must compare with the same example."""
            if isinstance(value, Tensor):
                value = value.detach().to(device, copy=True).contiguous()
                dist.broadcast(value, 0)
            return value

        self._batch = tree_map(of_first_rank, batch)
        self.calls: dict[nn.Module, tuple[tuple[Any, ...], dict[str, Any]]] = {}
        """The arguments of each module's call, which hold activations."""
        with ExitStack() as hooks:
            for module in model.modules():
                hooks.callback(module.register_forward_pre_hook(self._note, with_kwargs=True).remove)
            self.loss = _loss_of_run(model, model, self._batch)
        gradients = dict(_gradients(model))
        self._norms = {name: float(gradient.float().norm()) for name, gradient in gradients.items()}
        self._gradients = {name: gradient.cpu() for name, gradient in gradients.items()}
        dtypes = {gradient.dtype for gradient in gradients.values()}
        self._allowed = max((TOLERANCES.get(dtype, 5e-2) for dtype in dtypes), default=0.0)
        self.unused = [
            name for name, weight in model.named_parameters() if weight.requires_grad and weight.grad is None
        ]
        model.zero_grad()

    def _note(self, module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        # without caches, which grow at each run
        without_caches = {name: option for name, option in options.items() if "Cache" not in type(option).__name__}
        self.calls.setdefault(module, (arguments, without_caches))

    def prove(self, model: nn.Module, inner: nn.Module, layout: RankLayout, uncut: str) -> str:
        """A sentence on the comparison; raises `NotEqual`. `uncut`: a possible reason if sequences are cut."""
        sizes = {leaf.shape[0] for leaf in tree_leaves(self._batch) if isinstance(leaf, Tensor) and leaf.dim()}
        divides = all(size % layout.data == 0 for size in sizes)
        traffic = Traffic()
        try:
            with traffic:
                loss = _loss_of_run(model, inner, share_of(self._batch, layout) if divides else self._batch)
        except Exception as error:
            raise NotEqual(f"{layout}: {_where(error, inner)}{uncut}") from error
        worst, name = self._farthest(inner)
        model.zero_grad()
        dist.all_reduce(loss, group=layout.data_group)
        loss /= layout.data
        far = float((loss - self.loss).abs() / self.loss.abs().clamp(min=1e-12))
        allowed = self._allowed
        if not (far <= allowed and worst <= allowed):
            farthest = f"the gradient of {name} by {worst:.2g} of its norm" if worst > allowed else "no gradient"
            raise NotEqual(
                f"{layout}: of the example the loss differs from one process by {far:.2g} and {farthest} (allowed "
                f"{allowed:g}); between it and the loss something depends on the rows of a batch or is drawn at random"
                f"{uncut}"
            )
        moved = f"; it moves {traffic}" if traffic.number else ""
        if not any(self._norms.values()):
            return f"nothing could be compared with one process: the example's gradients are all zero{moved}"
        return f"one step equals one process (gradients within {max(far, worst):.1g}, allowed {allowed:g}){moved}"

    def _farthest(self, model: nn.Module) -> tuple[float, str]:
        """The largest difference of a gradient from one process, as a share of its norm, and its parameter."""
        floor, worst, missing = 1e-2 * max(self._norms.values()), (0.0, ""), set(self._gradients)
        for name, gradient in _gradients(model):
            if name in missing:
                missing.remove(name)
                difference = (gradient.float() - self._gradients[name].to(gradient.device).float()).norm()
                share = float(difference) / max(self._norms[name], floor, 1e-30)
                worst = max(worst, (share if share == share else float("inf"), name))
        return (float("inf"), next(name for name in self._gradients if name in missing)) if missing else worst


def _where(error: BaseException, model: nn.Module) -> str:
    """The innermost module that failed, its line, and the error."""
    names = {id(module): name or "the model" for name, module in model.named_modules()}
    frames = list(traceback.walk_tb(error.__traceback__))
    in_modules = [
        (frame, line)
        for frame, line in frames
        if id(frame.f_locals.get("self")) in names and CALLED_AS not in frame.f_code.co_name  # its wrapper
    ]
    frame, line = (in_modules or frames)[-1]
    name, file = names.get(id(frame.f_locals.get("self")), "the model"), frame.f_code.co_filename
    remedy = "wrap or cut less of it"
    if "DTensor" in str(error):
        remedy = "it reads a parameter of a module without calling that module; call it, or hold the parameter itself"
    return (
        f"{name} fails that ran whole, at {file}:{line} `{linecache.getline(file, line).strip()}`: "
        f"{str(error).partition(chr(10))[0]}; {remedy}"
    )


def _loss_of_run(model: nn.Module, inner: nn.Module, batch: Any) -> Tensor:
    """The example's loss, after its backward pass; buffers are restored. It is the model's own loss, or the mean square
    of its output, in which each row of a batch has the same weight."""
    options = batch if isinstance(batch, dict) else {}
    arguments = batch if isinstance(batch, tuple) else (() if options is batch else (batch,))
    buffers = {name: buffer.clone() for name, buffer in inner.named_buffers()}
    with without_dropout(inner):
        output = model(*arguments, **options)
        loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
        if not isinstance(loss, Tensor):
            leaves = tree_leaves(dict(output) if isinstance(output, dict) else output)
            tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
            if not tensors:
                kind = type(output).__name__
                raise ValueError(f"the model returned a {kind} without a tensor that has a gradient")
            loss = torch.stack([tensor.float().square().mean() for tensor in tensors]).sum()
        loss.backward()
    with torch.no_grad():
        for name, buffer in inner.named_buffers():
            if name in buffers:
                buffer.copy_(buffers[name])
    return loss.detach().float()


def _gradients(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Full gradients, one by one, since all together may be too large for the device."""
    orders = orders_of(model)
    logger = logging.getLogger(REDISTRIBUTION)
    level = logger.level
    logger.setLevel(logging.ERROR)  # gathering full gradients is slow, but is done once
    for name, weight in model.named_parameters():
        if weight.grad is not None:
            gradient = weight.grad.full_tensor() if isinstance(weight.grad, DTensor) else weight.grad
            order = orders[id(weight)].argsort() if id(weight) in orders else None
            yield name, reordered(gradient.detach(), order)
    logger.setLevel(level)


class FirstStep:
    """Checks before the optimizer's first step that no gradient is missing, that gradients are equal where they must
    be, and that parameters frozen when DDP wrapped them still are."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, layout: RankLayout) -> None:
        self._model, self._layout = model, layout
        self._frozen = {
            name: weight for name, weight in model.named_parameters() if layout.wraps and not weight.requires_grad
        }
        self._done = False
        optimizer.register_step_pre_hook(self._check)

    def _check(self, optimizer: torch.optim.Optimizer, *_arguments: Any) -> None:
        for name, weight in self._frozen.items():
            if weight.grad is not None:
                raise NotEqual(
                    f"{name} was frozen when the model was spread, and DDP does not send its gradients: each rank "
                    "would train its own; freeze it after spread"
                )
        trained = [weight for group in optimizer.param_groups for weight in group["params"] if weight.requires_grad]
        makes_states = all(group.get("lr") == 0 for group in optimizer.param_groups)
        if not self._done and not makes_states and any(weight.grad is not None for weight in trained):
            self._done = True
            self._check_gradients(trained)

    def _check_gradients(self, trained: list[Any]) -> None:
        names = {id(weight): name for name, weight in self._model.named_parameters()}
        if missing := [names[id(weight)] for weight in trained if weight.grad is None]:
            warnings.warn(
                f"{len(missing)} parameters got no gradient at the first step, such as {missing[0]}: they do not learn",
                stacklevel=3,
            )
        layout = self._layout
        if layout.wraps:
            compared, group = trained, layout.data_group
            remedy = "call the model that spread returned, outside of no_sync()"
        elif layout.tensor > 1:
            compared = [weight for weight in trained if weight.placements[-1].is_replicate()]
            group, remedy = layout.tensor_group, "give ranks that share layers the same batches"
        else:
            return
        zero = torch.zeros((), device=layout.device)
        grads = (weight.grad for weight in compared)
        norms = torch.stack([zero if grad is None else own_part(grad).float().norm() for grad in grads])
        low, high = norms.clone(), norms.clone()
        dist.all_reduce(low, dist.ReduceOp.MIN, group=group)
        dist.all_reduce(high, dist.ReduceOp.MAX, group=group)
        largest = float(high.max())
        for weight, least, most in zip(compared, low.tolist(), high.tolist(), strict=True):
            if most - least > 1e-3 * (most + largest):
                raise NotEqual(
                    f"the gradient of {names[id(weight)]} has norm {least:.4g} on one rank and {most:.4g} on another: "
                    f"it was not exchanged, or computed from other inputs; {remedy}"
                )


class Traffic(TorchDispatchMode):  # type: ignore[misc]  # PyTorch is not typed here
    """Counts collectives, and the bytes of their full tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.number: Counter[str] = Counter()
        self.size: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        if function.namespace in COLLECTIVES:
            name = function.__name__.replace("_", "")
            kind = next((kind for key, kind in _KINDS.items() if key in name), None)
            if kind:
                self.number[kind] += 1
                self.size[kind] += max(_bytes(args[0]), _bytes(args[1]))
        return function(*args, **(kwargs or {}))

    def __str__(self) -> str:
        return ", ".join(
            f"{self.number[kind]} {kind}s of {self.size[kind] / 1e6:.4g} MB" for kind in sorted(self.number)
        )


def _bytes(value: Any) -> int:
    return sum(leaf.nbytes for leaf in tree_leaves(value) if isinstance(leaf, Tensor))
