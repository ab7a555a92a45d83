"""PyTorch's own module database, forward and backward, on the virtual GPU against the CPU.

    python tests/torch/module_sweep.py [samples a module]

prints every sample that differs, and how many are right.
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from operator_sweep import on_device, tensors
from torch import Tensor, nn

Sample = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


def modules() -> list[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_modules import module_db
    return list(module_db)


def samples(module: Any, most: int) -> Iterator[Sample]:
    """In training and, where that differs, in evaluation."""
    for training in {True, *([False] if module.train_and_eval_differ else [])}:
        torch.manual_seed(0)
        given = module.module_inputs_func(
            module, device="cpu", dtype=torch.float32, requires_grad=True, training=training
        )
        for sample in islice(given, most):
            if sample.forward_input is not None:
                made = sample.constructor_input
                one = module.module_cls(*made.args, **made.kwargs).train(training)
                yield one, sample.forward_input.args, sample.forward_input.kwargs


def difference(sample: Sample) -> str | None:
    """What is wrong with a sample; None if nothing is, "skipped" if the CPU cannot compute it."""
    module, args, kwargs = sample
    moved = copy.deepcopy(module).to("cuda")
    try:
        expected = _computed(module, args, kwargs)
    except Exception:
        return "skipped"
    try:
        found = _computed(moved, *on_device((args, kwargs)))
        for one, other in zip(expected, found, strict=True):
            if (one is None) is not (other is None):
                return "only one of the two has a gradient"
            if one is not None and other is not None:
                torch.testing.assert_close(other.detach().cpu(), one.detach(), equal_nan=True)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:150] if str(error) else ''}"
    return None


def _computed(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor | None]:
    """Results, gradients, and what the module keeps of what it saw."""
    torch.manual_seed(0)
    out = tensors(module(*args, **kwargs))
    leaves = [one for one in (*tensors((args, kwargs)), *module.parameters()) if one.requires_grad]
    ends = [one.square().sum() for one in out if one.requires_grad]
    gradients = torch.autograd.grad(sum(ends), leaves, allow_unused=True) if leaves and ends else ()
    return [*out, *gradients, *module.buffers()]


def main(most: int) -> int:
    from keepbusy.virtual.virtual_run import Options, start

    start(Options(measured=False, one_generator=True))
    warnings.simplefilter("ignore")
    right, wrong = 0, []
    for module in modules():
        try:
            chosen = list(samples(module, most))
        except Exception:
            continue  # its samples need what this build lacks
        for index, sample in enumerate(chosen):
            sys.stderr.write(f"{module.name} {index}\n")
            said = difference(sample)
            right += said is None
            if said not in (None, "skipped"):
                wrong.append((module.name, index, said))
    for row in wrong:
        sys.stdout.write(" ".join(map(str, row)) + "\n")
    sys.stdout.write(f"{right} of {right + len(wrong)} samples right\n")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 1))
