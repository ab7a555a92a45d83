"""keepbusy where people train and keep their figures: trainers, trackers, notebooks.

One file a library, imported by who uses it: `from keepbusy.integrations.transformers import TrainerRecording`.
"""

from keepbusy.integrations.trackers import log_to as log_to
