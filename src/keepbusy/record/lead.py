"""The lead: how far the host is ahead of the device at each mark, from two clocks that know nothing of each other.

Of each mark it is known how much the host's clock is ahead of the device's: at least so much, and at most so much.
Where the device waits for the host, the first of these is exact to the few microseconds of a launch: the device passes
the mark as soon as it is set. The clocks drift apart by some microseconds a second, so what one mark says of another
holds the less, the further apart they are.
"""

from __future__ import annotations

import numpy as np

from keepbusy.timeline.model import NONE, Ints

DRIFT = 5e-6
"""The clocks of one machine do not drift apart faster than this; on an H200's host it was 0.85 µs a second."""


def offset(times: Ints, earliest: Ints, latest: Ints) -> Ints:
    """How much the host's clock is ahead of the device's at each of these times: the most that any mark demands.

    What a mark demands decays with the distance, and no mark may contradict that the host has seen it passed.
    """
    decay = DRIFT * (times - times[0])
    after = np.maximum.accumulate(earliest + decay) - decay
    before = np.maximum.accumulate((earliest - decay)[::-1])[::-1] + decay
    return np.minimum(np.maximum(after, before), latest).astype(np.int64)


def leads(host: Ints, times: Ints, earliest: Ints, latest: Ints) -> Ints:
    """At each mark, how long after the host the device passes it; NONE where nobody knows when it did."""
    lead = np.full(len(host), NONE, np.int64)
    known = np.flatnonzero(times != NONE)
    if len(known):
        ahead = offset(times[known], earliest[known], latest[known])
        lead[known] = np.maximum(0, times[known] + ahead - host[known])
    return lead
