"""What is remembered of the trial of a PyTorch, and for how long."""

from __future__ import annotations

from pathlib import Path

import pytest

from keepbusy.timeline.files import BadInput
from keepbusy.virtual import selftest
from keepbusy.virtual.selftest import DAY, Verdict


class Trials:
    """A PyTorch that cannot carry the virtual GPU, until it can; and how often it was tried."""

    def __init__(self) -> None:
        self.good, self.count, self.now = False, 0, 1_000_000.0

    def __call__(self) -> Verdict:
        self.count += 1
        return Verdict(self.good, ["layout"], "" if self.good else "the headers declare too little")

    def check(self) -> None:
        selftest.check(lambda: self.now)


@pytest.fixture
def trials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trials:
    trials, torch = Trials(), tmp_path / "torch"
    torch.mkdir()
    (torch / "version.py").write_text("from typing import Optional\n\n__version__ = '2.99.0+cpu'\ncuda = None\n")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(selftest, "_torch", lambda: torch)
    monkeypatch.setattr(selftest, "try_out", trials)
    return trials


def test_a_success_is_tried_once(trials: Trials) -> None:
    trials.good = True
    trials.check()
    trials.now += 1_000 * DAY
    trials.check()
    assert trials.count == 1


def test_a_failure_says_the_version_and_is_tried_again_after_a_day(trials: Trials) -> None:
    complaint = r"PyTorch 2\.99\.0\+cpu \(it failed after layout: the headers declare too little\)"
    for later in (0, DAY - 1):
        trials.now += later
        with pytest.raises(BadInput, match=complaint):
            trials.check()
    assert trials.count == 1
    trials.good, trials.now = True, trials.now + 2
    trials.check()
    assert trials.count == 2


def test_a_busy_machine_is_no_failure_to_remember(trials: Trials, monkeypatch: pytest.MonkeyPatch) -> None:
    late = Verdict(False, ["layout"], selftest.LATE)
    monkeypatch.setattr(selftest, "try_out", lambda: late)
    with pytest.raises(BadInput, match=r"not done after 120 s: it hangs, or the machine is busy"):
        trials.check()
    monkeypatch.setattr(selftest, "try_out", trials)
    trials.good = True
    trials.check()
    assert trials.count == 1


@pytest.mark.parametrize("change", ["environment", "build", "clock"])
def test_a_failure_is_tried_again_when_something_has_changed(
    trials: Trials, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(BadInput):
        trials.check()
    if change == "environment":
        monkeypatch.setenv("LD_PRELOAD", "libother.so")
    elif change == "build":
        (selftest._torch() / "version.py").write_text("__version__ = '2.99.1'\n")
    else:
        trials.now -= DAY  # set back: nobody knows how old it is
    with pytest.raises(BadInput):
        trials.check()
    assert trials.count == 2
