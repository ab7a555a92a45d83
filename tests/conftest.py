"""For all tests: properties bear a busy machine, the heap of a worker is not searched, caches go to a temporary folder,
and one Python is warm."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import tempfile
from contextlib import suppress

import pytest
from warm_python import WarmPython, warm

with suppress(ImportError):  # where the tests of real GPUs run, there may be none
    from hypothesis import HealthCheck, settings

    # how long an example takes is the machine's business: it may be busy
    settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("patient")


def pytest_configure(config: pytest.Config) -> None:
    """The user's cache stays as it is: `keepbusy run` keeps the last run there, also where a test starts it.

    Tests interrupt what they start: a shell that runs pytest in the background would have it ignore that.
    """
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if not hasattr(config, "workerinput"):  # workers of pytest-xdist inherit the folder
        config.stash[_CACHES] = os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="keepbusy-caches-")


def pytest_unconfigure(config: pytest.Config) -> None:
    if _CACHES in config.stash:
        shutil.rmtree(config.stash[_CACHES], ignore_errors=True)


_CACHES = pytest.StashKey[str]()


def pytest_collection_finish() -> None:
    """What is imported by now stays: a collection of garbage, such as comes before each graph, need not search it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def warm_python() -> WarmPython:
    return warm()
