"""`Trainer(…, callbacks=[TrainerRecording()])`: a training by Hugging Face's Trainer, recorded and explained."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from keepbusy.integrations import WatchedTraining, figures, log_to


class TrainerRecording(TrainerCallback):
    """Logs the figures and the page where the trainer logs, and writes the page into its `output_dir`.

    `training.diagnosis` is the diagnosis.
    """

    def __init__(self) -> None:
        self.training = WatchedTraining()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            self.training.begin()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End with the last step: at the end of the training, trackers may have closed their runs."""
        if control.should_training_stop:
            self.on_train_end(args, state, control)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        diagnosis = self.training.end(args.output_dir)
        if diagnosis is None:
            return
        state.log_history.append({"step": state.global_step, **figures(diagnosis)})
        log_to(diagnosis, step=state.global_step)
        if "tensorboard" in args.report_to and (folder := _events_of(args)):
            from torch.utils.tensorboard import SummaryWriter

            with SummaryWriter(str(folder)) as writer:
                log_to(diagnosis, writer, step=state.global_step)


def _events_of(args: Any) -> Path | None:
    """The folder of the trainer's own TensorBoard callback: the one that is set, or else the latest."""
    setting = os.environ.get("TENSORBOARD_LOGGING_DIR")
    folders = [Path(setting).expanduser()] if setting else Path(args.output_dir).glob("runs/*")
    return max(folders, key=lambda folder: folder.stat().st_mtime, default=None)
