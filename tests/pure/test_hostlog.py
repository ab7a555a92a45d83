"""The log of driver calls, with a driver that has no GPU behind it: `hostlog/fake_driver.c`."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
import textwrap
from collections import Counter
from pathlib import Path

import pytest

import keepbusy.log
from keepbusy.log.log_file import (
    RESUMED,
    THINNED,
    CallFlag,
    DriverLog,
    StackFrame,
    device_commands,
    gaps_of,
    read_log,
)
from keepbusy.log.logged_run import read_processes, timeline_in
from keepbusy.timeline.run_facts import LOOP

LIBRARY = Path(keepbusy.log.__file__).with_name("hostlog.c")
PARTS = Path(__file__).with_name("hostlog")
COMPILER = shutil.which("cc") or shutil.which("gcc")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C compiler")
STRICT = ("-O2", "-std=gnu11", "-Wall", "-Wextra", "-Werror")


def compiled(*arguments: str | Path) -> None:
    done = subprocess.run([str(COMPILER), *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library and, in place of the driver, NCCL and CUDA's runtime, the fake ones."""
    folder = tmp_path_factory.mktemp("parts")
    shared = ("-shared", "-fPIC")
    compiled(*STRICT, *shared, LIBRARY, "-o", folder / "hostlog.so")
    for name, soname in (("fake_driver", "libcuda.so.1"), ("fake_nccl", "libnccl.so.2")):
        compiled("-O1", *shared, f"-Wl,-soname,{soname}", PARTS / f"{name}.c", "-o", folder / soname)
    linked = (f"-Wl,-rpath,{folder}", folder / "libnccl.so.2")
    compiled("-O1", "-w", *shared, PARTS / "client.c", "-o", folder / "client.so", *linked)
    compiled("-O1", "-w", *shared, "-Wl,-z,relro,-z,now", PARTS / "client.c", "-o", folder / "sealed.so", *linked)
    compiled("-O1", *shared, "-DSECOND", PARTS / "next.c", "-o", folder / "second.so")
    after = ("-Wl,--no-as-needed", f"-Wl,-rpath,{folder}", folder / "second.so")
    compiled("-O1", *shared, PARTS / "next.c", "-o", folder / "first.so", *after)
    return folder


HEAD = """
import ctypes, os, sys, threading
from pathlib import Path
from keepbusy.log import hostlog
parts, folder = Path(sys.argv[1]), Path(sys.argv[2])
hostlog.LIBRARY = parts / "hostlog.so"

def load(name="client.so"):
    client = ctypes.CDLL(parts / name)
    assert client.client_start() == 0
    for number in ("client_launch", "client_launch_own", "client_launch_by_dlsym", "client_copies", "client_context"):
        getattr(client, number).argtypes = [ctypes.c_uint64] * (3 if number == "client_launch" else 1)
    client.client_launch_own.argtypes = [ctypes.c_uint64, ctypes.c_uint64]
    return client
"""


def printed_by(script: str, parts: Path, tmp_path: Path) -> str:
    """What a script printed, whose log is in the folder `log`."""
    (tmp_path / "script.py").write_text(HEAD + script)
    folder = tmp_path / "log"
    folder.mkdir()
    sources = str(Path(keepbusy.log.__file__).parents[2])
    done = subprocess.run(
        [sys.executable, tmp_path / "script.py", parts, folder],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": sources, "LD_LIBRARY_PATH": str(parts)},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def logged(parts: Path, tmp_path: Path):
    """What a script, which starts the log itself, has logged."""

    def run(script: str, start: bool = True) -> DriverLog:
        begin = "why = hostlog.start(folder); assert not why, why\n" if start else ""
        printed_by(begin + textwrap.dedent(script), parts, tmp_path)
        return read_log(tmp_path / "log")

    return run


@pytest.mark.parametrize("client", ["client.so", "sealed.so"])
def test_each_call_is_a_row(logged, client: str) -> None:
    log = logged(
        f"""
        client = load({client!r})
        for grid in (1, 1, 2):
            client.client_launch(64, grid, 0)
        client.client_launch_by_dlsym(64)
        client.client_copies(4096)
        client.client_events()
        client.client_reduce(1000)
        assert hostlog.stop() == ""
        client.client_launch(64, 1, 0)
        """
    )
    names = (*["launch"] * 4, *["copy_to_gpu"] * 2, "copy_to_host", "event_record", "event_wait", "stream_sync")
    assert [*log.kinds()] == [*names, "communicator", "all_reduce"]
    assert [log.calls[number].grid[0] for number in log.rows["call"][:4]] == [1, 1, 2, 7]
    assert log.calls[1].name == '_Z4gelu"Pf'
    assert log.calls[1].block == (128, 1, 1)
    assert [*log.rows["value"][4:7]] == [4096] * 3
    assert [*log.rows["flags"][4:7]] == [0, CallFlag.PAGEABLE, CallFlag.BLOCKING]
    assert {log.streams[number].handle for number in log.rows["stream"][8:10]} == {4096}
    assert log.rows["value"][-1] == 1000
    (communicator,) = log.communicators
    assert communicator["ranks"] == 4
    assert communicator["rank"] == 2
    assert (log.took >= 0).all()


def test_a_driver_that_was_in_use_before_is_logged_from_then_on(logged) -> None:
    """As in a notebook: whoever found the driver's functions earlier keeps them in a table of its own."""
    log = logged(
        """
        client = load()
        client.client_launch(64, 1, 0)
        client.client_launch_by_dlsym(64)
        why = hostlog.start(folder); assert not why, why
        client.client_launch(64, 2, 0)
        client.client_launch_by_dlsym(64)
        client.client_copies(4096)
        client.client_reduce(1000)
        """,
        start=False,
    )
    names = (*["launch"] * 2, *["copy_to_gpu"] * 2, "copy_to_host", "communicator", "all_reduce")
    assert [*log.kinds()] == [*names]
    assert log.calls[1].grid[0] == 2


def test_a_log_that_begins_again_goes_on(logged) -> None:
    log = logged(
        """
        client = load()
        client.client_launch(64, 1, 0)
        again = folder / "again"
        again.mkdir()
        assert hostlog.start(again) == "keepbusy records this process already"
        assert hostlog.stop() == ""
        client.client_launch(64, 2, 0)
        why = hostlog.start(again); assert not why, why
        client.client_launch(64, 3, 0)
        assert hostlog.stop() == ""
        assert (again / "rows").samefile(folder / "rows")
        """
    )
    assert [log.calls[number].grid[0] for number in log.rows["call"]] == [1, 3]


def test_what_comes_often_can_be_left_out_for_a_while(logged) -> None:
    """Graphs and communicators that are made meanwhile are known afterwards."""
    log = logged(
        """
        client = load()
        client.client_launch(64, 1, 0)
        hostlog.note(1)
        hostlog.thin(True)
        hostlog.thin(True)
        client.client_launch(64, 2, 0)
        client.client_copies(4096)
        client.client_events()
        client.client_graph()
        client.client_reduce(1000)
        hostlog.note(2)
        hostlog.thin(False)
        client.client_launch(64, 4, 0)
        hostlog.note(3)
        """
    )
    graph = ["stream_create", "capture_begin", "launch", "capture_end", "graph_create"]
    kinds = ["launch", "note", THINNED, *graph, "communicator", "all_reduce", RESUMED, "launch", "note"]
    assert [*log.kinds()] == kinds
    assert [*log.rows["value"][log.kinds() == "note"]] == [1, 3]
    captured = log.rows["flags"] == CallFlag.CAPTURED
    assert [*log.kinds()[captured]] == ["launch"]
    left_out = gaps_of(log, ended=0)
    assert (left_out.begins.tolist(), left_out.ends.tolist()) == (
        log.begin[log.kinds() == THINNED].tolist(),
        log.begin[log.kinds() == RESUMED].tolist(),
    )


def test_a_log_that_begins_again_leaves_nothing_out(logged) -> None:
    log = logged(
        """
        client = load()
        again = folder / "again"
        again.mkdir()
        hostlog.thin(True)
        assert hostlog.start(again) == "keepbusy records this process already"
        assert hostlog.stop() == ""
        why = hostlog.start(again); assert not why, why
        client.client_launch(64, 3, 0)
        """
    )
    assert [*log.kinds()] == [THINNED, RESUMED, "launch"]


def test_a_wait_for_all_is_a_row_in_both_forms_that_the_driver_has(logged) -> None:
    """CUDA 13 names the context, and PyTorch's `synchronize` comes as that one."""
    log = logged("assert load().client_wait_for_all() == 0\n")
    assert [*log.kinds()] == ["context_sync", "context_sync"]
    assert [*log.rows["flags"]] == [0, 0]


def test_a_note_is_a_row_with_the_stack_that_it_was_made_from(logged, tmp_path: Path) -> None:
    log = logged("def inner(): hostlog.note(7)\ninner()\nassert not hostlog.stop()\nhostlog.note(8)\n")
    assert [*log.kinds()] == ["note"]
    assert [*log.rows["value"]] == [7]
    stack = log.stacks[int(log.rows["stack"][0])]
    assert [frame.function for frame in stack] == ["note", "inner", "<module>"]


def test_rows_have_the_time_of_pythons_clock(logged, tmp_path: Path) -> None:
    log = logged(
        """
        import time
        client = load()
        def timed(): before = time.monotonic_ns(); client.client_launch(64, 1, 0); return before, time.monotonic_ns()
        stamps = [timed() for _ in range(40_000)]
        (folder / "stamps").write_text(repr(stamps))
        """
    )
    stamps = ast.literal_eval((tmp_path / "log" / "stamps").read_text())
    inside = [before - 1000 < begin < after + 1000 for begin, (before, after) in zip(log.begin, stamps, strict=True)]
    assert all(inside)


def test_a_row_knows_the_python_stack_it_comes_from(logged, tmp_path: Path) -> None:
    log = logged(
        """
        client = load()
        class Model:
            def forward(self):
                client.client_launch(64, 1, 0)
                client.client_launch(64, 1, 0)
        def steps():
            for _ in range(3):
                Model().forward()
                yield
        list(steps())
        exec(compile("def größe():\\n    client.client_launch(64, 1, 0)\\ngröße()", "räume.py", "exec"))
        """
    )
    lines = (tmp_path / "script.py").read_text().splitlines()
    stacks = [log.stacks[number] for number in log.rows["stack"]]
    assert stacks[0] != stacks[1]
    assert stacks[:2] * 3 == stacks[:6]
    script = str(tmp_path / "script.py")
    place = [lines.index(line) + 1 for line in ("        Model().forward()", "list(steps())")]
    assert stacks[0][1:] == (StackFrame(script, place[0], "steps"), StackFrame(script, place[1], "<module>"))
    assert stacks[0][0].function == "Model.forward"
    assert stacks[1][0].line == stacks[0][0].line + 1
    assert stacks[6][:2] == (StackFrame("räume.py", 2, "größe"), StackFrame("räume.py", 3, "<module>"))


@pytest.mark.skipif(sys.version_info < (3, 12), reason="CPython 3.11 doesn't say when it destroys code")
def test_code_at_the_address_of_code_that_is_gone_has_its_own_name(logged) -> None:
    log = logged(
        """
        client = load()
        for i in range(200):
            exec(compile("client.client_launch(64, 1, 0)", f"file {i}", "exec"))
        """
    )
    assert [log.stacks[number][0].file for number in log.rows["stack"]] == [f"file {i}" for i in range(200)]


def test_offsets_of_another_python_leave_rows_without_stacks(logged) -> None:
    log = logged(
        """
        hostlog.FRAME_OFFSETS["name"] = hostlog.FRAME_OFFSETS["filename"]
        assert not hostlog.start(folder)
        load().client_launch(64, 1, 0)
        """,
        start=False,
    )
    assert [*log.rows["stack"]] == [0]


def test_functions_that_are_asked_for_during_a_pause_are_logged_after_it(logged) -> None:
    log = logged(
        """
        hostlog.pause(True)
        client = load()
        client.client_launch(64, 1, 0)
        hostlog.pause(False)
        client.client_launch(64, 2, 0)
        """
    )
    assert [log.calls[number].grid[0] for number in log.rows["call"]] == [2]


def test_streams_are_told_apart_by_context_and_thread(logged) -> None:
    log = logged(
        """
        client = load()
        client.client_launch(64, 1, 0)
        client.client_context(32)
        client.client_launch(64, 1, 0)
        client.client_launch(64, 1, 4096)
        client.client_launch_own(64, 1)
        thread = threading.Thread(target=client.client_launch_own, args=(64, 1))
        thread.start()
        thread.join()
        """
    )
    assert [*log.rows["stream"]] == [1, 2, 3, 4, 5]
    assert [*log.rows["thread"]] == [1, 1, 1, 1, 2]
    assert log.streams[2].context == 32


def test_what_a_graph_records_is_marked(logged) -> None:
    log = logged("assert load().client_graph() == 0")
    launch = [*log.kinds()].index("launch")
    kinds = ("stream_create", "capture_begin", "launch", "capture_end", "graph_create", "graph_launch")
    assert [*log.kinds()] == [*kinds]
    assert [*log.rows["flags"] & CallFlag.CAPTURED] == [CallFlag.CAPTURED if at == launch else 0 for at in range(6)]
    graph, made, replayed = (int(log.rows["value"][at]) for at in (3, 4, 5))
    assert log.calls[int(log.rows["call"][4])].function == graph
    assert made == replayed
    assert int(log.rows["value"][0].astype("i8")) == -2
    issuers, described = device_commands(log)
    assert ([*issuers], [*described]) == ([5], [launch])


def test_a_call_that_fails_still_fails_and_is_marked(logged) -> None:
    log = logged("assert load().client_launch(64, 666, 0) == 1")
    assert [*log.rows["flags"]] == [CallFlag.FAILED]


def test_a_handle_may_mean_another_kernel_once_code_was_unloaded(logged) -> None:
    log = logged("client = load()\nfor _ in range(2): client.client_launch(64, 1, 0); client.client_unload()")
    first, second = log.rows["call"][[*log.kinds()].index("launch") :: 2]
    assert first != second


def test_a_forked_child_logs_nothing(logged) -> None:
    log = logged(
        """
        client = load()
        child = os.fork()
        hostlog.pause(False)
        for _ in range(5):
            client.client_launch(64, 1, 0)
        if not child:
            os._exit(0)
        os.waitpid(child, 0)
        """
    )
    assert len(log.rows) == 5


def test_rows_of_a_process_that_is_killed_are_there(logged, parts: Path) -> None:
    log = logged(
        """
        child = os.fork()
        if child:
            sys.exit(os.waitpid(child, 0)[1] != 9)
        assert not hostlog.start(folder)
        client = load()
        for grid in range(40_000):
            client.client_launch(64, grid % 50 + 1, 0)
        os.kill(os.getpid(), 9)
        """,
        start=False,
    )
    assert len(log.rows) == 40_000
    assert (log.begin[1:] >= log.begin[:-1]).all()


def test_the_log_ends_where_its_size_does(logged) -> None:
    log = logged(
        """
        assert not hostlog.start(folder, most_bytes=1 << 20)
        client = load()
        for _ in range(40_000):
            assert client.client_launch(64, 1, 0) == 0
        assert hostlog.stop() == "the log reached its limit of size"
        """,
        start=False,
    )
    assert len(log.rows) == 1 << 15


def test_the_next_function_is_that_of_the_caller(logged) -> None:
    logged(
        """
        first = ctypes.CDLL(parts / "first.so")
        load()
        assert first.marker() == 1
        assert first.next_marker() == 2
        """
    )


@pytest.mark.parametrize(
    "sanitizer", [pytest.param("address,undefined", marks=pytest.mark.sweep(room="log")), "thread"]
)
def test_many_threads_under_a_sanitizer(parts: Path, tmp_path: Path, sanitizer: str) -> None:
    program = tmp_path / "threads"
    library = tmp_path / "hostlog.so"
    watched = (str(COMPILER), f"-fsanitize={sanitizer}", "-g", "-O1", "-std=gnu11")
    if subprocess.run([*watched, "-shared", "-fPIC", LIBRARY, "-o", library], check=False).returncode:
        pytest.skip("this compiler has no sanitizer")
    subprocess.run([*watched, PARTS / "threads.c", library, "-o", program], check=True)
    folder = tmp_path / "log"
    folder.mkdir()
    done = subprocess.run(
        [program, folder / "rows", folder / "names", parts / "client.so"],
        capture_output=True,
        text=True,
        env={"LD_LIBRARY_PATH": str(parts), "ASAN_OPTIONS": "detect_leaks=0"},
    )
    assert done.returncode == 0, done.stderr
    made = int(done.stdout.split()[0])
    log = read_log(folder)
    assert len(log.rows) == made
    assert len(log.streams) == 8
    assert len(log.calls) == 64 * 3
    assert {count % 20_000 for count in Counter(log.rows["thread"].tolist()).values()} == {0}


@pytest.mark.skipif(sys.version_info < (3, 12), reason="nothing is left out where Python does not count iterations")
def test_a_long_run_is_counted_to_its_end_where_calls_are_left_out(parts: Path, tmp_path: Path) -> None:
    """A chunk of the file holds 32,768 calls; one is kept here, and later stretches of one. The program goes on until
    the thread that looks on has left some out, however late it comes."""
    script = """
    from keepbusy.log import program_log
    program_log._WHOLE_BYTES = program_log._PORTION_BYTES = 1 << 20
    thin, thinned = hostlog.thin, []
    hostlog.thin = lambda on: (thin(on), thinned.append(on))
    log, why = program_log.start(folder)
    assert log is not None, why
    def train(client):
        iterations = 0
        while iterations < 1_000 or True not in thinned:
            for call in range(200):
                client.client_launch(64, 1, 0)
            iterations += 1
        return iterations
    print(train(load()))
    log.end()
    """
    iterations = int(printed_by(textwrap.dedent(script), parts, tmp_path))
    [process] = read_processes(tmp_path / "log")
    assert len(process.gaps) >= 1
    whole = timeline_in(tmp_path / "log", "script.py")
    assert whole.facts.run is not None
    loops = {part.source: part.turns for part in whole.facts.run.within() if part.kind == LOOP}
    assert loops["while iterations < 1_000 or True not in thinned:"] == iterations
    assert "of the run's" in whole.facts.notes[0]
