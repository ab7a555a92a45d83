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
    """Logs the figures to the trainer's loggers, and the page to those that can keep it and to the folder of the logs.

    `training.diagnosis` is the diagnosis.
    """

    def __init__(self) -> None:
        self.training = WatchedTraining()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.is_global_zero:
            self.training.begin()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        diagnosis = self.training.end(trainer.log_dir or trainer.default_root_dir)
        if diagnosis is None:
            return
        for logger in trainer.loggers:
            kind = type(logger).__name__
            if kind == "MLFlowLogger":
                log_to_mlflow(diagnosis, logger.experiment, logger.run_id, trainer.global_step)
            elif kind in ("TensorBoardLogger", "WandbLogger"):
                log_to(diagnosis, logger.experiment, step=trainer.global_step)
            else:
                logger.log_metrics(figures(diagnosis), trainer.global_step)
