"""A program with no GPU -> `Timeline`: the device, its clock, its costs, its memory."""

IMPORTED = (
    *("keepbusy.virtual.virtual_run", "keepbusy.virtual.pytorch.host_side", "keepbusy.virtual.pytorch.operators"),
    *("keepbusy.virtual.pytorch.process_group", "sympy", "torch._dynamo", "torch.profiler"),
)
"""What every run would import, for who forks several of them. PyTorch imports sympy and dynamo once the shape of a
result is computed."""
