"""Calls that are removed, get an argument or another name, or make their tensor on the device."""

from __future__ import annotations

from collections.abc import Callable

import libcst as cst
from libcst.metadata import MetadataWrapper

from keepbusy.fixes.definition import SourceEdit
from keepbusy.fixes.source.at_lines import AtLines, dotted, keyword_of, text_of, visiting, with_keyword

_FUSED = {"Adam", "AdamW", "SGD", "Adagrad"}
_SAME_ANYWHERE = {f"torch.{name}" for name in ("zeros", "ones", "full", "arange", "eye", "empty")}
"""What torch makes the same on every device."""
_RANDOM = {f"torch.{name}" for name in ("rand", "randn", "randint", "randperm", "normal")}
_SAME_SHAPED = {
    *("unsqueeze", "squeeze", "repeat", "expand", "view", "reshape", "flatten", "t", "transpose", "permute"),
    *("contiguous", "long", "int", "float", "bool", "half", "double", "bfloat16", "tril", "triu"),
}
"""Methods and functions that move values, or change their types, alike on every device."""


class _WithoutCall(AtLines):
    """Statements that only call one function are taken out."""

    def __init__(self, lines: frozenset[int], name: str) -> None:
        super().__init__(lines)
        self._name = name

    def leave_SimpleStatementLine(  # noqa: N802
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> cst.SimpleStatementLine | cst.RemovalSentinel:
        if len(original_node.body) != 1 or self.line(original_node) not in self.lines:
            return updated_node
        statement = original_node.body[0]
        match statement:
            case cst.Expr(value=cst.Call(func=func)) if dotted(func) == self._name:
                return cst.RemoveFromParent()
        return updated_node


class _Fused(AtLines):
    """`fused=True` for optimizers that chose no implementation; what comes in a dictionary may choose one."""

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.Call:  # noqa: N802, ARG002
        called = dotted(updated_node.func)
        chosen = any(keyword_of(updated_node, option) is not None for option in ("fused", "foreach", "differentiable"))
        chosen = chosen or any(argument.star == "**" for argument in updated_node.args)
        if called.rpartition(".")[2] not in _FUSED or "optim" not in called or chosen or not updated_node.args:
            return updated_node
        return with_keyword(updated_node, "fused", "True")


class _SavedLater(AtLines):
    """`torch.save(state, path)` becomes `keepbusy.save_later(state, path)`."""

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.Call:  # noqa: N802
        if dotted(updated_node.func) != "torch.save" or not self.stands(original_node) or len(updated_node.args) != 2:
            return updated_node
        return updated_node.with_changes(func=cst.parse_expression("keepbusy.save_later"))


write_fused = visiting(_Fused)
write_save_later = visiting(_SavedLater)


def without_call(name: str) -> Callable[[MetadataWrapper, frozenset[int]], cst.Module]:
    return visiting(_WithoutCall, name=name)


class _MadeThere(AtLines):
    """`torch.zeros(n).to("cuda")` becomes `torch.zeros(n, device="cuda")`."""

    def __init__(self, lines: frozenset[int], makers: frozenset[str]) -> None:
        super().__init__(lines)
        self._makers = makers

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.BaseExpression:  # noqa: N802
        func = updated_node.func
        if self.line(original_node) not in self.lines or not isinstance(func, cst.Attribute):
            return updated_node
        device = _device_of(func.attr.value, updated_node)
        tensor = None if device is None else self._made_on(func.value, device)
        return updated_node if tensor is None else tensor

    def _made_on(self, value: cst.BaseExpression, device: str) -> cst.BaseExpression | None:
        """`torch.arange(n).unsqueeze(0)`, made on the device."""
        if not isinstance(value, cst.Call):
            return None
        name = dotted(value.func)
        if name in self._makers:
            chosen = any(
                keyword_of(value, option) is not None for option in ("device", "pin_memory", "out", "generator")
            )
            return None if chosen else with_keyword(value, "device", device)
        if name.rpartition(".")[0] == "torch" and name[6:] in _SAME_SHAPED and value.args:
            inner = self._made_on(value.args[0].value, device)
            first = value.args[0].with_changes(value=inner)
            return None if inner is None else value.with_changes(args=[first, *value.args[1:]])
        if isinstance(value.func, cst.Attribute) and value.func.attr.value in _SAME_SHAPED:
            inner = self._made_on(value.func.value, device)
            return None if inner is None else value.with_changes(func=value.func.with_changes(value=inner))
        return None


def _device_of(method: str, call: cst.Call) -> str | None:
    """Where `.to(device)` or `.cuda()` takes it, if that is all that it does."""
    if method == "cuda" and not call.args:
        return '"cuda"'
    if method != "to" or len(call.args) != 1 or call.args[0].keyword is not None:
        return None
    device = text_of(call.args[0].value)
    return device if "dtype" not in device and not device.startswith("torch.float") else None


class _WithoutWaiting(AtLines):
    """`x.to(device)` gets `non_blocking=True`. The lines are those that call PyTorch's own method: others may not know
    the argument."""

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.BaseExpression:  # noqa: N802
        func, args = updated_node.func, updated_node.args
        if self.line(original_node) not in self.lines or not isinstance(func, cst.Attribute):
            return updated_node
        if _device_of(func.attr.value, updated_node) is not None:
            return with_keyword(updated_node, "non_blocking", "True")
        device, dtype = (keyword_of(updated_node, name) for name in ("device", "dtype"))
        others = [arg for arg in args[1:] if arg is not device and arg is not dtype]
        if dotted(func) not in _OF_DATA or device is None or others:
            return updated_node
        kept = [arg for arg in args if arg is not device]
        kept[-1] = kept[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)
        copied = cst.Call(cst.Attribute(updated_node.with_changes(args=kept), cst.Name("to")), [cst.Arg(device.value)])
        return with_keyword(copied, "non_blocking", "True")


_OF_DATA = {f"{module}.{name}" for module in ("torch", "th") for name in ("tensor", "as_tensor")}
WITHOUT_WAITING = SourceEdit('`non_blocking=True` in `torch.tensor(x).to("cuda")`', visiting(_WithoutWaiting))
ON_DEVICE = SourceEdit(
    '`torch.zeros(n, device="cuda")` instead of `torch.zeros(n).to("cuda")`; no random tensors',
    visiting(_MadeThere, makers=frozenset(_SAME_ANYWHERE)),
)
ON_DEVICE_OR_RANDOM = SourceEdit(ON_DEVICE.what, visiting(_MadeThere, makers=frozenset(_SAME_ANYWHERE | _RANDOM)))
"""Random numbers of the device's own generator are others."""
