"""A program with no GPU -> `Timeline`: the device, its clock, its costs, its memory."""

IMPORTED = (
    *("keepbusy.virtual.virtual_run", "keepbusy.virtual.pytorch.host_side", "keepbusy.virtual.pytorch.operators"),
    *("keepbusy.virtual.pytorch.process_group", "sympy", "torch._dynamo", "torch.profiler"),
)
"""Modules that every run imports; a process that forks several runs imports them first. PyTorch imports sympy and
dynamo when it first computes the shape of a result."""
