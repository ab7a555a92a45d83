"""`Trainer(…, callbacks=[TrainerRecording()])`: a training by Hugging Face's Trainer, recorded and explained."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from keepbusy.integrations import WatchedTraining, figures, log_to


class TrainerRecording(TrainerCallback):
    """Where the trainer logs, the figures and the page are logged, too; the page lies in its `output_dir`.

    `training.diagnosis` is what was found.
    """

    def __init__(self) -> None:
        self.training = WatchedTraining()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            self.training.begin()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """After the last one: at the end of the training the trackers of the trainer may have closed their runs."""
        if control.should_training_stop:
            self.on_train_end(args, state, control)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        found = self.training.end(args.output_dir)
        if found is None:
            return
        state.log_history.append({"step": state.global_step, **figures(found)})
        log_to(found, step=state.global_step)
        if "tensorboard" in args.report_to and (folder := _events_of(args)):
            from torch.utils.tensorboard import SummaryWriter

            with SummaryWriter(str(folder)) as writer:
                log_to(found, writer, step=state.global_step)


def _events_of(args: Any) -> Path | None:
    """The folder in which the trainer's own callback has begun to write: the latest, if it was not told another."""
    told = os.environ.get("TENSORBOARD_LOGGING_DIR")
    begun = [Path(told).expanduser()] if told else Path(args.output_dir).glob("runs/*")
    return max(begun, key=lambda folder: folder.stat().st_mtime, default=None)
