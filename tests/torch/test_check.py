"""`keepbusy check` and `compare --fail-on`: the gates, and the page that describes them, each of its commands run."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import jsonschema
import pytest
from warm_python import warm

from keepbusy.cli import main
from keepbusy.timeline.busy_file import load, save

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "how-to" / "ci.md"
SCHEMA = json.loads((ROOT / "tests" / "pure" / "sarif-schema-2.1.0.json").read_text(encoding="utf-8"))
HEALTHY = """\
import torch

def main():
    model = torch.nn.Linear(64, 64).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.randn(32, 64, device="cuda")
    total = torch.zeros((), device="cuda")
    for step in range(12):
        loss = model(data).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.detach()
    print(total.item())

main()
"""
READS = HEALTHY.replace("total += loss.detach()", "total += loss.item()")


def keepbusy(folder: Path, *arguments: str, agent: bool = False) -> subprocess.CompletedProcess[str]:
    return warm().keepbusy(*arguments, cwd=folder, agent=agent)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(READS)
    return tmp_path


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of saved runs: `healthy`, one that `reads`, one that is `slower`, one that is `short`, a `script`."""
    folder = tmp_path_factory.mktemp("runs")
    for name, source in {
        "healthy": HEALTHY,
        "reads": READS,
        "slower": HEALTHY.replace("loss.backward()", "loss.backward(); [data.sum() for _ in range(5)]"),
        "short": READS.replace("range(12)", "range(2)"),
        "script": "import torch\nx = torch.ones(3, device='cuda')\nprint(x.sum().item())\n",
    }.items():
        (folder / "train.py").write_text(source)
        done = keepbusy(folder, "run", "--clock", "modelled", "--save", f"{name}.busy", "--quiet", "train.py")
        assert done.returncode == 0, done
        assert "keepbusy" not in done.stdout
    (folder / "train.py").write_text(READS)
    return folder


def code_of(folder: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """In this process, which is quicker."""
    monkeypatch.chdir(folder)
    try:
        return main(arguments)
    except SystemExit as ended:
        return int(str(ended.code))


def test_a_read_that_costs_nothing_is_seen_and_two_checks_say_the_same(folder: Path) -> None:
    first, second = (keepbusy(folder, "check", "train.py", agent=started_anew) for started_anew in (False, True))
    assert first.returncode == second.returncode == 1
    report = first.stdout.split("keepbusy check")[1]
    assert second.stdout.split("keepbusy check")[1] == report
    told = PAGE.read_text().split("keepbusy check · ")[1].split("```")[0]
    assert f" · {told}".rstrip() == report.rstrip()  # the page shows what is printed


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ((), 1),
        (("--max-syncs", "1"), 0),
        (("--max-blocking-copies", "0"), 0),
        (("--allow", "train.py:13: the example"), 0),
        (("--allow", "main(): the example"), 0),
        (("--allow", "train.py:12: another line"), 1),
        (("--allow", "train.py:13"), 2),
        (("--max-syncs", "few"), 2),
    ],
)
def test_limits_and_allowed_places(
    runs: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], code: int
) -> None:
    assert code_of(runs, monkeypatch, "check", *options, "reads.busy") == code


def test_a_healthy_loop_passes(runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of(runs, monkeypatch, "check", "healthy.busy") == 0
    assert "fine       0 syncs per step in " in capsys.readouterr().out


GRAPHED = """\
import keepbusy, torch

model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4))).cuda()
optimizer = torch.optim.Adam(model.parameters(), capturable=True)

@keepbusy.graph
def train_step(x):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()

x = torch.randn(32, 64, device="cuda")
for _ in range(16):
    train_step(x)
"""


def test_a_replay_is_compared_with_an_eager_call_at_one_wait(folder: Path) -> None:
    """However many tensors the step writes to."""
    (folder / "train.py").write_text(GRAPHED)
    done = keepbusy(folder, "check", "--max-syncs", "1", "train.py")
    assert done.returncode == 0, done.stdout
    assert "up to 1 sync per step" in done.stdout


@pytest.mark.parametrize("words", [("check",), ("plan", "--gpus", "2"), ("fix",)])
def test_a_program_that_is_not_there_is_one_sentence(
    words: tuple[str, ...], folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert code_of(folder, monkeypatch, *words, "nothing.py") == 2
    assert capsys.readouterr().err == "keepbusy: nothing.py: there is no such script.\n"


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("raise SystemExit(3)", "ended with exit code 3"),
        ("import torch; torch.ones(3).sum()", "ran nothing on the GPU"),
    ],
)
def test_a_program_that_failed_is_never_fine(folder: Path, source: str, why: str) -> None:
    (folder / "train.py").write_text(source)
    done = keepbusy(folder, "check", "train.py")
    assert done.returncode == 2
    assert why in done.stderr
    assert "Traceback" not in done.stderr


def test_a_program_of_two_steps_is_never_fine(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert code_of(runs, monkeypatch, "check", "short.busy") == 2
    assert "too few to tell a step from the start" in capsys.readouterr().err


def test_a_script_without_steps_counts_as_one(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert code_of(runs, monkeypatch, "check", "--max-syncs", "1", "script.busy") == 0
    assert code_of(runs, monkeypatch, "check", "script.busy") == 1
    assert "1 sync in the script" in capsys.readouterr().out


def test_junit_and_annotations(runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of(runs, monkeypatch, "check", "--junit", "found.xml", "--github", "reads.busy") == 1
    (line,) = [one for one in capsys.readouterr().out.splitlines() if one.startswith("::")]
    assert line.startswith("::error file=train.py,line=13,title=keepbusy: sync::1 sync per step; ")
    suite = ET.parse(runs / "found.xml").getroot()[0]
    assert {case.attrib["name"]: [one.tag for one in case] for case in suite} == {
        "syncs": ["failure"],
        "blocking copies": ["system-out"],
    }
    assert "train.py:13" in str(suite[0][0].text)


def test_editors_and_code_scanning_get_sarif(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the path that the checkout has, and what is allowed as suppressed."""
    monkeypatch.setenv("GITHUB_WORKSPACE", str(runs.parent))
    for allowed, code in (((), 1), (("--allow", "train.py:13: the schedule needs it"), 0)):
        assert code_of(runs, monkeypatch, "check", "--sarif", "found.sarif", *allowed, "reads.busy") == code
        document = json.loads((runs / "found.sarif").read_text(encoding="utf-8"))
        jsonschema.validate(document, SCHEMA)
        (one,) = document["runs"][0]["results"]
        place = one["locations"][0]["physicalLocation"]
        assert (one["ruleId"], one["level"]) == ("sync", "note" if allowed else "error")
        assert place["artifactLocation"]["uri"] == f"{runs.name}/train.py"
        assert place["region"] == {"startLine": 13, "snippet": {"text": "total += loss.item()"}}
        assert one["message"]["text"].startswith("1 sync per step; Python waits there for ")
        said = [{"kind": "external", "justification": "the schedule needs it"}] if allowed else None
        assert one.get("suppressions") == said


def test_nothing_stands_behind_a_saved_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "run.busy", "--max-syncs", "5"]) == 2
    assert "run.busy is a saved run and takes no arguments, but --max-syncs follows it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("before", "after", "what", "code", "said"),
    [
        ("healthy", "reads", "new-sync", 1, "new-sync: 1 sync per step at train.py:13 (aten::item), none before.\n"),
        ("reads", "healthy", "slower,new-sync", 0, ""),
        ("healthy", "slower", "slower,new-sync", 1, "slower: a step took "),
        ("healthy", "healthy", "slower,new-sync", 0, ""),
        ("healthy", "reads", "sync", 2, "argument --fail-on: 'sync' is nothing to fail on"),
    ],
)
def test_a_comparison_fails_on_what_is_asked(
    runs: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    before: str,
    after: str,
    what: str,
    code: int,
    said: str,
) -> None:
    given = ("compare", f"{before}.busy", f"{after}.busy", "--fail-on", what)
    assert code_of(runs, monkeypatch, *given) == code
    assert capsys.readouterr().err.startswith(f"keepbusy: {said}" if said else "")


COMMANDS = [
    line for block in re.findall(r"```sh\n(.*?)```", PAGE.read_text(), re.DOTALL) for line in block.splitlines() if line
]
REPORTS = ("--junit keepbusy.xml --github ", "--sarif keepbusy.sarif ")
FAIL = {f"keepbusy check {options}train.py" for options in ("", *REPORTS, "--values none ")}
"""With the page's own program, which reads its loss."""


@pytest.mark.sweep(room="cli")
def test_every_command_of_the_page_works(folder: Path) -> None:
    assert len(COMMANDS) == 13
    for command in COMMANDS:
        ours, _, reader = command.partition(" | python ")
        done = keepbusy(folder, *shlex.split(ours)[1:])
        if reader:
            done = subprocess.run(
                [sys.executable, *shlex.split(reader)], cwd=folder, input=done.stdout, capture_output=True, text=True
            )
        expected = 1 if command in FAIL or "explain" in command else 0
        assert done.returncode == expected, (command, done)
    assert (folder / "keepbusy.xml").exists()


def test_the_workflow_stands_on_the_page_and_runs_its_commands() -> None:
    workflow = (ROOT / "examples" / "keepbusy-ci.yml").read_text()
    assert f"```yaml\n{workflow}```" in PAGE.read_text()
    (checked,) = re.findall(r"- run: (keepbusy .*)", workflow)
    assert checked in COMMANDS


RACES = """\
import torch

side = torch.cuda.Stream()
x = torch.ones(8, device="cuda")
with torch.cuda.stream(side):
    y = x * 2
side.synchronize()
"""


def test_races_fail_it_where_they_are_asked_for(tmp_path: Path) -> None:
    (tmp_path / "race.py").write_text(RACES)
    reports = ("--junit", "races.xml", "--sarif", "races.sarif", "--github")
    found = keepbusy(tmp_path, "check", "--races", *reports, "race.py")
    said = "race.py:6 reads memory that race.py:4 may still be writing on the default stream."
    assert found.returncode == 1
    assert "too many   1 data race\n" in found.stdout
    assert f"data race   {said}\n" in found.stdout
    assert "Add side.wait_stream(torch.cuda.default_stream()) before race.py:6." in found.stdout
    assert "::error file=race.py,line=6,title=keepbusy: data race::" in found.stdout
    (case,) = ET.parse(tmp_path / "races.xml").getroot()[0]
    assert (case.attrib["name"], case[0].attrib["message"]) == ("data races", "1 data race")
    sarif = json.loads((tmp_path / "races.sarif").read_text())
    jsonschema.validate(sarif, SCHEMA)
    assert sarif["runs"][0]["results"][0]["ruleId"] == "data_race"

    allowed = keepbusy(tmp_path, "check", "--races", "--allow", "race.py:6: an example", "race.py")
    assert (allowed.returncode, "fine       no data races" in allowed.stdout) == (0, True)
    assert "data race" not in keepbusy(tmp_path, "check", "--max-syncs", "1", "race.py").stdout


def test_a_recording_of_a_real_gpu_says_nothing_of_races(runs: Path, tmp_path: Path) -> None:
    real = load(runs / "healthy.busy").change_facts(virtual=False)
    save(real, tmp_path / "real.busy")
    done = keepbusy(tmp_path, "check", "--races", "real.busy")
    assert done.returncode == 2
    assert "real.busy was recorded on a real GPU, which does not say who uses which memory" in done.stderr
