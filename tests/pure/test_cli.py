"""The command line: its flags, its exit codes, and what it says when something is wrong."""

from __future__ import annotations

import argparse
import csv
import fcntl
import gzip
import io
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import keepbusy
from keepbusy import cli
from keepbusy.report import verdict
from keepbusy.timeline import last_run
from keepbusy.timeline.files import BadInput

TRACES = Path(__file__).parents[1] / "snapshots" / "traces"
TRACE = TRACES / "images.trace.json.gz"
PLAIN = ["--plain-step", "31.336"]


@pytest.fixture
def trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A copy of a real trace, in a folder where nothing else is."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.trace.json.gz").write_bytes(TRACE.read_bytes())
    return "run.trace.json.gz"


def ask(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.main(arguments)
    said = capsys.readouterr()
    return code, said.out, said.err


def one_sentence(error: str) -> str:
    assert error.startswith("keepbusy: ")
    assert error.count("\n") == 1
    assert "Traceback" not in error
    return error


# flags

OLD_NAME = "--mend"
"""Of --what-if: it works and is shown nowhere."""
FLAGS = {
    "explain": {
        "files": ("FILE", "*", None),
        "--plain-step": ("MS", None, None),
        "--what-if": ("CAUSES", None, ()),
        "--mend": (None, None, ()),
        "--workers": ("N", None, None),
        "--hours": ("H", None, None),
        "--price": ("P", None, 0.0),
        "--full": (None, 0, False),
        "--json": (None, 0, False),
        "--timeline": (None, 0, False),
        "--save": ("RUN.busy", None, None),
        "--ray": (None, 0, False),
        "--quiet": (None, 0, False),
    },
    "run": {
        "--against": ("BEFORE.busy", None, None),
        "--fix": (None, 0, False),
        "--without": ("FIXES", None, ()),
        "--also": ("FIXES", None, ()),
        "--on": ("DEVICE", None, "auto"),
        "--gpus": ("N", None, 1),
        "--ranks": ("N", None, 1),
        "--alike": (None, 0, False),
        "--values": (None, None, "real"),
        "--clock": (None, None, "measured"),
        "--clocks": (None, None, "virtual"),
        "--what-if": ("CAUSES", None, ()),
        "--mend": (None, None, ()),
        "--workers": ("N", None, None),
        "--full": (None, 0, False),
        "--timeline": (None, 0, False),
        "--json": (None, 0, False),
        "--save": ("RUN.busy", None, None),
        "--quiet": (None, 0, False),
        "--page": ("OUT.html", None, None),
        "--live": (None, 0, False),
        "--memory": (None, 0, False),
        "-m": (None, 0, False),
        "-c": (None, 0, False),
        "program": ("SCRIPT", "A...", None),
    },
    "show": {
        "files": ("FILE", "*", None),
        "--plain-step": ("MS", None, None),
        "--workers": ("N", None, None),
        "-o --output": ("OUT.html", None, None),
        "--no-open": (None, 0, False),
        "--quiet": (None, 0, False),
    },
    "fix": {
        "--write": (None, 0, False),
        "--minutes": ("N", None, 10),
        "--on": ("DEVICE", None, "h200"),
        "--values": (None, None, "real"),
        "--clock": (None, None, "measured"),
        "--clocks": (None, None, "virtual"),
        "--gpus": ("N", None, 1),
        "--ranks": ("N", None, 1),
        "-m": (None, 0, False),
        "program": ("SCRIPT", "A...", None),
    },
    "check": {
        "--max-syncs": ("N", None, None),
        "--max-blocking-copies": ("N", None, None),
        "--races": (None, 0, False),
        "--allow": ("'PLACE: REASON'", None, []),
        "--junit": ("FILE.xml", None, None),
        "--sarif": ("FILE", None, None),
        "--github": (None, 0, False),
        "--on": ("DEVICE", None, "h200"),
        "--gpus": ("N", None, 1),
        "--ranks": ("N", None, 1),
        "--values": (None, None, "real"),
        "--clock": (None, None, "modelled"),
        "--clocks": (None, None, "virtual"),
        "-m": (None, 0, False),
        "program": ("PROGRAM", argparse.PARSER, None),
    },
    "compare": {
        "before": ("A", None, None),
        "after": ("B", None, None),
        "--fail-on": ("WHAT", None, ()),
        "--page": ("OUT.html", None, None),
        "--json": (None, 0, False),
        "--quiet": (None, 0, False),
    },
    "plan": {
        "--gpus": ("N", None, None),
        "--on": ("DEVICE", None, "h200"),
        "--layouts": ("LAYOUTS", None, None),
        "--price": ("DOLLARS", None, None),
        "--jobs": ("N", None, min(4, os.cpu_count() or 1)),
        "--json": (None, 0, False),
        "-m": (None, 0, False),
        "program": ("SCRIPT", "A...", None),
    },
    "export": {
        "files": ("FILE", "+", None),
        "--to": (None, None, None),
        "-o --output": ("OUT", None, None),
        "--quiet": (None, 0, False),
    },
    "doctor": {"--ranks": ("N", None, None), "--save": ("GPU.toml", None, None)},
    "completion": {"shell": (None, None, None)},
    "learn": {"chapter": ("CHAPTER", "?", None), "--copy": ("FOLDER", None, None)},
}


def parser_of(verb: str) -> argparse.ArgumentParser:
    """As it is where this verb is called: the others are known by name alone."""
    actions = cli._parser([verb])._actions
    choices = next(action.choices for action in actions if isinstance(action, argparse._SubParsersAction))
    assert list(choices) == list(cli.VERBS)
    return choices[verb]  # type: ignore[no-any-return]


@pytest.mark.parametrize("verb", FLAGS)
def test_every_flag_is_frozen(verb: str) -> None:
    found = {
        " ".join(action.option_strings) or action.dest: (action.metavar, action.nargs, action.default)
        for action in parser_of(verb)._actions
        if not isinstance(action, argparse._HelpAction)
    }
    assert found == FLAGS[verb]


def test_every_verb_is_frozen() -> None:
    assert list(cli.VERBS) == list(FLAGS)


@pytest.mark.parametrize("arguments", [["--help"], *([verb, "--help"] for verb in FLAGS)])
def test_help_has_examples_and_fits_any_encoding(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    text = capsys.readouterr().out
    assert ended.value.code == 0
    assert "examples:\n  keepbusy " in text
    assert text.isascii()


def test_help_imports_no_verb_and_no_package_of_others() -> None:
    code = (
        "import sys\nfrom keepbusy.cli import VERBS, main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "others = {'numpy', 'rich', 'torch', 'msgspec', 'asyncio'} | {f'keepbusy.cli.{verb}' for verb in VERBS}\n"
        "print(*sorted(others & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stderr, done.returncode) == ("\n", 0)


def test_the_flags_stand_in_the_reference() -> None:
    document = (TRACES.parents[2] / "docs" / "reference" / "cli.md").read_text()
    for verb, flags in FLAGS.items():
        section = document.split(f"## keepbusy {verb}")[1].split("\n## ")[0]
        assert [
            flag
            for flag in flags
            if flag.split()[-1].startswith("--") and f"`{flag.split()[-1]}" not in section and flag != OLD_NAME
        ] == []


def test_bare_the_command_says_how_to_begin(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, error = ask(capsys)
    assert (code, error) == (0, "")
    for command in ("keepbusy run train.py", "keepbusy explain rank*.trace.json.gz", "keepbusy doctor"):
        assert command in out.split("to begin with:")[1]


@pytest.mark.parametrize("verb", ["", "run", "explain", "show", "compare", "export", "doctor", "learn"])
def test_the_help_cites_nothing_that_is_not_installed(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main([*filter(None, [verb]), "--help"])
    assert "docs/" not in capsys.readouterr().out


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out == "keepbusy 0.2.0\n"


# values


@pytest.mark.parametrize(
    ("text", "time"),
    [
        ("25", 25_000_000),
        ("25.0", 25_000_000),
        ("25ms", 25_000_000),
        ("25 ms", 25_000_000),
        ("0.025s", 25_000_000),
        ("2.5e1", 25_000_000),
        ("800us", 800_000),
        ("800µs", 800_000),
        ("1S", 1_000_000_000),
    ],
)
def test_times(text: str, time: int) -> None:
    assert cli.step_time(text) == time


@pytest.mark.parametrize(
    "text", ["", "x", "-3", "0", "nan", "inf", "25h", "1e99", "1..2", ".", "ms", "--", "25,0", "٢٥", "²"]
)
def test_nonsense_is_no_time(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not the time of a step"):
        cli.step_time(text)


@pytest.mark.parametrize("text", ["", "0", "-1", "8.0", "many", "²", "100000", "1" * 5000])
def test_nonsense_is_no_number_of_workers(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="whole number"):
        cli.whole_number("workers", 1024)(text)


def test_causes_are_named() -> None:
    assert cli.causes("host_sync, blocking_copy,host_sync") == ("host_sync", "blocking_copy")
    for wrong in ("unknown", "x", "", ",", "HOST_SYNC"):
        with pytest.raises(argparse.ArgumentTypeError, match="host_sync, blocking_copy"):
            cli.causes(wrong)


# what is wrong is said in one sentence


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nonsense"], "invalid choice: 'nonsense'"),
        (["explain"], "there is no last run"),
        (["show"], "there is no last run"),
        (["run", "--no-such", "x.py"], "--no-such"),
        (["run"], "SCRIPT"),
        (["explain", "nowhere.json"], "nowhere.json: there is no such file or folder."),
        (["explain", "*.nothing"], "*.nothing: there is no such file"),
        (["explain", "."], "holds no traces"),
        (["explain", "TRACE", "--plain-step", "-3"], "'-3' is not the time of a step"),
        (["explain", "TRACE", "--plain-step=nan"], "'nan' is not the time"),
        (["explain", "TRACE", "--what-if", "sync"], "there are host_sync, blocking_copy"),
        (["explain", "TRACE", "--workers", "0"], "'0' is no number of workers"),
        (
            ["explain", "TRACE", "--sav", "x"],
            "`keepbusy explain` does not know --sav x; `keepbusy explain --help` shows",
        ),
        (["explain", "TRACE", "--save", "run.txt"], "*.busy"),
        (["explain", "TRACE", "--save", "missing/run.busy"], "folder that exists"),
        (["explain", "a.busy", "TRACE"], "a.busy is a whole saved run"),
        (["explain", "a.busy"], "a.busy"),
        (["explain", "empty.json"], "empty.json"),
        (["explain", "text.json.gz"], "text.json.gz"),
        (["compare", "TRACE"], "B"),
        (["compare", "TRACE", ""], "no"),
        (["export", "TRACE"], "--to"),
        (["export", "TRACE", "--to", "xml"], "invalid choice: 'xml'"),
        (["export", "TRACE", "--to", "csv", "-o", "."], "no place for a file"),
        (["export", "TRACE", "--to", "csv", "-o", "missing/out.csv"], "no place for a file"),
    ],
)
def test_bad_input_gets_one_sentence_and_exit_code_2(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if "TRACE" in arguments or {"a.busy", "empty.json", "text.json.gz"} & set(arguments):
        (tmp_path / "empty.json").write_bytes(b"")
        (tmp_path / "text.json.gz").write_text("no gzip")
        (tmp_path / "a.busy").write_text("no saved run")
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    code, out, error = ask(capsys, *[str(TRACE) if one == "TRACE" else one for one in arguments])
    assert said in one_sentence(error)
    assert (code, out) == (2, "")
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_escapes_in_a_file_name_are_not_printed(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, error = ask(capsys, "explain", "\x1b[2J\nx.json")
    assert code == 2
    assert "\x1b" not in one_sentence(error)


def test_a_bug_is_owned_up_to(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def broken(options: argparse.Namespace) -> str:
        raise RuntimeError("inside")

    monkeypatch.setattr("keepbusy.cli.explain.run", broken)
    code, _, error = ask(capsys, "explain", "x")
    assert code == 3
    assert "a bug of keepbusy 0.2.0" in one_sentence(error)
    monkeypatch.setenv("KEEPBUSY_DEBUG", "1")
    code, _, error = ask(capsys, "explain", "x")
    assert code == 3
    assert "Traceback" in error


def test_what_the_system_refuses_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def stopped(options: argparse.Namespace) -> str:
        raise PermissionError(13, "Permission denied", "f")

    monkeypatch.setattr("keepbusy.cli.explain.run", stopped)
    assert ask(capsys, "explain", "x")[0] == 2


INTERRUPTED = """\
import atexit, signal, sys
import keepbusy.cli
atexit.register(print, "tidied up")
VERB.run = lambda options: signal.raise_signal(signal.SIGNAL)
keepbusy.cli.main([*sys.argv[1:]])
"""


@pytest.mark.parametrize("verb", [["run", "x.py"], ["fix", "x.py"], ["explain", "x"], ["doctor"]])
def test_whoever_interrupts_a_verb_sees_it_die_of_the_signal(verb: list[str]) -> None:
    """Else a shell's loop goes on."""
    for name, said in (("SIGINT", "tidied up\n"), ("SIGTERM", "")):
        source = f"import keepbusy.cli.{verb[0]} as VERB\n" + INTERRUPTED.replace("SIGNAL", name)
        done = subprocess.run([sys.executable, "-c", source, *verb], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (-getattr(signal, name), said, "")


# files


def test_a_folder_means_its_traces_and_a_pattern_what_it_matches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("b.trace.json.gz", "a.trace.json", "a.json", "notes.txt"):
        (tmp_path / name).touch()
    assert [path.name for path in cli.expand(["."])] == ["a.trace.json", "b.trace.json.gz"]
    assert [path.name for path in cli.expand(["*.json*"])] == ["a.json", "a.trace.json", "b.trace.json.gz"]
    assert [path.name for path in cli.expand([f"{tmp_path}/*.gz"])] == ["b.trace.json.gz"]
    assert [str(path) for path in cli.expand(["a.json", "./a.json", f"{tmp_path}/a.json"])] == ["a.json"]
    (tmp_path / "a.trace.json").unlink()
    (tmp_path / "b.trace.json.gz").unlink()
    assert [path.name for path in cli.expand(["."])] == ["a.json"]


def test_a_folder_is_no_place_for_a_file(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none" / "file"):
        with pytest.raises(BadInput, match="no place for a file"):
            cli.check_place(path)
    (tmp_path / "link").symlink_to("file")
    cli.check_place(tmp_path / "link")


# the verbs, on a real trace


def test_explain_prints_a_report(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, error = ask(capsys, "explain", trace, *PLAIN)
    assert (code, error) == (0, "")
    assert out.startswith("keepbusy · run.trace.json.gz · NVIDIA H200")
    assert "The GPU is busy 25% of an iteration. Python waits for copies to finish." in out
    assert out.endswith("Look at it  keepbusy show run.trace.json.gz --plain-step 31.336\nMore        add --full\n")
    assert out.count("\n") <= verdict.HEIGHT


def test_the_whole_report_is_printed_on_request(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, short, _ = ask(capsys, "explain", trace, *PLAIN)
    code, out, error = ask(capsys, "explain", trace, *PLAIN, "--full")
    assert (code, error) == (0, "")
    assert out.splitlines()[:3] == short.splitlines()[:3]
    assert "An iteration takes 31.3 ms. The GPU computes for 7.9 ms of it (25%)" in " ".join(out.split())
    assert len(out) > len(short)


def test_without_files_the_last_run_is_taken(
    trace: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert last_run.keep(keepbusy.read([Path(trace)]), 0.0, "{}", "train.py")
    _, named, _ = ask(capsys, "explain", trace, "--json")
    assert json.loads(ask(capsys, "explain", "--json")[1]) == json.loads(named)
    assert ask(capsys, "show", "--no-open") == (0, "keepbusy.html\n", "")
    assert last_run.place() == tmp_path / "cache" / "keepbusy" / "last.busy"


def test_each_program_keeps_its_own_plan_and_old_ones_go(
    trace: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(last_run, "_PLANS_KEPT", 2)
    run = keepbusy.read([Path(trace)])
    for at, program in enumerate(("old.py", "train.py", "eval.py")):
        assert last_run.keep(run, float(at), program, program)
    plans = [last_run.plan_of(program) or Path() for program in ("train.py", "eval.py", "old.py")]
    assert [plan.is_file() and plan.read_text() for plan in plans] == ["train.py", "eval.py", False]
    last_run.forget("train.py")
    assert [plan.is_file() for plan in plans] == [False, True, False]
    assert not (tmp_path / "cache" / "keepbusy" / "last.busy").is_file()


def test_a_cache_that_cannot_be_written_costs_no_report(
    trace: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert not last_run.keep(keepbusy.read([Path(trace)]), 0.0, "{}", "train.py")


def test_a_saved_run_says_the_same_as_its_trace(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, first, _ = ask(capsys, "explain", trace, *PLAIN, "--json", "--save", "run.busy")
    Path(trace).unlink()
    code, second, error = ask(capsys, "explain", "run.busy", "--json")
    assert (code, error) == (0, "")
    assert json.loads(first) == json.loads(second)
    assert ask(capsys, "explain", "run.busy")[1].endswith("Look at it  keepbusy show run.busy   More  add --full\n")


def test_another_plain_step_overrides_the_saved_one(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    ask(capsys, "explain", trace, *PLAIN, "--save", "run.busy")
    _, out, _ = ask(capsys, "explain", "run.busy", "--plain-step", "30", "--json")
    assert json.loads(out)["plain_step"] == pytest.approx(30, rel=0.01)


@pytest.mark.parametrize("option", ["--what-if", "--mend"])
def test_fixing_on_request(trace: str, option: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = ask(capsys, "explain", trace, *PLAIN, option, "blocking_copy", "--json")
    said = json.loads(out)
    assert said["fixed"] == ["blocking_copy"]
    assert said["predicted_step"] < said["plain_step"]


def test_compare_a_trace_with_itself(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    ask(capsys, "explain", trace, "--save", "run.busy")
    code, out, _ = ask(capsys, "compare", trace, "run.busy")
    assert code == 0
    assert "An iteration takes the same time within noise: " in out
    _, out, _ = ask(capsys, "compare", trace, "run.busy", "--page", "changed.html")
    assert "same time within noise" in out
    assert Path("changed.html").read_text().count('<script type="application/octet-stream"') == 2
    _, out, _ = ask(capsys, "compare", trace, f"{trace},{trace}", "--json")
    assert {cause["verdict"] for cause in json.loads(out)["causes"]} <= {"unchanged"}


def test_several_saved_runs_are_runs_of_one_program(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What they differ by is the noise; traces with commas between them are ranks."""
    for name, step in (("a1", "25"), ("a2", "30"), ("b1", "27"), ("b2", "29")):
        ask(capsys, "explain", trace, "--plain-step", step, "--save", f"{name}.busy")
    code, out, _ = ask(capsys, "compare", "a1.busy,a2.busy", "b1.busy,b2.busy", "--json")
    said = json.loads(out)
    assert (code, said["before"]["runs"], said["after"]["runs"]) == (0, 2, 2)
    assert not said["step"]["significant"]
    assert ask(capsys, "compare", "a1.busy,a2.busy", "b1.busy", "--fail-on", "slower")[0] == 0


def test_two_saved_runs_are_shown_on_one_page(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("before.busy", "after.busy"):
        ask(capsys, "explain", trace, *PLAIN, "--save", name)
    code, out, _ = ask(capsys, "show", "before.busy", "after.busy", "--no-open")
    assert (code, out) == (0, "before-to-after.html\n")
    assert Path("before-to-after.html").read_text().count('<script type="application/octet-stream"') == 2
    code, _, said = ask(capsys, "show", "before.busy", "after.busy", "--plain-step", "30")
    assert code == 2
    assert "--plain-step is the time of one run" in said


@pytest.mark.parametrize("kind", ["perfetto", "json", "csv", "sarif"])
def test_export(kind: str, trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = ask(capsys, "export", trace, "--to", kind)
    assert code == 0
    assert ask(capsys, "export", trace, "--to", kind, "-o", "out") == (0, "", "")
    assert Path("out").read_text() == out
    assert ask(capsys, "export", trace, "--to", kind, "-o", "out.gz")[:2] == (0, "")
    assert gzip.decompress(Path("out.gz").read_bytes()).decode() == out
    parsed = list(csv.reader(io.StringIO(out))) if kind == "csv" else json.loads(out)
    assert parsed


# as a process


def process(*arguments: str, **variables: str) -> subprocess.CompletedProcess[bytes]:
    environment = {**os.environ, "PYTHONIOENCODING": "utf-8", **variables}
    return subprocess.run([sys.executable, "-m", "keepbusy", *arguments], capture_output=True, env=environment)


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_leaves_early_is_no_error(unbuffered: str) -> None:
    """As `head` does, in the midst of a write: the pipe holds less than there is to write."""
    reads, writes = os.pipe()
    fcntl.fcntl(writes, fcntl.F_SETPIPE_SZ, 4096)
    command = [sys.executable, "-m", "keepbusy", "export", str(TRACE), "--to", "csv"]
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with subprocess.Popen(command, stdout=writes, stderr=subprocess.PIPE, env=environment) as exporting:
        os.close(writes)
        first = os.read(reads, 4096)
        select.select([reads], [], [])
        os.close(reads)
        _, error = exporting.communicate()
    assert first.startswith(b"row,rank")
    assert (exporting.returncode, error) == (cli.HUNG_UP, b"")


def test_a_pipe_gets_no_colour_and_no_progress() -> None:
    done = process("explain", str(TRACE), *PLAIN)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"\x1b" not in done.stdout


@pytest.mark.parametrize("verb", ["explain", "show"])
def test_progress_is_of_the_whole_and_never_goes_back(
    verb: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    told: list[tuple[str, float]] = []

    @contextmanager
    def recorded(_quiet: bool = False) -> Iterator[Any]:
        yield lambda what, share: told.append((what, share))

    monkeypatch.setattr(import_module(f"keepbusy.cli.{verb}"), "progress", recorded)
    cli.main([verb, str(TRACE), *PLAIN, *(["-o", str(tmp_path / "p.html"), "--no-open"] if verb == "show" else [])])
    shares = [share for _, share in told]
    assert shares == sorted(shares)
    assert 0 <= shares[0] <= shares[-1] < 1
    assert max(share for what, share in told if what.startswith("reading")) < 0.5
    assert len({what for what, _ in told}) == 6


def test_colour_can_be_forced_and_forbidden() -> None:
    assert b"\x1b[" in process("explain", str(TRACE), *PLAIN, FORCE_COLOR="1", TERM="xterm-256color").stdout
    assert b"\x1b[" not in process("explain", str(TRACE), *PLAIN, FORCE_COLOR="1", NO_COLOR="1").stdout


def test_a_terminal_that_knows_ascii_only_gets_ascii() -> None:
    done = process("explain", str(TRACE), *PLAIN, PYTHONIOENCODING="ascii")
    assert done.returncode == 0
    assert done.stdout.isascii()


WRITING = [
    ("explain", *PLAIN, "--save", "out.busy"),
    ("show", *PLAIN, "-o", "out.html"),
    *(("export", "--to", kind, "-o", name) for kind in ("perfetto", "csv", "json") for name in ("out", "out.gz")),
]


@pytest.mark.parametrize("asked", WRITING, ids=" ".join)
def test_a_place_that_is_full_is_named(trace: str, capsys: pytest.CaptureFixture[str], asked: tuple[str, ...]) -> None:
    Path(asked[-1]).symlink_to("/dev/full")
    code, _, error = ask(capsys, *asked, trace)
    assert code == 2
    assert f"{asked[-1]}" in one_sentence(error)
    assert "No space left on device" in error


@pytest.mark.parametrize("asked", WRITING, ids=" ".join)
def test_what_is_replaced_keeps_its_mode(
    trace: str, capsys: pytest.CaptureFixture[str], asked: tuple[str, ...]
) -> None:
    path = Path(asked[-1])
    path.touch()
    path.chmod(0o640)
    assert ask(capsys, *asked, trace)[::2] == (0, "")
    assert path.stat().st_size
    assert path.stat().st_mode & 0o777 == 0o640


def test_a_full_disk_is_said_in_one_sentence() -> None:
    done = subprocess.run(
        ["bash", "-c", f'"{sys.executable}" -m keepbusy export "{TRACE}" --to csv > /dev/full'], capture_output=True
    )
    assert done.returncode == 2
    assert b"No space left" in done.stderr
    assert b"Traceback" not in done.stderr


def test_many_ranks_are_shown_as_the_pattern_they_match(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from keepbusy.cli.explain import _folded

    monkeypatch.chdir(tmp_path)
    for rank in (0, 1, 10):
        (tmp_path / f"rank{rank}.json").touch()
    names = ["rank0.json", "rank1.json", "rank10.json"]
    assert _folded(names) == ["rank*.json"]
    assert _folded(names[:2]) == names[:2]
    (tmp_path / "rank7.json").touch()
    assert _folded(names) == names


@pytest.mark.parametrize("verb", ["run", "check", "plan"])
def test_what_needs_pytorch_says_so(
    verb: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("keepbusy.cli.find_spec", lambda name: None)
    (tmp_path / "train.py").touch()
    code, _, error = ask(capsys, verb, *(["--gpus", "2"] if verb == "plan" else []), str(tmp_path / "train.py"))
    assert code == 2
    assert one_sentence(error) == (
        f"keepbusy: `keepbusy {verb}` needs PyTorch, which {sys.executable} does not have; install it with "
        f"`{sys.executable} -m pip install 'torch>=2.9'`. Traces are explained without it.\n"
    )


@pytest.mark.parametrize("verb", ["run", "fix", "check"])
def test_verbs_that_run_a_program_take_the_same_options_of_the_machine(verb: str) -> None:
    asked = "--on l4 --gpus 2 --ranks 2 --values none --clock modelled --clocks real train.py --epochs 2"
    options = cli._parser([verb]).parse_args([verb, *asked.split()])
    machine = (options.on, options.gpus, options.ranks, options.values, options.clock, options.clocks)
    assert machine == ("l4", 2, 2, "none", "modelled", "real")
    assert options.program == ["train.py", "--epochs", "2"]
