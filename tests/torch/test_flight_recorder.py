"""Dumps that PyTorch's own recorder wrote of jobs that hang, held against what PyTorch's own analyser says of them."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from warm_python import warm

from keepbusy.hang.flight_recorder import read_dumps
from keepbusy.hang.waiting_ranks import HangVerdict, explain_hang, hang_report

DUMPS = Path(__file__).parent / "flight_dumps.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One job of four ranks makes them all."""
    folder = tmp_path_factory.mktemp("dumps")
    environment = {**os.environ, "TORCH_FR_BUFFER_SIZE": "2000"}
    done = warm().python(str(DUMPS), str(folder), cwd=folder, env=environment, ranks=4)
    assert done.returncode == 0, done.stderr
    yield folder
    shutil.rmtree(folder)


def verdict(way: Path) -> HangVerdict:
    return explain_hang(read_dumps(sorted(way.iterdir())))


def line_of(text: str) -> int:
    """Of the call that hangs, in the script that made the dumps."""
    lines = DUMPS.read_text(encoding="utf-8").splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line)


def test_a_healthy_job(folder: Path) -> None:
    found = verdict(folder / "healthy")
    assert (found.ranks, found.stuck, found.unknown, found.has_lines) == ((0, 1, 2, 3), (), (), True)


def test_who_never_came_with_the_line_of_those_who_wait(folder: Path) -> None:
    found = verdict(folder / "never_comes")
    (stuck,) = found.stuck
    assert (stuck.number, stuck.kind, stuck.culprits, stuck.waiting) == (5, "all_reduce", [2], [0, 1, 3])
    line = line_of("if rank != 2:") + 1
    assert {call.site and call.site[1:] for call in stuck.calls.values()} == {(line, "never_comes")}
    said = "".join(hang_report(found))
    assert "Rank 2 never came to all_reduce, call 5 of data; ranks 0, 1 and 3 wait there." in said
    after = f"flight_dumps.py:{line_of('dist.broadcast(DATA, 0, group=group)')} in healthy"
    assert f"look    what rank 2 does after {after}" in said


def test_without_a_ranks_dump_the_others_still_say_whom_they_miss(folder: Path, tmp_path: Path) -> None:
    for path in (folder / "never_comes").iterdir():
        if not path.name.endswith("2"):
            shutil.copy(path, tmp_path)
    found = verdict(tmp_path)
    assert found.unknown == (2,)
    assert [(one.unknown, one.waiting) for one in found.stuck] == [((2,), [0, 1, 3])]


def test_calls_that_differ(folder: Path) -> None:
    said = "".join(hang_report(verdict(folder / "another_kind")))
    assert "broadcast 1024 Float on rank 1 and all_reduce 1024 Float on ranks 0, 2 and 3." in said
    said = "".join(hang_report(verdict(folder / "another_size")))
    assert "all_reduce 512 Float on rank 2 and all_reduce 1024 Float on ranks 0 and 1." in said


def test_a_rank_that_waits_elsewhere_is_not_the_one_to_look_at(folder: Path) -> None:
    found = verdict(folder / "behind_another")
    assert [(one.title, one.culprits, one.waiting_elsewhere) for one in found.stuck] == [
        ("pair", [1], ()),
        ("data", [1], (3,)),
    ]


def test_ranks_that_wait_for_each_other(folder: Path) -> None:
    found = verdict(folder / "in_a_circle")
    assert found.circle
    assert [one.culprits for one in found.stuck] == [[], []]
    assert "in a circle: none of them can go on" in "".join(hang_report(found))


@pytest.mark.parametrize(
    "way", ["healthy", "never_comes", "another_kind", "another_size", "behind_another", "in_a_circle"]
)
def test_pytorchs_own_analyser_finds_the_same(way: str, folder: Path) -> None:
    """For the calls that hang. It also misses calls that its alignment of the ranks has dropped, at the beginning."""
    theirs = {(one.pg_desc.partition(":")[2], one.collective_seq_id): one for one in _analysed(folder / way)}
    found = verdict(folder / way).stuck
    known = {place for place in theirs if place[1] > 1 or place[0] == "pair"}
    assert known == {(one.title, one.number) for one in found}
    for one in found:
        its = theirs[one.title, one.number]
        assert set(its.missing_ranks or ()) == set(one.absent)
        assert bool(its.mismatch_collectives) == one.differ


def _analysed(way: Path) -> list[Any]:
    pytest.importorskip("torch.distributed.flight_recorder")
    from torch.distributed.flight_recorder.components.builder import build_db
    from torch.distributed.flight_recorder.components.config_manager import JobConfig
    from torch.distributed.flight_recorder.components.loader import read_dir

    options = JobConfig().parse_args([str(way), "--prefix", "nccl_trace_rank_", "--allow-incomplete-ranks"])
    logging.getLogger("Flight Recorder").setLevel(logging.CRITICAL)
    details, version = read_dir(options)
    found = build_db(details, options, version).collectives
    return [one for one in found if one.missing_ranks or one.mismatch_collectives or not one.pass_check]
