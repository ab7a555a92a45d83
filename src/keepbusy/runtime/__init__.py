"""What programs use in production to keep the host ahead of the device: torch alone, nothing of the other rooms."""

from keepbusy.runtime.agree import gather_later as gather_later
from keepbusy.runtime.agree import together as together
from keepbusy.runtime.readback import Readings as Readings
