"""Places are told apart by the code that stands there, not by what it looks like."""

from __future__ import annotations

from pathlib import Path

from keepbusy.instrument.lines import Places

SOURCE = "def called(places):\n    return places()\n"


def test_the_same_function_at_the_same_line_of_two_files_is_two_places(tmp_path: Path) -> None:
    told: list[tuple[str, ...]] = []
    places = Places(lambda *lines: told.append(lines) or len(told) - 1)
    functions = []
    for name in ("a.py", "b.py"):
        names: dict[str, object] = {}
        exec(compile(SOURCE, str(tmp_path / name), "exec"), names)
        functions.append(names["called"])
    first, second = functions
    assert first.__code__ == second.__code__  # to Python they are the same
    numbers = [called(lambda: places.here()) for called in (first, second, first)]
    assert numbers[0] == numbers[2] != numbers[1]
    assert ["a.py" in told[numbers[0]][-1], "b.py" in told[numbers[1]][-1]] == [True, True]
