"""Settings of trainers that hold the loop themselves: their users have no line of that loop to change."""

from __future__ import annotations

from collections.abc import Sequence

SETTINGS = {
    "transformers/trainer.py": {
        "input_late": "TrainingArguments(dataloader_num_workers=4, dataloader_persistent_workers=True)",
        "host_sync": "TrainingArguments(logging_nan_inf_filter=False, logging_steps=100)",
        "launch_bound": "TrainingArguments(torch_compile=True)",
    },
    "lightning/pytorch/": {"host_sync": "Trainer(log_every_n_steps=50), and self.log(..., prog_bar=False)"},
    "pytorch_lightning/": {"host_sync": "Trainer(log_every_n_steps=50), and self.log(..., prog_bar=False)"},
}
"""By where the trainer's files are, and by cause."""


def setting_of(causes: Sequence[str], holders: Sequence[str]) -> str:
    """The setting that fixes one of these causes, of the trainer that holds a loop; "" if there is none."""
    known = [settings for trainer, settings in SETTINGS.items() for holder in holders if holder.startswith(trainer)]
    return next((settings[cause] for settings in known for cause in causes if cause in settings), "")
