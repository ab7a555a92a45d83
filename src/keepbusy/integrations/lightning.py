"""`Trainer(…, callbacks=[LightningRecording()])`: a training by Lightning, recorded and explained."""

from __future__ import annotations

import sys
from typing import Any

if "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules:
    from pytorch_lightning import Callback
else:
    from lightning.pytorch import Callback

from keepbusy.integrations import WatchedTraining, figures, log_to, log_to_mlflow


class LightningRecording(Callback):
    """The trainer's loggers get the figures, and what can keep it the page, which lies in the folder of the logs, too.

    `training.diagnosis` is what was found.
    """

    def __init__(self) -> None:
        self.training = WatchedTraining()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.is_global_zero:
            self.training.begin()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        found = self.training.end(trainer.log_dir or trainer.default_root_dir)
        if found is None:
            return
        for logger in trainer.loggers:
            kind = type(logger).__name__
            if kind == "MLFlowLogger":
                log_to_mlflow(found, logger.experiment, logger.run_id, trainer.global_step)
            elif kind in ("TensorBoardLogger", "WandbLogger"):
                log_to(found, logger.experiment, step=trainer.global_step)
            else:
                logger.log_metrics(figures(found), trainer.global_step)
