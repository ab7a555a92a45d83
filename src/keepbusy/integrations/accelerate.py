"""`Accelerator(log_with=[AccelerateRecording()])`: what `init_trackers` begins and `end_training` ends, explained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from accelerate.tracking import GeneralTracker, on_main_process

from keepbusy.integrations import WatchedTraining, log_to


class AccelerateRecording(GeneralTracker):
    """Runs of Weights & Biases and MLflow get the figures and the page, if it stands before them in `log_with`.

    The page lies in `folder`. `tracker` is the diagnosis, so that `keepbusy.integrations.log_to` can take it elsewhere:
    to `accelerator.get_tracker("tensorboard").writer`.
    """

    name = "keepbusy"
    requires_logging_directory = False

    def __init__(self, folder: str | Path = ".") -> None:
        super().__init__()
        self._training, self._folder = WatchedTraining(), folder

    @property
    def tracker(self) -> Any:
        return self._training.diagnosis

    @on_main_process
    def start(self) -> None:
        self._training.begin()

    @on_main_process
    def finish(self) -> None:
        if found := self._training.end(self._folder):
            log_to(found)
