"""`keepbusy completion`: each shell completes verbs, options and values."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from keepbusy.cli import VERBS, main

ASKED = {
    "keepbusy e": {"explain", "export"},
    "keepbusy run --on h": {"h100", "h200"},
    "keepbusy run --clo": {"--clock", "--clocks"},
    "keepbusy explain run.busy --what-if launch": {"launch_bound"},
    "keepbusy export --to p": {"perfetto"},
}
BASH = """\
source keepbusy.bash
COMP_WORDS=({line}) COMP_CWORD={last}
_keepbusy
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


def completed(shell: str, folder: Path, capsys: pytest.CaptureFixture[str], asking: str) -> set[str]:
    if not shutil.which(shell):
        pytest.skip(f"there is no {shell}: apt-get install {shell}")
    assert main(["completion", shell]) == 0
    (folder / f"keepbusy.{shell}").write_text(capsys.readouterr().out)
    done = subprocess.run([shell, "-c", asking], cwd=folder, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return {line.partition("\t")[0] for line in done.stdout.splitlines()}


@pytest.mark.parametrize("line", ASKED)
def test_bash_completes(line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asking = BASH.format(line=line, last=len(line.split()) - 1)
    assert completed("bash", tmp_path, capsys, asking) == ASKED[line]


@pytest.mark.parametrize("line", ASKED)
def test_fish_completes(line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = completed("fish", tmp_path, capsys, f"source keepbusy.fish; complete -C '{line}'")
    assert ASKED[line] <= found


def test_zsh_can_read_it_and_every_verb_is_in_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert completed("zsh", tmp_path, capsys, "zsh -n keepbusy.zsh") == set()
    text = (tmp_path / "keepbusy.zsh").read_text()
    assert text.startswith("#compdef keepbusy\n")
    assert [verb for verb in VERBS if f"\n{verb}) _arguments " not in text] == []
