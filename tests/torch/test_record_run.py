"""`keepbusy run` where there is a GPU: everything but the GPU, whose part of the trace is made up (pretended.py)."""

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

import keepbusy
from keepbusy.recording.windows import DELAYED_SHARE
from keepbusy.timeline.busy_file import load
from keepbusy.timeline.run_facts import STALL

HERE = Path(__file__).parent

PRETENCE = """\
import sys
import keepbusy.cli.program as recorded
import keepbusy.recording.recorded_run as left
recorded.is_possible = lambda: True
recorded._logged = lambda *_: (None, "")  # there is no driver whose calls could be logged
real = left._trace

def pretended(folder, *rest):
    sys.path.insert(1, HERE)
    from pretended import pretend
    if (folder / "window.json").exists():
        pretend(folder / "window.json")
    return real(folder, *rest)

left._trace = pretended
"""

LOOP = """\
import sys
import torch

def loss_of(model, x):
    return model(x).pow(2).mean()

torch.manual_seed(0)
model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)])
optimizer = torch.optim.AdamW(model.parameters())
for step in range(STEPS):
    x = torch.randn(32, 64)
    loss = loss_of(model, x)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    optimizer.step()
    if loss > 1e9:  # a sync
        break
"""
LONG, SHORT = LOOP.replace("STEPS", "40"), LOOP.replace("STEPS", "5")


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
        agent: bool = False,
    ) -> subprocess.CompletedProcess[str]:
        (tmp_path / name).with_suffix(".py").write_text(source)
        command = ["run", *before, name, *after]
        if stderr is None:
            return warm_python.keepbusy(*command, cwd=tmp_path, env=environment, agent=agent)
        return subprocess.run(
            [sys.executable, "-m", "keepbusy", *command], cwd=tmp_path, text=True, timeout=PATIENCE, env=environment,
            stderr=stderr,
        )  # fmt: skip

    return record


def places(said: dict) -> set[tuple[str, int]]:
    found = [site["place"] for one in said["causes"] for site in one["sites"]]
    found += [one["place"] for one in said["harmless"]]
    return {(one["file"], one["line"]) for one in found}


def test_what_is_longer_than_a_log_holds_is_recorded_closely_from_there_on(
    tmp_path: Path, warm_python: WarmPython
) -> None:
    """The log of this one holds next to nothing."""
    short = "import keepbusy.log.hostlog as hostlog\nhostlog.MOST_BYTES = 2 << 20\n"
    pretence = "".join(line for line in PRETENCE.splitlines(keepends=True) if "_logged" not in line)
    (tmp_path / "sitecustomize.py").write_text(pretence.replace("HERE", repr(str(HERE))) + short)
    (tmp_path / "train.py").write_text(LOOP.replace("STEPS", "2000"))
    path = os.pathsep.join([str(tmp_path), str(SOURCES)])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = warm_python.keepbusy("run", "--json", "train.py", cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert any(note.startswith("The run is longer than a log holds") for note in said["notes"])
    assert said["plain_runs"][0]["steps"] > 500


def test_a_fault_of_the_report_is_no_end_of_the_program(tmp_path: Path, warm_python: WarmPython) -> None:
    faulty = f"{PRETENCE}\nrecorded._whole = lambda *_: 1 / 0\n"
    (tmp_path / "sitecustomize.py").write_text(faulty.replace("HERE", repr(str(HERE))))
    (tmp_path / "train.py").write_text("raise SystemExit(7)")
    path = os.pathsep.join([str(tmp_path), str(SOURCES)])
    environment = {**os.environ, "PYTHONPATH": path}
    done = warm_python.keepbusy("run", "train.py", cwd=tmp_path, env=environment)
    assert done.returncode == 7
    assert "this is a bug of keepbusy" in done.stderr
    assert "ZeroDivisionError" in done.stderr


def test_the_report_names_exact_lines_and_says_what_was_recorded(record, tmp_path: Path) -> None:
    done = record(LONG, "--json", "--save", "run.busy")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert 2 <= said["steps"] <= 5  # fewer where they take long, as on a busy machine
    # which of them the GPU waits for, and whether a sync is one of them, depends on where the machine held the host up
    lines = {("train.py", line) for line in (5, *range(10, 18))}
    assert places(said)
    assert places(said) <= lines
    names = load(tmp_path / "run.busy").names
    assert {"train.py(5): loss_of", "train.py(14): <module>", "train.py(17): <module>"} <= {*names}
    assert any("torch/nn/utils/clip_grad.py" in name for name in names)
    assert any(note.startswith("Recorded were steps ") for note in said["notes"])
    assert done.stderr == ""


def test_the_program_computes_what_it_computes_alone(record, tmp_path: Path, warm_python: WarmPython) -> None:
    source = LONG + "print(loss.item(), torch.rand(3).tolist(), sys.gettrace())\n"
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
        (
            "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
            -signal.SIGKILL,
            "The script was killed by SIGKILL.",
        ),
    ],
)
def test_whatever_ends_the_program_its_end_is_its_own_and_the_report_is_made(
    record, end: str, code: int, says: str
) -> None:
    """Which says first that the program was cut short."""
    done = record(LONG + end + "\n")
    assert done.returncode == code
    assert " of an iteration." in done.stdout
    assert next(line for line in done.stdout.splitlines() if line).startswith(says), done.stdout


def test_who_interrupts_it_before_the_program_has_begun_sees_it_die_of_the_signal(record, tmp_path: Path) -> None:
    with (tmp_path / "sitecustomize.py").open("a") as site:
        site.write(
            "import os, signal\nimport keepbusy.recording.recorder as recorder\n"
            "recorder.start = lambda options: os.kill(os.getpid(), signal.SIGINT)\n"
        )
    done = record("print('not reached')\n")
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "keepbusy: train.py took no step.\n")


CLOSES_WHAT_IS_NOT_ITS_OWN = """\
import atexit, os
os.closerange(3, 4096)
atexit.register(print, "the program's last word")
"""


def test_the_report_comes_after_the_programs_last_word_also_where_it_closes_what_is_not_its_own(record) -> None:
    while_it_trains = LONG.replace("    loss.backward()\n", "    loss.backward()\n    os.closerange(3, 4096)\n")
    done = record("import os\n" + while_it_trains + CLOSES_WHAT_IS_NOT_ITS_OWN)
    assert done.returncode == 0, done.stderr
    assert done.stdout.index("the program's last word") < done.stdout.index(" of an iteration.")


def test_an_end_within_the_window_is_said(record) -> None:
    dies = "    if sys.gettrace() or monitored():\n        os.kill(os.getpid(), 9)\n"
    done = record("import os\n" + MONITORED + LONG + dies, "--after", "12")
    assert done.returncode == -signal.SIGKILL
    assert "train.py ended while its steps were recorded, which began after 12; " in done.stderr


MONITORED = """\
import sys
def monitored():
    api = getattr(sys, "monitoring", None)
    return api and any(api.get_tool(number) == "keepbusy" for number in range(6))

"""


def test_a_program_that_ends_too_early_is_told_how_many_steps_it_takes(record, tmp_path: Path) -> None:
    """And of the run it tells what is known without a window, also in the file."""
    done = record(SHORT, "--json", "--save", "run.busy")
    assert (done.returncode, done.stderr) == (0, "")
    said, kept = json.loads(done.stdout), keepbusy.explain(load(tmp_path / "run.busy"))
    [told] = said["notes"]
    assert told == (
        "train.py ended after 5 steps, and recording begins after 8; "
        "let it take 20 steps, or give --after with a smaller number."
    )
    assert (said["steps"], kept.steps, kept.notes) == (0, 0, (told,))
    assert kept.run is not None
    assert kept.run.time > 0  # nanoseconds: in JSON, seconds of a short run are rounded away


def test_a_program_that_is_no_file_is_recorded(record) -> None:
    done = record("", "--json", "-c", LONG, name="--epochs")
    assert done.returncode == 0, done.stderr
    assert {file for file, _ in places(json.loads(done.stdout))} == {"-c"}


def test_of_a_program_that_uses_no_gpu_that_is_said(record) -> None:
    done = record("import torch\nprint(torch.ones(2).sum().item())\n", "--full")
    assert done.stdout.startswith("2.0\n\nkeepbusy · train.py · ")
    assert "note    train.py used no GPU, so there is nothing that one could have waited for." in done.stdout


def test_a_program_without_steps_is_told_what_to_call(record, tmp_path: Path) -> None:
    with (tmp_path / "sitecustomize.py").open("a") as site:
        site.write("import keepbusy.recording.recorder as recorder\nrecorder.uses_gpu = lambda: True\n")
    done = record("import torch\nprint(torch.ones(2).sum().item())\n", "--full")
    assert "note    train.py took no step: none of its optimizers stepped; call keepbusy.step()" in done.stdout


IS_IN_NO_HURRY = """\
import keepbusy.recording.recorder as recorder
import keepbusy.recording.windows as window
window.WHOLE_TURNS_AFTER = window.LONGEST_OPEN = 10**11
recorder.is_granted = lambda *_: False
"""
"""As on a machine that is not busy: where steps take long, a window closes sooner; where longer than before, another
one opens in its place."""


def test_the_window_opens_when_it_is_told_to(record, tmp_path: Path) -> None:
    with (tmp_path / "sitecustomize.py").open("a") as site:
        site.write(IS_IN_NO_HURRY)
    done = record(LONG, "--json", "--after", "20")
    assert "Recorded were steps 22 to 26 of 40" in json.loads(done.stdout)["notes"][0]


OWN_PROFILER = """\
from torch.profiler import profile
with profile() as own:
    exec(compile(LOOP, "inner.py", "exec"))
print(len(own.events()) > 10)
"""


def test_the_programs_own_profiler_goes_first(record) -> None:
    done = record(f"LOOP = {LONG!r}\n" + OWN_PROFILER, "--full")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("True\n\nkeepbusy · train.py · ")
    assert " steps that were not recorded take " in done.stdout
    assert "runs PyTorch's profiler itself" in done.stdout


def test_the_programs_own_profiler_finds_its_modules(record) -> None:
    seen = "import torch\nlayer = torch.nn.Linear(2, 2)\n" + (
        "with torch.profiler.profile(with_stack=True) as seen:\n    layer(torch.ones(3, 2))\n"
        "seen.export_chrome_trace('trace.json')\nprint('nn.Module: Linear_0' in open('trace.json').read())\n"
    )
    done = record(seen)
    assert done.stdout.startswith("True\n"), done.stderr


def test_workers_that_are_forked_while_the_window_is_open_do_not_break(record) -> None:
    source = LONG.replace("    x = torch.randn(32, 64)\n", "    x = next(iter(loader))\n").replace(
        "for step", "loader = torch.utils.data.DataLoader(torch.randn(64, 64), batch_size=32, num_workers=1)\nfor step"
    ).replace("range(40)", "range(24)")  # fmt: skip
    done = record(source)
    assert done.returncode == 0
    assert " of an iteration." in done.stdout


RANKS = LONG.replace("import sys\n", "import os\nimport sys\nimport torch.distributed as dist\n").replace(
    "torch.manual_seed(0)\n", "dist.init_process_group('gloo')\n"
).replace("    optimizer.zero_grad()\n", "    optimizer.zero_grad()\n    DIES\n")  # fmt: skip


def test_ranks_look_at_the_same_steps_and_make_one_report(record) -> None:
    done = record(
        RANKS.replace("DIES", "pass") + "dist.destroy_process_group()\n", "--ranks", "2", "--json", agent=True
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["ranks"] == [0, 1]
    assert 2 <= said["steps"] <= 5  # of so short steps some may seem rare, and are left out


def test_a_rank_that_dies_leaves_what_it_had(record) -> None:
    dies = "if step == 30 and dist.get_rank() == 1: os.kill(os.getpid(), 9)"
    done = record(RANKS.replace("DIES", dies).replace("range(40)", "range(4000)"), "--ranks", "2")
    assert done.returncode != 0
    assert "2 ranks" in done.stdout


SPAWNED = """\
import os
import sys
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

def train(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(40):
        loss = model(torch.randn(32, 64)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        dist.all_reduce(model.weight.grad)
        optimizer.step()
        if rank == 1 and step == DIES:
            raise ValueError("rank 1 has had enough")
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.spawn(train, args=(sys.argv[1],), nprocs=2)
    print("all is done")
"""


def test_ranks_that_the_script_spawns_make_one_report(record, tmp_path: Path) -> None:
    """Also where it is run as a module."""
    done = record(SPAWNED.replace("DIES", "None"), "--json", "-m", name="train", after=[str(tmp_path)])
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["ranks"] == [0, 1]
    assert 2 <= said["steps"] <= 5  # of so short steps some may seem rare, and are left out
    assert "all is done" in done.stderr
    assert {file for file, _ in places(said)} == {"train.py"}


def test_a_spawned_rank_that_fails_leaves_what_it_had(record, tmp_path: Path) -> None:
    done = record(SPAWNED.replace("DIES", "30"), after=[str(tmp_path)])
    assert done.returncode == 1
    assert "rank 1 has had enough" in done.stderr
    assert done.stdout.lstrip().startswith("The script failed with ProcessRaisedException at train.py:")
    assert "2 ranks" in done.stdout


def test_a_spawned_rank_that_fails_too_early_is_said_to_be_missing(record, tmp_path: Path) -> None:
    source = SPAWNED.replace("DIES", "2").replace("        dist.all_reduce(model.weight.grad)\n", "").replace(
        "mp.spawn(train, args=(sys.argv[1],), nprocs=2)",
        "both = mp.spawn(train, args=(sys.argv[1],), nprocs=2, join=False)\n    [one.join() for one in both.processes]",
    )  # fmt: skip
    done = record(source, after=[str(tmp_path)])
    assert done.returncode == 0, done.stderr
    assert "rank 1 is missing from this report: train.py ended after 3 steps" in done.stderr
    assert " of an iteration." in done.stdout


LOOKS_OFTEN = """\
import keepbusy.recording.recorder as recorder
import keepbusy.recording.windows as window
import keepbusy.recording.windows as plan
window.HELD_UP_AT_ONCE = 10**10
plan.THINKING_SHARE, plan.WINDOWS_SHARE, recorder._THINKS_EVERY = 1.0, 1.0, 200_000_000
"""
"""To look for what is rare takes time, and only a share of the run's is granted, as for closing windows: too little
of a run of seconds on a busy machine."""
RARE = (
    LONG.replace("range(40)", "range(1100)")
    + """\
    if step % 100 == 60:
        evaluate()
    time.sleep(0.004)
"""
)
"""Beside steps of 5 ms the machine's own whims are no stalls, unless it is very busy."""
EVALUATE = """\
import time

def evaluate():
    until = time.perf_counter() + 0.15
    while time.perf_counter() < until:
        sum(range(20_000))
        torch.ones(8).sum().item()

"""


def test_a_stall_that_comes_only_now_and_then_is_told_with_its_line(record, tmp_path: Path) -> None:
    with (tmp_path / "sitecustomize.py").open("a") as site:
        site.write(LOOKS_OFTEN)
    done = record(RARE.replace("torch.manual_seed", EVALUATE + "torch.manual_seed"), "--json")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    (run,) = said["plain_runs"]
    assert run["marked_by"] == "optimizer"
    if run["delayed"] > DELAYED_SHARE:
        pytest.skip("others had the processor for so long that steps seem as long as the program's own stalls")
    stall = run["stalls"][0]
    assert (stall["called_at"] or stall["where"]) == "train.py:28"  # in it, no line may have been seen most of the time
    assert (stall["every"], stall["regular"]) == (100.0, True)
    assert stall["count"] >= 7  # of eleven, one was looked at
    assert 130 < stall["time"] < 1000
    # a window was open when it came again; another may have been for a beat of the machine's own
    rare = next(one for one in said["rare"] if one["step"] % 100 == 62)
    assert {site["place"]["line"] for cause in rare["causes"] for site in cause["sites"]} & {12, 13}
    assert f" {rare['step'] - 1} to {rare['step'] + 1}" in said["notes"][0]


PLANS_A_STALL = """\
import os
from dataclasses import asdict
from pathlib import Path
from keepbusy.timeline.run_facts import STALL, RareStall
recorder._FIRST_THOUGHT, STEP = 0, 404

def stalls(self, *_):
    if not self.taken:
        stall = RareStall("", 3, 100.0, True, 1, 1, 1.0, last=STEP - 100)
        turns, opens = plan.TURNS_BEFORE + 1 + plan.TURNS_AFTER, STEP - plan.SETTLING_TURNS - plan.TURNS_BEFORE - 1
        yield plan.Occasion(STALL, 1, turns, {"step": STEP, "stall": asdict(stall)}, opens)

def noting(act):
    def noted(self, *given, **named):
        act(self, *given, **named)
        if self.planned is not None:
            Path("planned by " + os.environ["RANK"]).touch()
    return noted

plan.WindowPlan._stalls = stalls
plan.WindowPlan._loops = plan.WindowPlan._change = lambda *_: ()
plan.WindowPlan.think, plan.WindowPlan.follow = noting(plan.WindowPlan.think), noting(plan.WindowPlan.follow)
"""
"""The first rank looks again at a step that lies far ahead, and no rank is there before it has heard of it."""
LOOKS_AGAIN = RANKS.replace("range(40)", "range(420)").replace("import os\n", "import os, time\n").replace(
    "DIES", "while step == 200 and not os.path.exists(f'planned by {dist.get_rank()}'): time.sleep(0.01)"
).replace("    optimizer.step()\n", "    dist.all_reduce(model[0].weight.grad)\n    optimizer.step()\n")  # fmt: skip


def test_ranks_open_later_windows_at_the_same_step(record, tmp_path: Path) -> None:
    """Turns alone say when they close: on a busy machine one rank's would be over within its first turn."""
    with (tmp_path / "sitecustomize.py").open("a") as site:
        site.write(IS_IN_NO_HURRY + LOOKS_OFTEN + PLANS_A_STALL)
    done = record(LOOKS_AGAIN, "--ranks", "2", "--save", "run.busy", "--quiet", agent=True)
    assert done.returncode == 0, done.stderr
    (later,) = load(tmp_path / "run.busy").further
    assert (later.facts.reason.why, later.ranks) == (STALL, [0, 1])
    assert 404 in later.facts.recorded


TALKS = """\
import os
model, numbers = torch.nn.Linear(8, 8), 0
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while numbers < 100 or not os.path.exists("seen"):
    model(torch.ones(8)).sum().backward()
    optimizer.step()
    numbers += 1
    if numbers % 100 == 0:
        print(f"<{numbers}>", file=sys.stderr)
"""


def test_live_draws_at_the_bottom_and_leaves_what_the_program_prints(tmp_path: Path, record) -> None:
    """Seen by a terminal on paper, as large as the one that the program has. The program goes on until all is seen."""
    sys.path.insert(1, str(HERE.parent / "pure"))
    from screens import PaperScreen

    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 20, 100, 0, 0))
    screen = PaperScreen(100, 20)

    def watch() -> None:
        written, has_figures, has_tree = b"", False, False
        while part := _read(ours):
            *drawn, written = (written + part).split(b"\x1b8")
            for each in drawn:
                screen.write(each.decode() + "\x1b8")
                has_figures |= screen.lines[-1].startswith("keepbusy · step ") and "s (" in screen.lines[-1]
                has_tree |= any(" so far" in line for line in screen.lines)
            if has_figures and has_tree:
                (tmp_path / "seen").touch()
        screen.write(written.decode())

    watching = threading.Thread(target=watch)
    watching.start()
    record("import sys, torch\n" + TALKS, "--live", stderr=theirs)
    os.close(theirs)
    watching.join()
    said = [line for line in (*screen.scrolled, *screen.lines) if line.startswith("<")]
    assert said == [f"<{100 * number}>" for number in range(1, len(said) + 1)]
    assert screen.lines[-1] == ""
    assert (screen.top, screen.bottom) == (0, 19)


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 4096)
    except OSError:  # the other end is closed
        return b""


SESSION = """\
import torch, keepbusy, sys
sys.path.insert(1, HERE)
from pretended import pretend
loop = LOOP
with keepbusy.record(after=4) as run:
    exec(compile(loop, "cell.py", "exec"))
folder = run._run.folder
pretend(folder / "window.json")
said = run.explain()
print(said.steps, any(name == "cell.py(11): <module>" for name in run.timeline.names))
print(folder.exists(), run.explain().plain_step == said.plain_step)
"""


def test_a_session_without_steps_tells_its_tree_as_a_run_does(tmp_path: Path, warm_python: WarmPython) -> None:
    source = """\
import keepbusy, torch
with keepbusy.record() as run:
    torch.ones(8).sum()
print(keepbusy.render_full(run.explain()))
"""
    done = warm_python.python("-c", source, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "The run took " in done.stdout
    assert "this session used no GPU" in " ".join(done.stdout.split())


def test_a_stretch_of_a_program_is_recorded_from_within(tmp_path: Path, warm_python: WarmPython) -> None:
    source = SESSION.replace("HERE", repr(str(HERE))).replace("LOOP", repr(LONG))
    done = warm_python.python("-c", source, cwd=tmp_path)
    first, second = done.stdout.splitlines()
    steps, has_lines = first.split()
    assert (2 <= int(steps) <= 5, has_lines) == (True, "True"), done.stderr
    assert second == "False True"
