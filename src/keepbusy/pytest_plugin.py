"""`pytest --keepbusy`: tests with limits for how often they wait for the GPU, on a virtual one if there is no real one.

    @pytest.mark.keepbusy(max_syncs=1, max_races=0, max_wait="2ms", min_overlap=0.9, max_memory="12GB")
    def test_step(gpu): ...

Without `--keepbusy` nothing is measured, and nothing is imported unless a test asks for `gpu`.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from keepbusy.fix.gate.guard import Wait
    from keepbusy.timeline.races import DataRace

_LIMITS = ("max_syncs", "max_blocking_copies", "max_races", "max_wait", "min_overlap", "max_memory", "allow")
_MARK = f"keepbusy({', '.join(_LIMITS)}): limits for waits for the GPU, data races, overlap of copies, and memory"
_PROPERTY = "keepbusy"
_SIZES = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}
_MEASURE = re.compile(r"^\s*([0-9.]+)\s*([A-Za-zµ]+)\s*$")
_LARGEST_BUDGETS = 32 << 20
"""Bytes of a budgets file; each test has about a hundred."""
_MARGIN = 1.02
"""Memory may exceed its budget by this factor, because allocators of other versions round differently."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("keepbusy", "waiting for the GPU")
    group.addoption("--keepbusy", action="store_true", help="hold tests to their keepbusy marks and budgets")
    group.addoption(
        "--keepbusy-update", action="store_true", help="write what was measured into the budgets file; means --keepbusy"
    )
    group.addoption(
        "--keepbusy-budgets", metavar="FILE", default="keepbusy-budgets.json", help="default keepbusy-budgets.json"
    )
    group.addoption("--keepbusy-on", metavar="DEVICE", default="h200", help="the virtual GPU (default h200)")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", _MARK)
    if config.getoption("--keepbusy") or config.getoption("--keepbusy-update"):
        budgets = Budgets(config)
        bring_up(config)
        config.pluginmanager.register(budgets, "keepbusy-budgets")


@pytest.fixture
def gpu(request: pytest.FixtureRequest) -> Any:
    """A CUDA device: the real one, or else a virtual one, which then stays for the session."""
    bring_up(request.config)
    import torch

    return torch.device("cuda")


def bring_up(config: pytest.Config) -> None:
    import torch

    if torch.cuda.is_available():
        return
    from keepbusy.virtual.virtual_run import Options, start

    with _as_usage_error():
        start(Options(on=config.getoption("--keepbusy-on"), measured=False, script_clocks=False))


@contextmanager
def _as_usage_error() -> Iterator[None]:
    """Turn an error in the options into pytest's own usage error, a sentence."""
    from keepbusy.timeline.files import BadInput

    try:
        yield
    except BadInput as error:
        raise pytest.UsageError(f"keepbusy: {error}") from None
    except OSError as error:
        raise pytest.UsageError(f"keepbusy: {error.filename}: {error.strerror}.") from None


class Budgets:
    """Measures each test that asks for it, and compares it with its mark and its budget."""

    def __init__(self, config: pytest.Config) -> None:
        self._path = config.rootpath / config.getoption("--keepbusy-budgets")
        self._updates = config.getoption("--keepbusy-update")
        self._is_worker = hasattr(config, "workerinput")  # a worker of xdist sends what it measures with its reports
        with _as_usage_error():
            self._budgets = read_budgets(self._path)
        self._measured: dict[str, dict[str, int]] = {}
        self._verb = "measured" if self._updates else "held to their marks and budgets"

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, Any, Any]:
        mark = item.get_closest_marker("keepbusy")
        if mark is None and "gpu" not in getattr(item, "fixturenames", ()):
            return (yield)
        limits = _limits(mark)
        test_measure = TestMeasure(limits.get("allow", ()))
        with test_measure:
            result = yield
        counts = test_measure.counts()
        item.user_properties.append((_PROPERTY, counts))
        failures = [*test_measure.over(limits)]
        if not self._updates and item.nodeid in self._budgets:
            failures += [*_over_budget(counts, self._budgets[item.nodeid])]
        if failures:
            pytest.fail("\n".join(["keepbusy:", *failures, test_measure.waits_text()]).rstrip(), pytrace=False)
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            counts: Any = dict(report.user_properties).get(_PROPERTY)
            if counts is not None:
                self._measured[report.nodeid] = counts

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self) -> Generator[None]:
        try:
            if self._updates and not self._is_worker:
                self._write()
        finally:
            yield  # the summary follows in any case

    def _write(self) -> None:
        from keepbusy.timeline.files import write_whole

        budgets = dict(sorted({**self._budgets, **self._measured}.items()))
        with _as_usage_error():
            write_whole(self._path, json.dumps(budgets, indent=2) + "\n")
        self._verb = f"written to {self._path.name}"

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self._measured and not self._is_worker:
            terminalreporter.write_line(f"keepbusy: {len(self._measured)} tests {self._verb}")


def read_budgets(path: Path) -> dict[str, dict[str, int]]:
    """The budget of each test by its name; {} if there is no file yet."""
    from keepbusy.timeline.files import BadInput, parsed

    if not path.parent.is_dir():
        raise BadInput(f"{path.parent} is no folder; name a budgets file in one that exists.")
    if not path.exists():
        return {}
    expected = "a file that --keepbusy-update wrote"
    budgets: Any = parsed(path, expected, json.loads, _LARGEST_BUDGETS)
    are_budgets = isinstance(budgets, dict) and all(
        isinstance(budget, dict) and all(type(limit) is int for limit in budget.values()) for budget in budgets.values()
    )
    if not are_budgets:
        raise BadInput(f"{path} holds no budgets; give {expected}.")
    return budgets


class TestMeasure:
    """The waits, the memory and the copies of one test."""

    __test__ = False

    def __init__(self, allow: Any) -> None:
        import torch

        from keepbusy.fix.gate.guard import WATCH, guard

        self._torch = torch
        self._machine = _virtual_machine()
        if self._machine is not None:
            WATCH.clock = self._machine.clock.now
        self._guard = guard(syncs=None, blocking_copies=None, allow=allow)

    def __enter__(self) -> None:
        self._torch.cuda.synchronize()
        self._torch.cuda.reset_peak_memory_stats()
        self._memory = self._torch.cuda.memory_allocated()
        self._began = self._machine.clock.now() if self._machine is not None else 0
        self._races_before = self._races()
        self._stack = ExitStack()
        self._stack.enter_context(self._guard)

    def __exit__(self, *error: object) -> None:
        self._stack.close()
        self._peak = self._torch.cuda.max_memory_allocated()

    def counts(self) -> dict[str, int]:
        kinds = Counter(wait.kind for wait in self._guard.waits)
        memory = max(0, self._peak - self._memory)
        return {"syncs": kinds["sync"], "blocking_copies": kinds["blocking copy"], "memory": memory}

    def over(self, limits: dict[str, Any]) -> Generator[str]:
        from keepbusy.timeline.figures import NANOSECONDS, amount, duration

        counts = self.counts()
        waited = sum(wait.duration or 0 for wait in self._guard.waits)
        for name in ("syncs", "blocking_copies"):
            limit = limits.get(f"max_{name}")
            if limit is not None and counts[name] > limit:
                yield f"{_several(counts[name], name)}, where max_{name}={limit}"
        if "max_wait" in limits and waited > measure(limits["max_wait"], NANOSECONDS):
            yield f"Python waited for {duration(waited)}, where max_wait={limits['max_wait']!r}"
        if "max_races" in limits:
            yield from self._raced(limits["max_races"])
        if "max_memory" in limits and self._peak > measure(limits["max_memory"], _SIZES):
            yield f"{amount(self._peak)} of the GPU's memory, where max_memory={limits['max_memory']!r}"
        if "min_overlap" in limits:
            yield from self._exposed(limits["min_overlap"])

    def _races(self) -> tuple[DataRace, ...]:
        """The races that the virtual GPU has found so far."""
        races: tuple[DataRace, ...] = self._machine.races() if self._machine is not None else ()
        return races

    def _raced(self, most: int) -> Generator[str]:
        """More data races than the limit. Only a virtual GPU finds them."""
        if self._machine is None:
            yield "max_races cannot be measured on a real GPU; run this test where there is none"
            return
        from keepbusy.report.race_words import paragraph, several

        times = {(race.kind, race.first, race.second): race.times for race in self._races_before}
        new = [race for race in self._races() if race.times > times.get((race.kind, race.first, race.second), 0)]
        if len(new) > most:
            yield f"{several(len(new))}, where max_races={most}"
            for race in new:
                yield from paragraph(race)

    def _exposed(self, least: float) -> Generator[str]:
        """Too small a share of copies that overlap computing. Only a virtual GPU knows it."""
        if self._machine is None:
            yield "min_overlap cannot be measured on a real GPU; run this test where there is none"
            return
        from keepbusy.fix.gate.tally import hidden_share

        share = hidden_share(self._machine.clock.timeline(), self._began)
        if share is not None and share < least:
            yield f"{share:.0%} of the copies ran beside the computation, where min_overlap={least}"

    def waits_text(self) -> str:
        from keepbusy.fix.gate.guard import places_text

        waits: list[Wait] = self._guard.waits
        return places_text(waits) if waits else ""


def _virtual_machine() -> Any:
    module = sys.modules.get("keepbusy.virtual.machine")
    machine = module.MACHINE if module is not None else None
    return machine if hasattr(machine, "clock") else None


def _limits(mark: pytest.Mark | None) -> dict[str, Any]:
    if mark is None:
        return {}
    from keepbusy.timeline.figures import NANOSECONDS

    if mark.args or not set(mark.kwargs) <= set(_LIMITS):
        pytest.fail(f"The keepbusy mark takes {', '.join(_LIMITS)}, each by its name.", pytrace=False)
    for name, units in (("max_wait", NANOSECONDS), ("max_memory", _SIZES)):
        if name in mark.kwargs:
            measure(mark.kwargs[name], units)
    return dict(mark.kwargs)


def measure(text: str, units: dict[str, int]) -> float:
    """`2ms`, `12GB`."""
    match = _MEASURE.match(str(text))
    unit = (units.get(match[2]) or units.get(match[2].upper())) if match else None
    if match is None or unit is None:
        pytest.fail(f"{text!r} has no unit that is known; write a number and one of {', '.join(units)}.", pytrace=False)
    return float(match[1]) * unit


def _over_budget(counts: dict[str, int], budget: dict[str, int]) -> Generator[str]:
    for name, value in counts.items():
        before = budget.get(name, value)
        if value > before * (_MARGIN if name == "memory" else 1):
            amount = f"{value} bytes of memory" if name == "memory" else _several(value, name)
            yield f"{amount}, where the budget is {before}; --keepbusy-update writes a new one"


def _several(count: int, limited: str) -> str:
    from keepbusy.fix.gate import PLURALS, several

    return several(count, next(kind for kind, plural in PLURALS.items() if plural.replace(" ", "_") == limited))
