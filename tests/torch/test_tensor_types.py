"""`torch.cuda.FloatTensor` and its kin, and tensors that nobody says where to make: as on an H200, PyTorch 2.11."""

from __future__ import annotations

import pytest

PROGRAM = """\
import numpy
import torch
from torch.utils.data import DataLoader

def seen(found):
    return found.type() if isinstance(found, torch.Tensor) else found

def told(expression):
    try:
        return seen(eval(expression))
    except (TypeError, RuntimeError) as error:
        return f"{type(error).__name__}: {str(error)[:70]}"

numbers = torch.zeros(4)
for expression in open("expressions.txt").read().splitlines():
    print(told(expression), flush=True)
"""
ANOTHER_GENERATOR = "RuntimeError: Expected a 'cuda' device type for generator but found 'cpu'"
HOSTS_GENERATOR = "RuntimeError: Expected a 'cpu' device type for generator but found 'cuda'"
NO_DEFAULT = "TypeError: only floating-point types are supported as the default type"
ALWAYS = {
    "torch.cuda.FloatTensor": "<class 'torch.cuda.FloatTensor'>",
    "torch.cuda.HalfTensor.__module__, torch.cuda.HalfTensor.__name__": "('torch.cuda', 'HalfTensor')",
    "torch.cuda.FloatTensor.is_cuda, torch.cuda.FloatTensor.dtype": "(True, torch.float32)",
    "numbers.type('torch.cuda.FloatTensor')": "torch.cuda.FloatTensor",
    "numbers.type(torch.cuda.HalfTensor)": "torch.cuda.HalfTensor",
    "numbers.cuda().type(torch.DoubleTensor)": "torch.DoubleTensor",
    "torch.cuda.FloatTensor(3, 4).shape": "torch.Size([3, 4])",
    "torch.cuda.LongTensor([1, 2]).tolist()": "[1, 2]",
    "torch.cuda.BoolTensor([True])": "torch.cuda.BoolTensor",
    "torch.cuda.FloatTensor(numbers.cuda())": "torch.cuda.FloatTensor",
    "torch.cuda.FloatTensor(numbers)": "TypeError: expected ",
    "[isinstance(one, torch.cuda.FloatTensor) for one in (numbers, numbers.cuda())]": "[False, True]",
    "torch.rand(3, device='cuda', generator=torch.Generator())": ANOTHER_GENERATOR,
    "torch.rand(3, device='cpu', generator=torch.Generator('cuda'))": HOSTS_GENERATOR,
    "torch.zeros(3, device='cpu').normal_(generator=torch.Generator('cuda'))": HOSTS_GENERATOR,
    "torch.set_default_tensor_type(torch.cuda.LongTensor)": NO_DEFAULT,
}
AS_DEFAULT = {
    "torch.zeros(3)": "torch.cuda.FloatTensor",
    "repr(torch.zeros(1)), repr(torch.zeros(1, device='cpu'))": "('tensor([0.])', \"tensor([0.], device='cpu')\")",
    "torch.tensor([1, 2])": "torch.cuda.LongTensor",
    "torch.Tensor(3)": "torch.cuda.FloatTensor",
    "torch.Tensor([1, 2]).tolist()": "[1.0, 2.0]",
    "torch.normal(0.0, 1.0, (2,))": "torch.cuda.FloatTensor",
    "torch.fft.fftfreq(3)": "torch.cuda.FloatTensor",
    "torch.nn.Linear(2, 2).weight": "torch.cuda.FloatTensor",
    "len(torch.optim.Adam(torch.nn.Linear(2, 2).parameters()).param_groups)": "1",
    "torch.as_tensor(numpy.ones(2))": "torch.cuda.DoubleTensor",
    "torch.randn(2, dtype=torch.float64)": "torch.cuda.DoubleTensor",
    "torch.from_numpy(numpy.ones(2))": "torch.DoubleTensor",
    "[seen(make(numbers)) for make in (torch.tensor, torch.as_tensor, torch.Tensor)]": "['torch.FloatTensor', "
    "'torch.FloatTensor', 'torch.FloatTensor']",
    "torch.asarray([1.0])": "torch.FloatTensor",
    "torch.zeros(3).normal_(generator=torch.Generator())": ANOTHER_GENERATOR,
    "list(DataLoader(numbers, shuffle=True))": ANOTHER_GENERATOR,
    "len(list(DataLoader(numbers, shuffle=True, generator=torch.Generator('cuda'))))": "4",
    "torch.set_default_tensor_type('torch.FloatTensor') or torch.zeros(3)": "torch.FloatTensor",
}
CASES = {
    **ALWAYS,
    "torch.set_default_tensor_type('torch.cuda.FloatTensor')": "None",
    **AS_DEFAULT,
    "torch.set_default_tensor_type(torch.cuda.DoubleTensor) or torch.ones(2)": "torch.cuda.DoubleTensor",
    "torch.set_default_tensor_type(torch.FloatTensor)": "None",
    "torch.set_default_device('cuda')": "None",
    "torch.ones(3)": "torch.cuda.FloatTensor",
    "torch.Tensor(4)": "torch.FloatTensor",
    "torch.randperm(3, generator=torch.Generator())": ANOTHER_GENERATOR,
    "list(DataLoader(numbers, shuffle=True, drop_last=True))": ANOTHER_GENERATOR,
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensor_types_and_default_devices_are_those_of_a_gpu(run, tmp_path) -> None:
    (tmp_path / "expressions.txt").write_text("\n".join(CASES), encoding="utf-8")
    done = run(PROGRAM, before=("--quiet", "--save", "run.busy"))
    assert done.returncode == 0, done.stderr
    found = dict(zip(CASES, done.stdout.splitlines(), strict=True))
    assert {one: text[: len(CASES[one])] for one, text in found.items()} == CASES
