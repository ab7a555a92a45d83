"""`prefetch`: batches on the device before the loop asks for them."""

from keepbusy.runtime.prefetch.prefetch_iterator import prefetch as prefetch
