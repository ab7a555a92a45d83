"""PyTorch's own operator database, forward and backward, on the virtual GPU against the CPU.

    python tests/torch/operator_sweep.py [samples an operator] [one in so many operators in sixteen bits] [in all bits]

prints every sample that differs, and how many are right. Two ways have sixteen bits: `half`, where inputs are of them,
and where an operator takes a `dtype`, results are asked for in thirty-two; and `autocast`, under which operators
run. There the CPU computes otherwise than a GPU, and what is looked for are refusals alone.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

DRAWS_FROM_NOWHERE = ("empty", "new_empty", "empty_like", "empty_strided", "empty_permuted", "new_empty_strided")
"""Their values are whatever stood in memory."""


def operators() -> list[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal import common_utils
        from torch.testing._internal.common_methods_invocations import op_db
        from torch.testing._internal.opinfo import core
    core.extract_test_fn = common_utils.extract_test_fn = lambda: None  # the stack would be searched for each sample's
    return list(op_db)


def name_of(operator: Any) -> str:
    return f"{operator.name}.{operator.variant_test_name}" if operator.variant_test_name else str(operator.name)


def samples(operator: Any, most: int) -> Iterator[Any]:
    """Dense ones that the CPU itself can compute."""
    dtype = torch.float32 if torch.float32 in operator.dtypes else next(iter(operator.dtypes), torch.float32)
    grad = operator.supports_autograd and dtype.is_floating_point
    given = iter(operator.sample_inputs("cpu", dtype, requires_grad=grad))
    for sample in islice(given, most):
        if all(one.layout is torch.strided for one in tensors((sample.input, sample.args, sample.kwargs))):
            yield sample


def tensors(value: Any) -> list[Tensor]:
    return [one for one in pytree.tree_leaves(value) if isinstance(one, Tensor)]


def on_device(value: Any) -> Any:
    """A tensor that stands in two places stands there on the device as well."""
    moved: dict[int, Tensor] = {}

    def move(one: Any) -> Any:
        if isinstance(one, Tensor):
            if id(one) not in moved:
                moved[id(one)] = one.detach().to("cuda").requires_grad_(one.requires_grad)
            return moved[id(one)]
        return "cuda" if one == "cpu" or isinstance(one, torch.device) else one

    return pytree.tree_map(move, value)


def difference(operator: Any, sample: Any) -> str | None:
    """What is wrong with a sample; None if nothing is, "skipped" if the CPU cannot compute it."""
    plain = (sample.input, sample.args, sample.kwargs)
    try:
        expected = _computed(operator, plain)
    except Exception:
        return "skipped"
    try:
        found = _computed(operator, on_device(plain))
        _compare(operator, expected, found)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:150] if str(error) else ''}"
    return None


def _computed(operator: Any, call: tuple[Any, Any, Any]) -> tuple[list[Tensor], list[Tensor | None]]:
    torch.manual_seed(0)
    value, args, kwargs = call
    out = tensors(operator(value, *args, **kwargs))
    leaves = [one for one in tensors(call) if one.requires_grad and one.is_leaf]
    summed = [one.abs().sum() if one.is_complex() else one.sum() for one in out if one.requires_grad]
    if not (leaves and summed):
        return out, []
    return out, list(torch.autograd.grad(sum(summed), leaves, allow_unused=True))


def _compare(operator: Any, expected: Any, found: Any) -> None:
    for ones, others in zip(expected, found, strict=True):
        for one, other in zip(ones, others, strict=True):
            if one is None or other is None:
                assert one is other, "only one of the two has a gradient"
                continue
            assert other.is_cuda, f"a result is on {other.device}"
            if operator.name not in DRAWS_FROM_NOWHERE:
                torch.testing.assert_close(other.detach().cpu(), one.detach().cpu(), equal_nan=True, rtol=0, atol=0)


_TAKES_NO_DTYPE = ("eyword argument", "combination of arguments", "match any schema", "expected at most")


def refusal(operator: Any, sample: Any, way: str) -> str | None:
    """What stops an operator in sixteen bits, or under autocast, that runs in thirty-two."""
    plain = (sample.input, sample.args, sample.kwargs)
    try:
        _computed(operator, plain)
    except Exception:
        return "skipped"
    moved = on_device(plain)
    if way == "half":
        moved = pytree.tree_map(_narrowed, moved)
    try:
        with torch.autocast("cuda", dtype=torch.float16, enabled=way == "autocast"):
            _computed(operator, moved)
            if way == "half" and "dtype" not in moved[2]:
                _computed(operator, (moved[0], moved[1], {**moved[2], "dtype": torch.float32}))
    except Exception as error:
        if any(words in str(error) for words in _TAKES_NO_DTYPE):
            return None
        return f"{type(error).__name__}: {str(error).splitlines()[0][:150] if str(error) else ''}"
    return None


def _narrowed(one: Any) -> Any:
    if isinstance(one, Tensor) and one.dtype is torch.float32:
        return one.detach().half().requires_grad_(one.requires_grad)
    return one


def main(most: int, in_sixteen_bits: int = 0, every: int = 1) -> int:
    from keepbusy.virtual.virtual_run import Options, start

    start(Options(measured=False, one_generator=True))
    warnings.simplefilter("ignore")
    code = sweep("", most, every)
    for way in ("half", "autocast") if in_sixteen_bits else ():
        sweep(way, most, in_sixteen_bits)
    return code


def sweep(way: str, most: int, every: int) -> int:
    """Prints what went wrong, and ends with how much went right; 1 if that is too little."""
    from keepbusy.virtual.machine import MACHINE

    right, wrong = 0, []
    for operator in operators()[::every]:
        try:
            chosen = list(samples(operator, most))
        except Exception:
            continue  # its samples need what this build lacks
        if way == "half" and torch.float16 not in operator.dtypesIfCUDA:
            continue
        for index, sample in enumerate(chosen):
            sys.stderr.write(f"{name_of(operator)} {index}\n")
            said = refusal(operator, sample, way) if way else difference(operator, sample)
            right += said is None
            if said not in (None, "skipped"):
                wrong.append((name_of(operator), index, said))
    for row in wrong:
        sys.stdout.write(" ".join(map(str, row)) + "\n")
    total = right + len(wrong)
    notes = MACHINE.notes or []
    for note in notes:
        sys.stdout.write(f"{note}\n")
    sys.stdout.write(f"{right} of {total} samples right ({right / max(1, total):.2%}) {way}\n")
    return int(right < 0.99 * total or bool(notes))


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:] or ["1"])))
