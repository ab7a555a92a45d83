"""One model over many GPUs in one call: what a training loop needs, with the loop unchanged."""

from keepbusy.runtime.spread.spread_model import resume as resume
from keepbusy.runtime.spread.spread_model import state_of as state_of
