"""For all tests: what the tests of a file share is made once, also where several processes share the tests."""

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


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        shared = getattr(item, "_fixtureinfo").name2fixturedefs.values()  # noqa: B009
        if any(fixture.scope == "module" for fixtures in shared for fixture in fixtures):
            item.add_marker(pytest.mark.xdist_group(item.path.stem))


def pytest_collection_finish() -> None:
    """What is imported by now stays: a collection of garbage, such as comes before each graph, need not search it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def warm_python() -> WarmPython:
    return warm()
