"""What programs use in production to keep the host ahead of the device: torch alone, nothing of the other rooms."""

from keepbusy.runtime.agreement import gather_later as gather_later
from keepbusy.runtime.agreement import together as together
from keepbusy.runtime.readings import Readings as Readings
