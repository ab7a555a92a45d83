"""For all tests: what the tests of a file share is made once, also where several processes share the tests."""

from __future__ import annotations

import pytest
from warm_python import WarmPython, warm


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        shared = getattr(item, "_fixtureinfo").name2fixturedefs.values()  # noqa: B009
        if any(fixture.scope == "module" for fixtures in shared for fixture in fixtures):
            item.add_marker(pytest.mark.xdist_group(item.path.stem))


@pytest.fixture(scope="session")
def warm_python() -> WarmPython:
    return warm()
