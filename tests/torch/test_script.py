"""The user's script under `keepbusy run`: its names, children, threads, streams and end are as under Python."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from warm_python import PATIENCE, warm

SOURCES = Path(__file__).parents[2] / "src"
WORK = "import torch\nx = torch.ones(8, device='cuda') * 2\n"


ENVIRONMENT = {**os.environ, "PYTHONPATH": str(SOURCES), "PYTHONDONTWRITEBYTECODE": "1"}
MODELLED = ("--clock", "modelled")
SWEEP = pytest.mark.sweep(room="program")


def both(
    folder: Path, *program: str, under: tuple[str, ...] = (), fresh: bool = False
) -> list[subprocess.CompletedProcess[str]]:
    """Under plain Python, and under `keepbusy run`; `fresh`: that in a Python of its own, too."""
    plain, ours = python(folder, *under, *program), (*MODELLED, *program)
    if fresh or under:
        return [plain, python(folder, *under, "-m", "keepbusy", "run", *ours)]
    return [plain, run(folder, *ours)]


def python(
    folder: Path, *command: str, given: str = "", start: str = sys.executable
) -> subprocess.CompletedProcess[str]:
    """`given`: by standard input."""
    return subprocess.run(
        [start, *command],
        cwd=folder,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        input=given,
    )


def run(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return warm().keepbusy("run", *options, cwd=folder, env=ENVIRONMENT)


def said(done: subprocess.CompletedProcess[str]) -> tuple[str, str, int]:
    """Without our own words at the end: what follows them is a difference."""
    error = done.stderr.splitlines(keepends=True)
    while error and error[-1].startswith("keepbusy: ") and "this is a bug" not in error[-1]:
        error.pop()
    return done.stdout, "".join(error), done.returncode


NAMES = '''\
"""What it is."""
import sys, dataclasses, __main__
@dataclasses.dataclass
class One:
    x: int = 3
def double(t: int) -> float: ...
print(sorted(globals()), double.__annotations__, One.__annotations__, dataclasses.fields(One)[0].type)
print(type(__builtins__), __loader__.name, __spec__, __package__, __file__, __main__.One is One)
print(sys.argv, sys.orig_argv[1:], sys.path[0])
'''
LAST = "import os\nclass Last:\n    def __del__(self): os.write(1, b'gone\\n')\nlast = Last()\n"
ODD = {
    "names": NAMES,
    "syntax": "x = (1,\nfor\n",
    "hook": "import sys\ndef hook(*error): print(sys.last_type, sys.last_value is error[1])\n"
    "sys.excepthook = hook\n1 / 0\n",
    "no hook": "import sys\nsys.excepthook = None\n1 / 0\n",
    "broken hook": "import sys\ndef hook(*error): 1 / 0\nsys.excepthook = hook\nraise ValueError('mine')\n",
    "interrupted": "import atexit\natexit.register(print, 'left')\nraise KeyboardInterrupt\n",
    "exit": "import sys\nsys.exit('enough')\n",
    "forked": "import atexit, os, threading, time\nchild = os.fork()\n"
    "if child:\n    os.waitpid(child, 0)\n"
    "else:\n    atexit.register(print, 'left')\n"
    "    threading.Thread(target=lambda: (time.sleep(0.05), print('thread'))).start()\n",
    "stdout closed": "import sys\nsys.stderr.write('going\\n')\nsys.stdout.close()\n",
    "stderr replaced": "import sys\nclass Quiet:\n    def write(self, text): pass\n    def flush(self): pass\n"
    "sys.stderr = sys.stdout = Quiet()\n1 / 0\n",
    "last words of logging": "import atexit, logging, logging.handlers\n"
    "lines = logging.handlers.MemoryHandler(9, target=logging.StreamHandler())\n"
    "logging.getLogger().addHandler(lines)\nlogging.warning('kept until the end')\n"
    "atexit.register(logging.warning, 'last')\n",
    "last words of objects": LAST,
    "stdout deleted": "import sys\ndel sys.stdout\n",
    "no streams": "import sys\nsys.stdout = sys.stderr = None\n",
    "few descriptors": "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (6, 6))\nprint(1)\n",
    "descriptors closed": "import os\nos.closerange(3, 4096)\nprint(open(os.devnull).fileno())\n",
}


STARTS = ("names", "last words of logging", "last words of objects", "descriptors closed")
"""These are about what Python does at its start, or its end, too."""


SELDOM = STARTS
"""What other tests check, too, with one Python of their own."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=SWEEP) if name in SELDOM else name for name in ODD])
def test_it_is_as_under_python(name: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(ODD[name])
    plain, ours = both(tmp_path, "train.py", "--epochs", "--", "2", fresh=name in STARTS)
    assert said(ours) == said(plain)


CLOSING = """\
import os, time
import torch
from torch.utils.data import DataLoader
device = "cuda" if torch.cuda.is_available() else "cpu"
x = torch.ones(8, device=device)
for turn in range(3):
    os.closerange(3, 65536)
    own = [open(f"own{number}", "w+") for number in range(40)]
    begun = time.perf_counter()
    while time.perf_counter() < begun + 0.002:  # so long that it is asked whether the core was another's
        pass
    x = x * 2
    print(x.sum().item())
    if turn == 2:  # multiprocessing has descriptors of its own, which are not to be closed
        print([one.tolist() for one in DataLoader(torch.arange(4), num_workers=2)])
    for one in own: one.write("its own")
    del one, own
print({open(f"own{number}").read() for number in range(40)})
"""


@pytest.mark.parametrize("options", [pytest.param((), marks=SWEEP), MODELLED])
def test_a_program_may_close_all_descriptors_while_it_is_at_work(options: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(CLOSING)
    ours = run(tmp_path, "--quiet", "--save", "run.busy", *options, "train.py")
    assert ours.stdout.startswith("16.0\n32.0\n64.0\n[[0], [1], [2], [3]]\n{'its own'}\n")
    assert (ours.returncode, said(ours)[1]) == (0, "")
    assert (tmp_path / "run.busy").exists()


def test_folders_archives_and_modules_run(tmp_path: Path) -> None:
    source = "import sys\nprint(repr(__package__), __file__, sys.argv, sys.path[0], __spec__.name)\n1 / 0\n"
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "__main__.py").write_text(source)
    with zipfile.ZipFile(tmp_path / "app.zip", "w") as archive:
        archive.writestr("__main__.py", source)
    for program in (("app",), ("app.zip", "3"), ("-m", "app"), ("-m", "nowhere")):
        plain, ours = both(tmp_path, *program)
        assert said(ours) == said(plain)


TEXT = (
    NAMES.replace("__file__", "globals().get('__file__'), globals().get('__cached__', 1)")
    + """
import atexit, multiprocessing
atexit.register(lambda: print(sorted(globals()), sys.stdin.read()))
def work(queue): queue.put(3)
if __name__ == "__main__":
    fork = multiprocessing.get_context("fork"); queue = fork.Queue()
    child = fork.Process(target=work, args=(queue,)); child.start(); print(queue.get()); child.join()
import beside
def fails():
    1 / beside.ZERO
fails()
"""
)


@pytest.mark.parametrize(
    ("source", "given"),
    [
        (("-",), TEXT.replace("sys.orig_argv[1:], ", "")),  # which a fork has from the Python that it was forked from
        pytest.param(("-c", TEXT), "", marks=SWEEP),
        pytest.param(("-c", "x = (1,\nfor\n"), "", marks=SWEEP),
    ],
)
def test_a_program_that_is_no_file_runs_as_under_python(source: tuple[str, ...], given: str, tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("ZERO = 0\n")
    plain = python(tmp_path, *source, "--epochs", "2", given=given)
    assert "Error" in plain.stderr
    start = warm().executable if given else sys.executable
    ours = python(tmp_path, "-m", "keepbusy", "run", *source, "--epochs", "2", given=given, start=start)
    assert said(ours) == said(plain)


def test_the_report_finds_the_lines_of_a_program_that_is_no_file(tmp_path: Path) -> None:
    ours = run(tmp_path, *MODELLED, "-c", WORK + "for _ in range(9):\n    x.sum().item()\n")
    assert " -c:4" in ours.stdout
    both_ranks = run(tmp_path, *MODELLED, "--ranks", "2", "-c", "import os\nprint(os.environ['RANK'])\n")
    assert sorted("".join(both_ranks.stdout.split())) == ["0", "1"]  # their lines may mix


@pytest.mark.parametrize(
    ("command", "why"),
    [
        (("run", "--ranks", "2", "-"), "standard input can be read once"),
        (("fix", "-"), "needs a file or a module"),
        (("check", "-c", "1"), "`keepbusy check` does not know -c"),
    ],
)
def test_where_a_program_has_to_be_a_file_that_is_said(command: tuple[str, ...], why: str, tmp_path: Path) -> None:
    done = warm().keepbusy(*command, cwd=tmp_path, env=ENVIRONMENT)
    assert (done.returncode, done.stdout) == (2, "")
    assert why in done.stderr


def test_warnings_as_errors_find_none_of_ours_and_names_and_last_words_are_as_under_python(tmp_path: Path) -> None:
    own = NAMES.replace("orig_argv[1:]", "orig_argv[-4:]")  # before these stand Python's own options
    (tmp_path / "train.py").write_text(own + LAST)
    plain, ours = both(tmp_path, "train.py", "--epochs", "--", "2", under=("-W", "error", "-X", "dev"))
    assert said(plain)[0].endswith("gone\n")
    assert said(ours) == said(plain)


FAILS = """\
import torch
x = torch.ones(2)
for _ in range(2):
    torch.tensor(x)
torch.tensor(x, device="cpu")
device = "cuda" if torch.cuda.is_available() else "cpu"
layer, x = torch.nn.Linear(2, 2).to(device), torch.ones(3, 3, device=device)
try:
    layer(x)
except RuntimeError:
    try:
        x @ x[:2]
    except RuntimeError as error:
        raise ExceptionGroup("both", [error])
"""


@SWEEP
def test_the_programs_own_import_of_pytorchs_compiler_succeeds(tmp_path: Path) -> None:
    """It asks for functions of Python's, as what they are."""
    (tmp_path / "train.py").write_text("import torch._dynamo\nprint(torch._dynamo.__name__)\n")
    source = "import sys\nfrom keepbusy.program import script\nscript.run_file('train.py', [])\n"
    assert python(tmp_path, "-c", source).stdout == "torch._dynamo\n"


STACK = """\
import inspect, io, logging, pdb, sys, traceback
def deepest(n=1):  # as a module a program may go one deeper than under Python 3.11
    try:
        return deepest(n + 1)
    except RecursionError:
        return n
def shown():
    traceback.print_stack(file=sys.stdout)
    print([(one.filename, one.lineno, one.function) for one in inspect.stack()])
    print([one.name for one in traceback.extract_stack(limit=2)])
    print([one.name for one in traceback.StackSummary.extract(traceback.walk_stack(None))])
    logging.warning("here", stack_info=True)
def stopped():
    pdb.Pdb(stdin=io.StringIO("w\\nu\\nu\\np 3\\nd\\nc\\n"), stdout=sys.stdout, nosigint=True).set_trace()
    return 1
shown()
stopped()
print(sys.getswitchinterval(), sys.getrecursionlimit(), deepest() // 5)
for limit, interval in ((500, 0.1), (4000, 0.0001)):
    sys.setrecursionlimit(limit)
    sys.setswitchinterval(interval)
    print(sys.getswitchinterval(), sys.getrecursionlimit(), deepest() // 5)
for wrong in (0, 1, "4", 1 << 40):
    try:
        sys.setrecursionlimit(wrong)
    except Exception as error:
        print(type(error).__name__, sys.getrecursionlimit())
import torch
device = "cuda" if torch.cuda.is_available() else "cpu"
layer = torch.nn.Linear(2, 2).to(device)
layer.register_forward_hook(lambda *_: shown())
layer(torch.ones(1, 2, device=device))
"""


def test_the_stack_begins_with_the_program_a_traceback_is_its_own_and_warnings_name_its_lines(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(STACK + FAILS)
    plain, ours = both(tmp_path, "train.py")
    assert plain.stderr.count("RuntimeError") == 3
    assert plain.stderr.count("it is recommended") == 2
    assert ours.stdout.startswith(plain.stdout)
    assert said(ours)[1:] == said(plain)[1:]


@SWEEP
@pytest.mark.parametrize(
    ("program", "options"),
    [
        (("-m", "train"), MODELLED),
        (("train.py",), ()),
        (("-m", "train"), ()),
    ],
)
def test_the_stack_begins_with_a_module_too_and_on_the_clock_that_measures(
    options: tuple[str, ...], program: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(STACK)
    plain, ours = python(tmp_path, *program), run(tmp_path, "--quiet", *options, *program)
    assert ours.stdout.startswith(plain.stdout)
    assert plain.stderr in ours.stderr


PROFILED = """\
import torch
from torch.profiler import ProfilerActivity, profile
device = "cuda" if torch.cuda.is_available() else "cpu"
layer, x = torch.nn.Linear(2, 2).to(device), torch.ones(3, 2, device=device)
with profile(activities=[ProfilerActivity.CPU], with_stack=True) as seen:
    layer(x)
seen.export_chrome_trace("trace.json")
print("nn.Module: Linear_0" in open("trace.json").read())
"""


def test_the_programs_own_profiler_finds_its_modules(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROFILED)
    ours = run(tmp_path, *MODELLED, "train.py")
    assert ours.stdout.startswith("True\n"), ours.stderr


SCRIPTED = """\
import torch
@torch.jit.script
def shifted(x):
    return x + torch.zeros(2, device=x.device)
print(shifted(torch.ones(2, device="cuda")).tolist())
"""


def test_torchscript_knows_the_functions_that_stand_for_pytorchs(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPTED)
    ours = run(tmp_path, *MODELLED, "train.py")
    assert ours.stdout.startswith("[1.0, 1.0]\n"), ours.stderr


SPAWNED = """\
import multiprocessing, dataclasses
@dataclasses.dataclass
class Point:
    x: int
def work(queue):
    queue.put((Point(3), work.__annotations__, Point.__annotations__, sorted(vars(__import__('__main__')))))
if __name__ == "__main__":
    spawn = multiprocessing.get_context("spawn")
    queue = spawn.Queue()
    child = spawn.Process(target=work, args=(queue,))
    child.start()
    print(queue.get())
    child.join()
"""


def test_spawned_children_are_as_under_python(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SPAWNED)
    plain, ours = both(tmp_path, "train.py")
    assert said(ours) == said(plain)


def test_the_report_does_not_mind_what_became_of_the_streams(tmp_path: Path) -> None:
    (tmp_path / "away").mkdir()
    (tmp_path / "train.py").write_text(
        WORK + "import os, sys\nos.chdir('away')\nsys.stdout.close()\nsys.stderr = None\n"
        "import keepbusy\nfor _ in range(6):\n    x.sum().item()\n    keepbusy.step()\n"
    )
    ours = run(tmp_path, *MODELLED, "--json", "--save", "run.busy", "train.py")
    assert (tmp_path / "run.busy").exists(), ours.stderr
    assert json.loads(ours.stdout)["device"] == "virtual NVIDIA H200"
    assert ours.returncode == 0


def test_work_of_threads_and_exit_handlers_is_in_the_report(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import atexit, threading, time\n"
        "def work():\n    time.sleep(0.1)\n    import torch\n    torch.ones(8, device='cuda')\n"
        "atexit.register(work)\nthreading.Thread(target=work).start()\n"
    )
    ours = run(tmp_path, *MODELLED, "--save", "run.busy", "train.py")
    from keepbusy.timeline.busy_file import load

    assert load(tmp_path / "run.busy").on_device.sum() == 2, ours.stderr


def test_a_script_finds_its_own_modules_and_the_report_its_whatever_becomes_of_the_interpreter(tmp_path: Path) -> None:
    """Beside the script lie modules that are named like what PyTorch or the report imports."""
    command = tmp_path / "bin" / "keepbusy"  # as pip installs it: it does not look for modules where one stands
    for name in ("statistics", "shlex", "queue", "rich"):
        (tmp_path / f"{name}.py").write_text("mine = 3\n")
    (tmp_path / "train.py").write_text(
        "import queue, rich, shlex, statistics, sys\nprint(queue.mine + rich.mine + shlex.mine + statistics.mine)\n"
        f"{WORK}x.sum().item()\nimport builtins\nsys.path.clear()\nsys.meta_path.clear()\n"
        "del sys.modules['__main__'], sys.modules['json'], sys.modules['keepbusy']\n"
        "sys.modules['rich'] = sys.modules['shlex'] = None\nbuiltins.open = builtins.sorted = None\n"
        "sys.setrecursionlimit(60)\n"
    )
    command.parent.mkdir()
    command.write_text("import sys\nfrom keepbusy.cli import main\nsys.exit(main())\n")
    ours = python(tmp_path, str(command), "run", "--clock", "measured", "train.py")
    assert ours.stdout.startswith("12\n\nkeepbusy · train.py"), ours.stderr
    assert "The GPU is busy " in ours.stdout, ours.stderr
    assert ours.stderr == ""


def test_all_threads_that_a_script_finds_are_its_own(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        WORK + "import threading, time\nfor _ in range(9):\n    x.sum().item()\n    time.sleep(0.01)\n"
        "print(*threading.enumerate(), threading.active_count())\n"
    )
    ours = run(tmp_path, "--clock", "measured", "train.py")
    assert ours.stdout.startswith("<_MainThread(MainThread, started "), ours.stdout
    assert ours.stdout.splitlines()[0].endswith(")> 1"), ours.stdout


def test_the_first_sigterm_ends_the_program_and_the_report_follows(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(WORK + "import os, signal\nos.kill(os.getpid(), signal.SIGTERM)\nprint('no')\n")
    ours = run(tmp_path, *MODELLED, "--save", "run.busy", "train.py")
    assert ours.returncode == -signal.SIGTERM
    assert (tmp_path / "run.busy").exists()
    assert "no\n" not in ours.stdout


INTERRUPTED = """\
import os, signal
import keepbusy.cli.run as run
import torch
from keepbusy.virtual.clock.engine import Clock
x = torch.ones(8, device="cuda")
reports, operator = run._report, Clock.operator
def reported(*given):
    import threading
    print(threading.current_thread().name, IN_US)
    reports(*given)
def interrupted(*given):  # in the midst of what is written down of an operator
    global IN_US
    IN_US = True
    os.kill(os.getpid(), signal.SIGTERM)
    operator(*given)
    IN_US = False
run._report, Clock.operator, IN_US = reported, interrupted, False
interrupted.__code__ = interrupted.__code__.replace(co_filename=operator.__code__.co_filename)
x + 1
while True:
    sum(range(1000))
"""


def test_a_sigterm_during_the_report_waits_for_it(tmp_path: Path) -> None:
    """torchrun ends all ranks once one has failed; the first is at the report then."""
    during = "import os, signal\nimport keepbusy.cli.run as run\nreport = run._report\n" + (
        "def ended(*given):\n    os.kill(os.getpid(), signal.SIGTERM)\n    report(*given)\nrun._report = ended\n"
    )
    (tmp_path / "train.py").write_text(WORK + during + "x.sum().item()\n")
    ours = run(tmp_path, *MODELLED, "train.py")
    assert (ours.returncode, ours.stderr) == (-signal.SIGTERM, "")
    assert "The GPU is busy " in ours.stdout


def test_a_sigterm_within_us_waits_until_the_program_goes_on(tmp_path: Path) -> None:
    """The report is made in a thread of its own, not in the midst of whatever the signal came upon."""
    (tmp_path / "train.py").write_text(INTERRUPTED)
    ours = run(tmp_path, *MODELLED, "train.py")
    assert (ours.returncode, ours.stderr) == (-signal.SIGTERM, "")
    assert ours.stdout.startswith("keepbusy report False\n")
    assert "train.py" in ours.stdout
