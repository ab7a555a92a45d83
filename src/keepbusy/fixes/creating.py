"""Fixes of tensors that are created on the CPU."""

from __future__ import annotations

import numpy as np

from keepbusy.fixes.definition import Advice, Fix, PlacedCause, Remedy, SourceEdit
from keepbusy.fixes.reading import waits_in_backward
from keepbusy.timeline.frame_roles import Role

MAKERS = {"arange", "eye", "full", "linspace", "normal", "ones", "rand", "randint", "randperm", "zeros"}
"""What makes a tensor of nothing but its arguments, and takes a device, as `torch.randn` does."""


class MakeOnDevice(Fix):
    """Tensors that are created on the CPU and copied to the GPU."""

    name, label = "make_on_device", "create the tensor on the GPU"
    causes = ("made_on_host",)
    served_by = ("make_on_device",)
    usual = {  # noqa: RUF012
        "made_on_host": Advice(
            "Create the tensor on the GPU, where it is needed.",
            'torch.randn(shape, device="cuda")  # no copy, no work for the CPU',
            "torch.randn",
        )
    }

    def remedy_at(self, place: PlacedCause) -> Remedy | None:
        """With the name of the function that makes it, where that is known."""
        inputs, timeline = place.inputs, place.inputs.timeline
        frame = inputs.outermost(inputs.frames_with(Role.MAKES))[np.isin(place.finding.culprit, place.rows)]
        frames = frame[frame >= 0]
        makers = {timeline.names[name].rpartition("::")[2] for name in timeline.frames.name[frames].tolist()}
        if len(makers) != 1 or (name := makers.pop()) not in MAKERS:
            return None
        usual = self.usual[place.cause]
        code = usual.code.replace("torch.randn(shape", f"torch.{name}(...")
        return self.says(usual._replace(code=code, api=f"torch.{name}"))

    def source_edit(self) -> SourceEdit:
        from keepbusy.fixes.source.calls import ON_DEVICE

        return ON_DEVICE

    def suggested_edit(self) -> SourceEdit:
        from keepbusy.fixes.source.calls import ON_DEVICE_OR_RANDOM

        return ON_DEVICE_OR_RANDOM


class CreateOnGpu(Fix):
    """Leaves of the gradient that are created on the CPU."""

    name, label = "create_on_gpu", "create the tensor on the GPU"
    causes = ("host_sync",)
    removes_wait = is_gone_in_graph = True  # it is created elsewhere
    advice = Advice(
        "A tensor that requires a gradient was made on the CPU, so every backward pass copies its gradient there, and "
        "waits. Make it on the GPU.",
        "x = torch.tensor(data, device='cuda', requires_grad=True)  # instead of torch.tensor(data, "
        "requires_grad=True).to('cuda')",
        "torch.tensor",
    )

    def applies(self, place: PlacedCause) -> bool:
        moves = place.inputs.within(Role.MOVES)[place.rows]
        return bool(2 * np.count_nonzero(moves) > len(moves)) and waits_in_backward(place)
