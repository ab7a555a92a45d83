"""`Accelerator(log_with=[AccelerateRecording()])`: records from `init_trackers` to `end_training`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from accelerate.tracking import GeneralTracker, on_main_process

from keepbusy.integrations import WatchedTraining, log_to


class AccelerateRecording(GeneralTracker):
    """Logs the figures and the page to runs of Weights & Biases and MLflow, if it comes before them in `log_with`.

    The page is written into `folder`. `tracker` is the diagnosis, for `keepbusy.integrations.log_to` with another
    tracker, such as `accelerator.get_tracker("tensorboard").writer`.
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
        if diagnosis := self._training.end(self._folder):
            log_to(diagnosis)
