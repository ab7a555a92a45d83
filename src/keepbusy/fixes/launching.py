"""Fixes of steps that launch more kernels than Python can keep up with."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from keepbusy.causes.places import by_place
from keepbusy.fixes.capture import capture_of
from keepbusy.fixes.definition import Advice, Candidate, Fix, PlacedCause, Remedy, SourceEdit
from keepbusy.timeline.figures import times
from keepbusy.timeline.frame_roles import Role
from keepbusy.timeline.model import FrameKind, Kind

MOST_OF_IT = 0.95
"""Of the launches: with more of them in graphs, nobody asks for the rest."""
COMPILED_AWAY = 0.2
"""Of what launches hold up, what `torch.compile` took away in the mean of four programs measured on an H200: nothing of
two, a fifth, and three fifths. What calls no module, the backward pass and the optimizer are launched as before."""


class LaunchLess(Fix):
    """A script that runs once never earns back what compiling or capturing costs."""

    name, label = "launch_less", "launch fewer kernels"
    causes = ("launch_bound",)
    advice = Advice("Compiling or capturing is not worth it for a script that runs once. In a loop it would be.")

    def applies(self, place: PlacedCause) -> bool:
        return place.inputs.timeline.facts.runs_once


class Compile(Fix):
    """Steps that no graph can hold."""

    name, label = "compile", "torch.compile"
    causes = ("launch_bound",)
    is_uncertain = True
    served_by = ("fuse_optimizer",)
    among_ranks = Advice(
        "Compile the model: it launches fewer kernels, and replays those between collectives as graphs.",
        'torch.compile(model, mode="reduce-overhead")',
        "torch.compile",
    )
    advice = Advice(
        "Compile the model, so that it launches fewer kernels. The step cannot be captured as a whole:",
        "model = torch.compile(model)",
        "torch.compile",
    )

    def remedy_at(self, place: PlacedCause) -> Remedy | None:
        if (place.inputs.timeline.spans.kind == Kind.COLLECTIVE).any():
            return self.says(self.among_ranks)
        if capture_of(place.inputs, place.fixes).share >= COMPILED_AWAY:
            return None
        return self._with_what_stays(place)

    def _with_what_stays(self, place: PlacedCause) -> Remedy:
        """For what most graphs end, and what does away with the wait there."""
        inputs = place.inputs
        waits = np.flatnonzero(inputs.is_sync & ~inputs.waits_for_large_copy)
        if len(np.unique(inputs.last_launch[waits])) <= inputs.steps:
            return self.says(self.advice._replace(advice=f"{self.advice.advice} its steps differ in what they launch."))
        places = by_place(inputs, waits)
        where, *others = sorted(places, key=lambda where: -len(places[where]))
        often = times(len(places[where]) / inputs.steps / len(inputs.timeline.ranks))
        more = f" and {len(others)} more" if others else ""
        remedy = place.of_sync(where, places[where]).remedy()
        why = f"it reads GPU values in its middle ({often} at {where}{more}). At those lines: {remedy.advice}"
        return self.says(self.advice._replace(advice=f"{self.advice.advice} {why}"), blockers=(where, *others))

    def candidate(self, place: PlacedCause, usual: Candidate) -> Candidate:  # noqa: ARG002
        return replace(usual, share=COMPILED_AWAY)


class CaptureGraph(Fix):
    """Statements that only launch kernels, captured once and replayed by one launch."""

    name, label = "graph", "capture as a CUDA graph"
    causes = ("launch_bound",)
    served_by = ("graph", "fuse_optimizer")
    usual = {  # noqa: RUF012
        "launch_bound": Advice(
            "Capture the step once and replay it, so that one launch replaces many.",
            "step = keepbusy.graph(train_step)  # or torch.compile(step, mode='reduce-overhead')",
            "keepbusy.graph",
        )
    }
    of_inference = Advice(
        "Capture what an iteration computes once and replay it, so that one launch replaces many.",
        "step = keepbusy.graph(compute)  # what an iteration computes, as a function; or torch.compile(compute, "
        "mode='reduce-overhead')",
        "keepbusy.graph",
    )

    def remedy_at(self, place: PlacedCause) -> Remedy | None:
        inputs = place.inputs
        operators = inputs.timeline.frames.kind == FrameKind.OPERATOR
        trains = inputs.frames_with(Role.BACKWARD | Role.OPTIMIZER).any() or not operators.any()
        return None if trains else self.says(self.of_inference)

    def candidate(self, place: PlacedCause, usual: Candidate) -> Candidate:
        """What graphs hold is launched at once; the rest is launched as before."""
        inputs, capture = place.inputs, capture_of(place.inputs, place.fixes)
        usual = replace(usual, edit=usual.edit.only(capture.rows), captured=capture.lines, first=capture.first)
        if capture.share > MOST_OF_IT:
            return usual
        reason = f"Graphs hold {capture.share:.0%} of the launches."
        places = by_place(inputs, np.flatnonzero(capture.stays))
        if places:
            first, *others = sorted(places, key=lambda place: -len(places[place]))
            more = f" and {len(others)} other line{'s' if len(others) > 1 else ''} do" if others else " does"
            reason += f" What {first}{more} stays outside."
        return replace(usual, reason=reason)

    def source_edit(self) -> SourceEdit:
        """Written from the captured lines: see `fixes.source.rewriting`."""
        return SourceEdit(
            "statements that only launch kernels become functions under `@keepbusy.graph`",
            lambda _, __: None,
            1e-4,
            "Adam and its kin round differently in a graph",
        )


class FuseOptimizer(Fix):
    """Optimizers that update one parameter after the other, or are asked for a value by GradScaler."""

    name, label = "fuse_optimizer", "use a fused optimizer"
    causes = ("host_sync",)
    removes_wait = is_gone_in_graph = True  # a graph is captured with optimizers that count on the device
    served_by = ("fuse_optimizer",)
    is_asked_for = True
    of_scaler = Advice(
        "GradScaler reads whether gradients overflowed. A fused optimizer checks that on the GPU.",
        "torch.optim.AdamW(model.parameters(), fused=True)  # or bfloat16, which needs no scaler",
        "torch.optim.AdamW",
    )
    of_rounds = Advice(
        "The optimizer updates one parameter after the other. With fused=True or foreach=True a few launches are "
        "enough.",
        "torch.optim.AdamW(model.parameters(), fused=True)  # or foreach=True",
        "torch.optim.AdamW",
    )

    def remedy_at(self, place: PlacedCause) -> Remedy | None:
        scales = (place.inputs.library_role[place.rows] & Role.SCALER).any()
        return self.says(self.of_scaler) if scales else None

    def source_edit(self) -> SourceEdit:
        from keepbusy.fixes.source.calls import write_fused

        return SourceEdit("`fused=True`", write_fused, 1e-4, "fused steps round differently")


class OneTable(Fix):
    """Embedding tables that are looked up one by one."""

    name, label = "one_table", "merge the embedding tables"
    advice = Advice(
        "Each table is looked up and updated separately. Merge them into one table, with an offset for the rows of "
        "each.",
        "rows = table(ids + offsets)  # nn.EmbeddingBag(sum(sizes), width, sparse=True), instead of a table a feature",
        "torch.nn.EmbeddingBag",
    )


class DoAtOnce(Fix):
    """Loops over many small tensors, of which each may need the one before it."""

    name, label = "do_at_once", "replace the loop by one call"
    is_uncertain = True
    advice = Advice(
        "The same operation runs on many small tensors, one after the other. Stack them, and run it once.",
        "torch.func.vmap(function)(stacked)  # or torch._foreach_add_(tensors, others)",
        "torch.func.vmap",
    )
