"""`keepbusy run` where there is a GPU: everything but the GPU, whose calls are those of another run (pretended.py)."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from warm_python import PATIENCE, SOURCES, WarmPython

from keepbusy.timeline.busy_file import load

HERE = Path(__file__).parent
PRETENCE = """\
import sys
import keepbusy.cli.program as recorded
import keepbusy.log.logged_run as left
recorded.is_possible = lambda: True
real = left.read_processes

def pretended(folder):
    sys.path.insert(1, HERE)
    from pretended import pretend
    pretend(folder)
    return real(folder)

left.read_processes = pretended
"""
TRAINS = """\
import sys
import torch

torch.manual_seed(0)
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(5):
    optimizer.zero_grad()
    loss = model(torch.randn(4, 8)).pow(2).mean()
    loss.backward()
    optimizer.step()
"""


@pytest.fixture
def record(tmp_path: Path, warm_python: WarmPython):
    """Run a script with `keepbusy run`, on a machine that seems to have a GPU."""
    (tmp_path / "sitecustomize.py").write_text(PRETENCE.replace("HERE", repr(str(HERE))))
    path = os.pathsep.join([str(tmp_path), str(SOURCES)])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}

    def record(
        source: str,
        *before: str,
        name: str = "train.py",
        after: Sequence[str] = (),
        stderr: int | None = None,
        also: str = "",
    ) -> subprocess.CompletedProcess[str]:
        """`also`: what is done before all else."""
        with (tmp_path / "sitecustomize.py").open("a") as site:
            site.write(also)
        (tmp_path / name).with_suffix(".py").write_text(source)
        command = ["run", *before, name, *after]
        if stderr is None:
            return warm_python.keepbusy(*command, cwd=tmp_path, env=environment)
        return subprocess.run(
            [warm_python.executable, "-m", "keepbusy", *command],
            cwd=tmp_path, text=True, timeout=PATIENCE, env=environment,
            stderr=stderr,
        )  # fmt: skip

    return record


def test_the_report_is_of_the_log(record, tmp_path: Path) -> None:
    done = record(TRAINS, "--json", "--save", "run.busy")
    assert (done.returncode, done.stderr) == (0, "")
    said = json.loads(done.stdout)
    assert said["notes"][0].startswith("recorded: ")
    assert said["causes"][0]["sites"][0]["place"]["line"] == 27
    assert load(tmp_path / "run.busy").facts.logged


def test_the_program_computes_what_it_computes_alone(record, tmp_path: Path, warm_python: WarmPython) -> None:
    source = TRAINS + "print(loss.item(), torch.rand(3).tolist(), sys.gettrace())\n"
    (tmp_path / "alone.py").write_text(source)
    alone = warm_python.python("alone.py", cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert record(source).stdout.splitlines()[0] == alone.stdout.strip()


@pytest.mark.parametrize(
    ("end", "code", "says"),
    [
        ("sys.exit(7)", 7, "keepbusy"),
        ("raise ValueError", 1, "The script failed with ValueError at train.py:"),
        ("raise KeyboardInterrupt", -signal.SIGINT, "The script was interrupted at train.py:"),
        (
            "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
            -signal.SIGTERM,
            "The script was killed by SIGTERM at train.py:",
        ),
    ],
)
def test_whatever_ends_the_program_its_end_is_its_own_and_the_report_is_made(
    record, end: str, code: int, says: str
) -> None:
    """Which says first that the program was cut short."""
    done = record(TRAINS + end + "\n")
    assert done.returncode == code
    assert " of an iteration." in done.stdout
    assert next(line for line in done.stdout.splitlines() if line).startswith(says), done.stdout


def test_who_interrupts_it_before_the_program_has_begun_sees_it_die_of_the_signal(record) -> None:
    interrupted = (
        "import os, signal\nimport keepbusy.log.program_log as log\n"
        "log.start = lambda *_, **__: os.kill(os.getpid(), signal.SIGINT)\n"
    )
    done = record("print('not reached')\n", also=interrupted)
    assert (done.returncode, "not reached" in done.stdout) == (-signal.SIGINT, False)


def test_a_fault_of_the_report_is_no_end_of_the_program(record) -> None:
    done = record("raise SystemExit(7)", also="recorded._logged_timeline = lambda *_: 1 / 0\n")
    assert done.returncode == 7
    assert "this is a bug of keepbusy" in done.stderr
    assert "ZeroDivisionError" in done.stderr


def test_where_nothing_can_be_logged_the_program_runs_and_the_reason_is_said(record) -> None:
    nothing = "import keepbusy.log.hostlog as hostlog\nhostlog.build = lambda: 'there is no C compiler; install gcc'\n"
    done = record("print('done')\n", also=nothing)
    assert (done.returncode, done.stdout) == (0, "done\n")
    assert done.stderr == "keepbusy: The run is not recorded: there is no C compiler; install gcc.\n"


CLOSES_WHAT_IS_NOT_ITS_OWN = """\
import atexit, os
os.closerange(3, 4096)
atexit.register(print, "the program's last word")
"""


def test_the_report_comes_after_the_programs_last_word_also_where_it_closes_what_is_not_its_own(record) -> None:
    while_it_trains = TRAINS.replace("    loss.backward()\n", "    loss.backward()\n    os.closerange(3, 4096)\n")
    done = record("import os\n" + while_it_trains + CLOSES_WHAT_IS_NOT_ITS_OWN)
    assert done.returncode == 0, done.stderr
    assert done.stdout.index("the program's last word") < done.stdout.index(" of an iteration.")


def test_of_a_program_that_uses_no_gpu_that_is_said(record) -> None:
    done = record("print('done')\n", also="left.read_processes = real\n")
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "keepbusy: train.py ran nothing on the GPU.\n")


def test_the_programs_own_profiler_finds_its_modules(record) -> None:
    seen = "import torch\nlayer = torch.nn.Linear(2, 2)\n" + (
        "with torch.profiler.profile(with_stack=True) as seen:\n    layer(torch.ones(3, 2))\n"
        "seen.export_chrome_trace('trace.json')\nprint('nn.Module: Linear_0' in open('trace.json').read())\n"
    )
    done = record(seen)
    assert done.stdout.startswith("True\n"), done.stderr


TALKS = """\
answers, numbers = open("answers"), 0
while True:
    numbers += 1
    if numbers % 100 == 0:
        print(f"<{numbers}>", file=sys.stderr)
        if answers.readline() == "seen\\n":
            break
"""


def test_live_draws_at_the_bottom_and_leaves_what_the_program_prints(tmp_path: Path, record) -> None:
    """Seen by a terminal on paper, as large as the one that the program has.

    The program goes on until all is seen, from one drawing to the next: else each look would be at more iterations.
    """
    sys.path.insert(1, str(HERE.parent / "pure"))
    from screens import PaperScreen

    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 20, 100, 0, 0))
    screen = PaperScreen(100, 20)
    os.mkfifo(tmp_path / "answers")
    answers = os.open(tmp_path / "answers", os.O_RDWR | os.O_NONBLOCK)

    def watch() -> None:
        written, has_iteration, has_tree = b"", False, False
        while part := _read(ours):
            *drawn, written = (written + part).split(b"\x1b8")
            for each in drawn:
                screen.write(each.decode() + "\x1b8")
                has_iteration |= screen.lines[-1].startswith("keepbusy · ") and "per iteration" in screen.lines[-1]
                has_tree |= any(" so far" in line for line in screen.lines)
            if drawn:
                os.write(answers, b"seen\n" if has_iteration and has_tree else b"go on\n")
        screen.write(written.decode())

    watching = threading.Thread(target=watch)
    watching.start()
    soon = "recorded._LEAST_PAUSE = 0.1\nimport keepbusy.log.program_log as log\nlog._WRITES_EVERY = 10**8\n"
    record("import sys\n" + TALKS, "--live", stderr=theirs, also=soon + LOOKS_ASIDE)
    os.close(theirs)
    watching.join()
    os.close(answers)
    said = [line for line in (*screen.scrolled, *screen.lines) if line.startswith("<")]
    assert said == [f"<{100 * number}>" for number in range(1, len(said) + 1)]
    assert screen.lines[-1] == ""
    assert (screen.top, screen.bottom) == (0, 19)


LOOKS_ASIDE = """\
def aside(folder):
    import shutil, tempfile
    copy = tempfile.mkdtemp() + "/log"
    shutil.copytree(folder, copy)
    from pathlib import Path
    return pretended(Path(copy))
left.read_processes = aside
"""
"""While the program goes on, its own folder stays as it is."""


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 4096)
    except OSError:  # the other end is closed
        return b""


SESSION = """\
import keepbusy, sys
sys.path.insert(1, HERE)
import keepbusy.log.logged_run as left
from pretended import pretend
real = left.read_processes
left.read_processes = lambda folder: [pretend(folder), real(folder)][1]
run = keepbusy.record()
for _ in range(2):
    with run:
        exec(compile(LOOP, "cell.py", "exec"))
    said = run.explain()
    print(said.causes[0].sites[0].where.line, said.steps > 50, run.explain().plain_step == said.plain_step)
"""


def test_a_part_of_a_program_is_recorded_from_within_also_again(tmp_path: Path, warm_python: WarmPython) -> None:
    source = SESSION.replace("HERE", repr(str(HERE))).replace("LOOP", repr(TRAINS))
    done = warm_python.python("-c", source, cwd=tmp_path)
    assert done.stdout.splitlines() == ["27 True True"] * 2, done.stderr


def test_a_session_that_used_no_gpu_says_so(tmp_path: Path, warm_python: WarmPython) -> None:
    source = "import keepbusy\nwith keepbusy.record() as run:\n    pass\nrun.explain()\n"
    done = warm_python.python("-c", source, cwd=tmp_path)
    assert "this session used no GPU" in done.stderr
