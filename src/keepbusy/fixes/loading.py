"""Fixes of input that comes too late."""

from __future__ import annotations

from keepbusy.fixes.definition import Advice, Fix, PlacedCause, Remedy, SourceEdit
from keepbusy.timeline.frame_roles import Role

DRAW_ONCE = "persistent workers draw their seed once, others in each epoch"


class PrepareInWorkers(Fix):
    """Batches that more processes could prepare."""

    name, label = "prepare_in_workers", "use more loader workers"
    causes = ("input_late", "peer_late")
    served_by = ("prepare_in_workers",)
    is_asked_for = True
    usual = {  # noqa: RUF012
        "input_late": Advice(
            "Prepare batches ahead in worker processes.",
            "DataLoader(..., num_workers={workers}, pin_memory=True, persistent_workers=True)",
            "torch.utils.data.DataLoader",
        )
    }
    more = Advice(
        "Use more loader workers, up to one for each core, and prefetch further ahead.",
        "DataLoader(..., num_workers=os.cpu_count(), prefetch_factor=4, persistent_workers=True)",
        "torch.utils.data.DataLoader",
    )
    of_late_rank = Advice(
        "Only this rank waits for its loader, and the others wait for it. Use more workers there, or distribute the "
        "data evenly.",
        "DataLoader(..., num_workers=os.cpu_count(), persistent_workers=True)",
        "torch.utils.data.DataLoader",
    )

    def remedy_at(self, place: PlacedCause) -> Remedy | None:
        inputs, rows = place.inputs, place.rows
        if place.cause == "peer_late":
            return self.says(self.of_late_rank) if (inputs.loader_frame[rows] >= 0).all() else None
        if inputs.within(Role.LOADER_WORKERS)[rows].any():
            return self.says(self.more)
        usual = self.usual["input_late"]
        return self.says(usual._replace(code=usual.code.replace("{workers}", str(inputs.workers))))

    def source_edit(self) -> SourceEdit:
        from keepbusy.fixes.source.loaders import with_loader_arguments

        return SourceEdit(
            "`num_workers=...` in `DataLoader(...)`, unless somebody chose a number",
            with_loader_arguments(num_workers="4", pin_memory="True", persistent_workers="True"),
            why=DRAW_ONCE,
        )


class ShareAmongWorkers(Fix):
    """Iterable datasets that one worker reads alone."""

    name, label = "share_among_workers", "split the data among workers"
    advice = Advice(
        "Split the data among the workers: in the dataset's __iter__, each worker takes every n-th sample.",
        "itertools.islice(samples, info.id, None, info.num_workers)  # info = torch.utils.data.get_worker_info()",
        "torch.utils.data.get_worker_info",
    )


class PrepareOnce(Fix):
    """Loops that prepare data before the GPU is used."""

    name, label = "prepare_once", "prepare the data once"
    advice = Advice(
        "The program prepares data here, and the GPU is idle. Keep the result in a file for the next run, compute it "
        "on the GPU, or in several processes."
    )
