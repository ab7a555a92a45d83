"""Fixes of memory that is requested from the driver again and again."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from keepbusy.fixes.definition import Advice, Candidate, Fix, PlacedCause, SourceEdit
from keepbusy.timeline.frame_roles import Role
from keepbusy.timeline.run_facts import RunFacts


class ExpandSegments(Fix):
    """Sizes that change from step to step, so that no free block fits."""

    name, label = "expand_segments", "use expandable segments"
    causes = ("allocator",)
    advice = Advice(
        "No free block is large enough, so PyTorch requests memory from the driver. Expandable segments serve sizes "
        "that change from step to step, and leave no gaps.",
        "PYTORCH_ALLOC_CONF=expandable_segments:True  # in the environment; before PyTorch 2.9 PYTORCH_CUDA_ALLOC_CONF",
        "torch.cuda.memory_stats",
    )

    def applies(self, place: PlacedCause) -> bool:
        """What is given back within no operator was asked for by the program; else no free piece fitted."""
        rows = place.finding.rows
        role = place.inputs.timeline.spans.role[rows]
        of_device = 2 * np.count_nonzero(role & Role.ASKS_MEMORY) > np.count_nonzero(role & Role.GIVES_BACK == 0)
        return bool(of_device and not place.inputs.is_given_back[rows].any())

    def candidate(self, place: PlacedCause, usual: Candidate) -> Candidate:
        return replace(usual, reason=allocator_settings(place.inputs.timeline.facts))


_IN_THE_WAY = {
    "max_split_size_mb": "keeps large pieces whole",
    "garbage_collection_threshold": "gives memory back that is asked for again",
    "expandable_segments:False": "forbids segments to grow",
}


def allocator_settings(facts: RunFacts) -> str:
    """What the program's environment sets for the allocator, where that was recorded."""
    if facts.allocator is None:
        return "What PYTORCH_ALLOC_CONF was is not known of a trace."
    if "expandable_segments:True" in facts.allocator:
        return f"{facts.allocator} was set: segments grow already, so pad to a few sizes, or keep less alive."
    reasons = [f"{name}, which {effect}" for name, effect in _IN_THE_WAY.items() if name in facts.allocator]
    if reasons:
        return f"{facts.allocator} was set: leave out {', and '.join(reasons)}."
    return f"{facts.allocator} was set." if facts.allocator else "PYTORCH_ALLOC_CONF was not set."


class KeepMemory(Fix):
    """Memory that the program gives back, and has to request again."""

    name, label = "keep_memory", "keep the allocator's memory"
    served_by = ("keep_memory",)
    usual = {  # noqa: RUF012
        "allocator": Advice(
            "Keep the caching allocator's memory: no empty_cache() in the loop, and shapes that repeat.",
            "# drop torch.cuda.empty_cache(); PYTORCH_ALLOC_CONF=expandable_segments:True",
            "torch.cuda.empty_cache",
        )
    }

    def source_edit(self) -> SourceEdit:
        from keepbusy.fixes.source.calls import without_call

        return SourceEdit("`torch.cuda.empty_cache()` is removed", without_call("torch.cuda.empty_cache"))
