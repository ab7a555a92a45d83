"""The tutorials, gone through from top to bottom: their commands, their edits, and what they show as printed.

What a tutorial shows without naming a language is what the command before it printed. `make snapshots` writes it anew.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
from pathlib import Path
from textwrap import indent

import pytest
from warm_python import WarmPython

pytest.importorskip("torch")
ROOT = Path(__file__).parents[2]
FOLDERS = {"no-gpu": ROOT / "examples", "first-report": ROOT / "tests" / "snapshots" / "traces"}
BLOCK = re.compile(r"(?ms)^```(\w*)\n(.*?)^```$")
READERS_OWN = "train.py"
SWEEPS = [
    pytest.mark.sweep(room="virtual"),
    pytest.mark.sweep(room="explain"),
    pytest.mark.sweep(room="report"),
    pytest.mark.sweep(room="cli"),
]
"""Of the one whose programs `test_examples.py` runs, too, and which takes half a minute of the processor."""


@pytest.mark.parametrize("name", [pytest.param("no-gpu", marks=SWEEPS), "first-report"])
def test_a_tutorial_shows_what_its_commands_print(name: str, tmp_path: Path, warm_python: WarmPython) -> None:
    page = ROOT / "docs" / "tutorial" / f"{name}.md"
    shutil.copytree(FOLDERS[name], tmp_path, dirs_exist_ok=True)
    environment = {**os.environ, "COLUMNS": "100", "NO_COLOR": "1"}
    printed, script = "", tmp_path / "none"

    def gone_through(found: re.Match[str]) -> str:
        nonlocal printed, script
        language, text = found[1], found[2]
        if language == "sh":
            for line in text.splitlines():
                words = shlex.split(line, comments=True)
                if words[:1] != ["keepbusy"] or READERS_OWN in words:
                    continue
                done = warm_python.keepbusy(*words[1:], cwd=tmp_path, env=environment)
                assert (done.returncode, done.stderr) == (0, ""), line
                printed, script = done.stdout, tmp_path / words[-1]
        elif language == "python":
            change(script if script.suffix == ".py" else tmp_path / "gpt_item.py", text)
        else:
            return f"```\n{printed}```"
        return found[0]

    text = page.read_text(encoding="utf-8")
    made = BLOCK.sub(gone_through, text)
    if os.environ.get("KEEPBUSY_SNAPSHOTS") == "write":
        page.write_text(made, encoding="utf-8")
    assert made == page.read_text(encoding="utf-8"), "if this is meant, `make snapshots` and read `git diff`"


def change(script: Path, text: str) -> None:
    """The program holds these lines, or gets them: each in place of the one that sets the same name."""
    source = script.read_text(encoding="utf-8")
    if indent(text, "    ") in source or text in source:
        return
    for line in text.splitlines():
        if line == "...":
            continue
        name = line.strip().partition("=")[0]
        source, count = re.subn(rf"(?m)^( *){re.escape(name)}=.*$", lambda found: found[1] + line.strip(), source)  # noqa: B023
        assert count == 1, line
    script.write_text(source, encoding="utf-8")
