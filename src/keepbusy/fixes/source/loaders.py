"""Loaders: their arguments, and loops over them that fetch ahead."""

from __future__ import annotations

from collections.abc import Callable

import libcst as cst
from libcst import matchers as m
from libcst.metadata import MetadataWrapper, ParentNodeProvider

from keepbusy.fixes.source.at_lines import AtLines, dotted, keyword_of, text_of, visiting, with_keyword

_WRAPPERS = {"enumerate", "tqdm", "track"}


class _Prefetch(AtLines):
    """`for x, y in loader:` becomes `for x, y in keepbusy.prefetch(loader):`."""

    def __init__(self, lines: frozenset[int]) -> None:
        super().__init__(lines)
        self.done = False

    def leave_For(self, original_node: cst.For, updated_node: cst.For) -> cst.For:  # noqa: N802
        if self.done or not self.stands(original_node) or _needs_host(original_node):
            return updated_node
        wrapped = _wrapped(updated_node.iter)
        if wrapped is None:
            return updated_node
        self.done = True  # the innermost loop comes first
        return updated_node.with_changes(iter=wrapped)


def _needs_host(loop: cst.For) -> bool:
    """Whether the loop does with its batches what only tensors of the host can: `labels.numpy()`, `np.sum(labels)`."""
    names = {cst.ensure_type(target, cst.Name).value for target in m.findall(loop.target, m.Name())}
    for node in m.findall(loop.body, m.Call()):
        call = cst.ensure_type(node, cst.Call)
        host_values = [arg.value for arg in call.args if dotted(call.func).startswith(("np.", "numpy."))]
        if isinstance(call.func, cst.Attribute) and call.func.attr.value in ("numpy", "pin_memory"):
            host_values.append(call.func.value)
        if names & {_of_host(value) for value in host_values}:
            return True
    return False


def _of_host(value: cst.BaseExpression) -> str:
    """The name of the batch that it is computed from where it lies."""
    while isinstance(value, cst.Attribute | cst.Subscript | cst.Call):
        if isinstance(value, cst.Attribute) and value.attr.value in ("cpu", "to", "cuda"):
            return ""
        value = value.func if isinstance(value, cst.Call) else value.value
    return value.value if isinstance(value, cst.Name) else ""


def _wrapped(iterated: cst.BaseExpression) -> cst.BaseExpression | None:
    if isinstance(iterated, cst.Name | cst.Attribute):
        return cst.Call(cst.parse_expression("keepbusy.prefetch"), [cst.Arg(iterated)])
    if isinstance(iterated, cst.Call) and iterated.args and dotted(iterated.func).rpartition(".")[2] in _WRAPPERS:
        inner = _wrapped(iterated.args[0].value)
        if inner is not None:
            return iterated.with_changes(args=[iterated.args[0].with_changes(value=inner), *iterated.args[1:]])
    return None


def write_prefetch(wrapper: MetadataWrapper, lines: frozenset[int]) -> cst.Module | None:
    """And the loader pins what it gives, so that the copies need no other memory in between."""
    change = _Prefetch(lines)
    module = wrapper.visit(change)
    if not change.done:
        return None
    return MetadataWrapper(module).visit(_Loaders(lines, pin_memory="True"))


class _Loaders(AtLines):
    """Arguments for `DataLoader(...)`: of the only one of the file, else of those that the loops here go through."""

    def __init__(self, lines: frozenset[int], **arguments: str) -> None:
        super().__init__(lines)
        self._arguments = arguments

    def visit_Module(self, node: cst.Module) -> None:  # noqa: N802
        loops = [cst.ensure_type(loop, cst.For) for loop in m.findall(node, m.For()) if self.stands(loop)]
        self._iterated = {name for loop in loops for name in _names_in(loop.iter)}
        self._is_only_one = sum(map(_is_loader, m.findall(node, m.Call()))) == 1

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.Call:  # noqa: N802
        if not _is_loader(original_node) or any(arg.star for arg in original_node.args):
            return updated_node
        parent = self.get_metadata(ParentNodeProvider, original_node)
        name = ""
        if isinstance(parent, cst.Assign) and len(parent.targets) == 1:
            name = dotted(parent.targets[0].target)
        if not self._is_only_one and name not in self._iterated:
            return updated_node
        workers = keyword_of(updated_node, "num_workers")
        if "num_workers" in self._arguments and len(updated_node.args) > 5 and workers is None:
            return updated_node  # it is given by position
        if "num_workers" in self._arguments and workers is not None:
            now, meant = text_of(workers.value), self._arguments["num_workers"]
            if not now.isdecimal() or int(now) >= int(meant):
                return updated_node  # somebody has thought about it
            count = cst.parse_expression(meant)
            updated_node = updated_node.with_deep_changes(workers, value=count)
        for argument, value in self._arguments.items():
            if keyword_of(updated_node, argument) is None:
                updated_node = with_keyword(updated_node, argument, value)
        return updated_node


def _names_in(node: cst.BaseExpression) -> list[str]:
    if isinstance(node, cst.Call):
        return [name for argument in node.args for name in _names_in(argument.value)]
    return [dotted(node)] if dotted(node) else []


def _is_loader(node: cst.CSTNode) -> bool:
    return dotted(cst.ensure_type(node, cst.Call).func).rpartition(".")[2] == "DataLoader"


def with_loader_arguments(**arguments: str) -> Callable[[MetadataWrapper, frozenset[int]], cst.Module]:
    return visiting(_Loaders, **arguments)
