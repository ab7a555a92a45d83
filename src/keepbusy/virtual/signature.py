"""What an operator's schema says that a kernel needs to know, read once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from keepbusy.virtual.costs import ASKS
from keepbusy.virtual.tensors import map_tensors

# They take indices, lengths or step counts on the host beside tensors on the device, as CUDA's kernels do.
_TAKE_HOST_TENSORS = frozenset(
    [
        "_use_cudnn_ctc_loss",
        "index",
        "index_put",
        "index_put_",
        "_index_put_impl_",
        "_unsafe_index",
        "_unsafe_index_put",
        "lstm",
        "gru",
        "rnn_tanh",
        "rnn_relu",
        "_fused_adam_",
        "_fused_adamw_",
        "_fused_sgd_",
        "_fused_adagrad_",
        "_pack_padded_sequence",
        "ctc_loss",
        "_ctc_loss",
        "_ctc_loss_backward",
        "embedding_bag",
        "histogramdd",
    ]
)
# They are marked as random, for what they may do on some device; on the host they draw nothing.
_DRAW_NOTHING = frozenset(["scaled_dot_product_attention", "lstm", "gru", "rnn_tanh", "rnn_relu"])


class Signature:
    """One overload: where tensors stand, what it writes, and what it returns."""

    __slots__ = (
        "_writes",
        "arguments",
        "asks",
        "has_generator",
        "is_random",
        "many",
        "name",
        "returned",
        "short",
        "takes_host_tensors",
        "tensors",
        "written",
    )  # fmt: skip

    def __init__(self, overload: torch._ops.OpOverload) -> None:
        schema = overload._schema
        name = schema.name.split("::")[1]
        self.name = schema.name
        self.short = name
        self.arguments = [one.name for one in schema.arguments]
        self.tensors = frozenset(at for at, one in enumerate(schema.arguments) if str(one.type) == "Tensor")
        self.written = frozenset(one.name for one in schema.arguments if _writes(one))
        self._writes = tuple((one.name, at) for at, one in enumerate(schema.arguments) if _writes(one, True))
        self.returned = tuple(_returned(schema, one) for one in schema.returns)
        self.takes_host_tensors = name in _TAKE_HOST_TENSORS or name.startswith("_foreach_")
        self.has_generator = "generator" in self.arguments
        self.many = name.startswith(("_foreach_", "_fused_"))
        self.asks = tuple((one, self._at(one)) for one in ASKS.get(name, ()))
        self.is_random = torch.Tag.nondeterministic_seeded in overload.tags and name not in _DRAW_NOTHING

    def _at(self, argument: str) -> int:
        return self.arguments.index(argument) if argument in self.arguments else len(self.arguments)

    def asked(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
        """What the cost of a call depends on, beside its tensors; arguments left out have their usual value."""
        if self.many:
            return {"lists": sum(isinstance(one, list | tuple) and len(one) > 0 for one in args)}
        return {
            name: args[at] if at < len(args) else kwargs[name]
            for name, at in self.asks
            if at < len(args) or name in kwargs
        }

    def written_by(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
        """The tensors that a call writes into, also those of which the schema does not tell."""
        found: list[torch.Tensor] = []
        for name, at in self._writes:
            map_tensors(found.append, args[at] if at < len(args) else kwargs.get(name))
        return found


def _writes(argument: Any, silently: bool = False) -> bool:
    """`silently`: running means are also written by operators that do not say so."""
    said = argument.alias_info is not None and argument.alias_info.is_write
    return said or (silently and argument.name.startswith("running_"))


def _returned(schema: Any, result: Any) -> tuple[int, str] | None:
    """Which argument a result is, by place and name; None for one that is new."""
    if not _writes(result):
        return None
    for at, argument in enumerate(schema.arguments):
        if _writes(argument) and argument.alias_info.before_set == result.alias_info.before_set:
            return at, argument.name
    return None


def returns_a_view(overload: torch._ops.OpOverload) -> bool:
    return any(one.alias_info is not None and not one.alias_info.is_write for one in overload._schema.returns)


def overload_named(name: str) -> torch._ops.OpOverload | None:
    """By its full name, `aten::add.Tensor`; None where this version lacks it."""
    base, _, variant = name.removeprefix("aten::").partition(".")
    try:
        return getattr(getattr(torch.ops.aten, base), variant or "default")
    except (AttributeError, RuntimeError):
        return None
