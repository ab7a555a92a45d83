"""For all tests: properties bear a busy machine, the heap of a worker is not searched, and one Python is warm."""

from __future__ import annotations

import gc
from contextlib import suppress

import pytest
from warm_python import WarmPython, warm

with suppress(ImportError):  # where the tests of real GPUs run, there may be none
    from hypothesis import HealthCheck, settings

    # how long an example takes is the machine's business: it may be busy
    settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("patient")


def pytest_collection_finish() -> None:
    """What is imported by now stays: a collection of garbage, such as comes before each graph, need not search it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def warm_python() -> WarmPython:
    return warm()
