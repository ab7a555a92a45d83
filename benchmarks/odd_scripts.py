"""Odd scripts under keepbusy and under plain Python: is there a difference that a script or its user can see?

    python benchmarks/odd_scripts.py --jobs 16 | tee odd.txt   # all of them
    python benchmarks/odd_scripts.py "gpu:" "forked"           # those whose theme and name contain one of these
    python benchmarks/odd_scripts.py --show "forked"           # and what differs, line by line

Each script runs twice in the same folder: `python SCRIPT` and `keepbusy run SCRIPT`. Compared are its own
standard output and error (less keepbusy's report), its exit code or the signal that ended it, and the files that it
left; where it works on a device, the run must be saved too. Differences that are meant stand in benchmarks/odd with
their reason, and are listed at the end. Nothing is timed; no script takes much longer than Python's start.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from odd import children, ends, gpu, names, output, programs, signals, surroundings, tools
from odd.case import ASPECTS, SAVED, Case

SOURCE = Path(__file__).parents[1] / "src"
THEMES: Mapping[str, Sequence[Case]] = {
    one.__name__.rpartition(".")[2]: one.CASES
    for one in (names, ends, signals, output, children, tools, surroundings, programs, gpu)
}
SETTLED = 0.3
PATIENCE = 120.0
"""Seconds until a script that does not end is killed."""
PLAIN, OURS = "plain", "keepbusy"
_VARYING = (
    (re.compile(rb"0x[0-9a-f]{6,}"), b"0x..."),
    (re.compile(rb"object refcount : \d+"), b"object refcount : ..."),  # what Python dumps where it cannot print
    (re.compile(rb"\bin \d+\.\d+s"), b"in ...s"),  # what unittest says of itself
)
_NOTES = re.compile(rb"(keepbusy: (?!this is a bug)[^\n]*\n)+(?=(?:Exception ignored in: .*)?\Z)", re.DOTALL)
_REPORT = re.compile(rb"(\A|\n)keepbusy \S+ [^\n]*\n(?:(?!\nkeepbusy ).)*\nagain  [^\n]*\n\Z", re.DOTALL)
"""Both stand at the very end of what was said, or are a difference. What Python says still later, it says by itself."""


@dataclass(frozen=True)
class Seen:
    """What a run left to see, by aspect."""

    stdout: bytes
    stderr: bytes
    exit: str
    files: Mapping[str, bytes]
    temporary: Sequence[str]
    report: str


@dataclass(frozen=True)
class Outcome:
    case: Case
    plain: Seen
    ours: Seen

    def differs(self) -> list[str]:
        return [aspect for aspect in ASPECTS if getattr(self.plain, aspect) != getattr(self.ours, aspect)]

    def not_allowed(self) -> list[str]:
        return [aspect for aspect in self.differs() if aspect not in self.case.allowed]


def main() -> int:
    options = parse()
    chosen = [
        (theme, case)
        for theme, cases in THEMES.items()
        for case in cases
        if case.can_run() and (not options.names or any(part in f"{theme}: {case.name}" for part in options.names))
    ]
    began = time.monotonic()
    print(f"Python {sys.version.split()[0]}, {len(chosen)} scripts, each twice\n")
    width = max(len(case.name) for _, case in chosen)
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="odd-") as root, ThreadPoolExecutor(options.jobs) as pool:
        options.installed = installed(Path(root))
        folders = [Path(root) / str(number) for number in range(len(chosen))]
        running = pool.map(lambda one: compare(one[0][1], one[1], options), zip(chosen, folders, strict=True))
        for (theme, case), outcome in zip(chosen, running, strict=True):
            outcomes.append(outcome)
            print(f"{theme:12}  {case.name:{width}}  {verdict(outcome)}", flush=True)
            if options.show and outcome.not_allowed():
                print(*details(outcome), sep="\n", flush=True)
    bad = [one for one in outcomes if one.not_allowed()]
    print(*reasons(outcomes), sep="\n")
    print(f"\n{len(outcomes) - len(bad)} the same or as allowed, {len(bad)} differ; {time.monotonic() - began:.0f} s")
    return 1 if bad else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="only scripts whose `theme: name` contains one of these")
    parser.add_argument("--show", action="store_true", help="show what differs")
    parser.add_argument("--jobs", type=int, default=2, help="so many at a time (default 2)")
    parser.add_argument("--option", action="append", default=[], help="a further option for keepbusy run")
    return parser.parse_args()


def verdict(outcome: Outcome) -> str:
    if outcome.not_allowed():
        return f"DIFFERS ({', '.join(outcome.not_allowed())})"
    return f"as allowed ({', '.join(outcome.differs())})" if outcome.differs() else "same"


def reasons(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Why what differs may, and what is allowed in vain."""
    yield "\nAllowed differences:"
    for outcome in outcomes:
        for aspect, why in outcome.case.allowed.items():
            unused = "" if aspect in outcome.differs() else " (was the same this time)"
            yield f"- {outcome.case.name}, {aspect}: {why}{unused}"


def details(outcome: Outcome) -> Iterator[str]:
    for aspect in outcome.not_allowed():
        plain, ours = (lines(getattr(one, aspect)) for one in (outcome.plain, outcome.ours))
        for line in list(difflib.unified_diff(plain, ours, f"{aspect}, {PLAIN}", f"{aspect}, {OURS}", lineterm=""))[
            :60
        ]:
            yield f"    {line[:300]}"


def lines(value: object) -> list[str]:
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace").splitlines()
    return (
        [f"{name}: {content!r}"[:200] for name, content in value.items()]
        if isinstance(value, Mapping)
        else [str(value)]
    )


def installed(root: Path) -> Path:
    """The command as pip writes it: unlike `python -m keepbusy`, it does not look for modules where one stands."""
    path = root / "bin" / OURS
    path.parent.mkdir()
    path.write_text("import sys\nfrom keepbusy.cli import main\nsys.exit(main())\n", encoding="utf-8")
    return path


def compare(case: Case, folder: Path, options: argparse.Namespace) -> Outcome:
    """Both runs in a folder of the same name, so that all paths are the same."""
    save = ["--save", SAVED] if case.device else []
    asked = [str(options.installed), "run", *options.option, *save, *case.options]
    plain, ours = (
        run(case, [sys.executable, *case.python, *command, *case.start], folder, bool(command))
        for command in ([], asked)
    )
    return Outcome(case, plain, ours)


def run(case: Case, command: Sequence[str], folder: Path, ours: bool) -> Seen:
    here, temporary = folder / "here", folder / "temporary"
    here.mkdir(parents=True)
    temporary.mkdir()
    try:
        prepare(case, here)
        stdout, stderr, code = started(case, command, here, temporary)
        return Seen(
            stdout=without_varying(without_report(stdout) if ours else stdout),
            stderr=without_varying(without_report(stderr) if ours else stderr),
            exit=named(code),
            files={
                str(path.relative_to(here)): content(path) for path in sorted(here.rglob("*")) if path.name != SAVED
            },
            temporary=sorted(path.name for path in temporary.iterdir()),
            report=report(case, here, ours),
        )
    finally:
        shutil.rmtree(folder)


def prepare(case: Case, here: Path) -> None:
    given = {"script.py": case.source} if case.source else {}
    for name, text in {**given, **case.files}.items():
        path = here / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    if case.prepare:
        case.prepare(here)


def started(case: Case, command: Sequence[str], here: Path, temporary: Path) -> tuple[bytes, bytes, int | None]:
    """Its output and its end; None if it had to be killed."""
    process = subprocess.Popen(
        ["bash", "-c", case.shell, "bash", *command],
        cwd=here,
        env=environment(case, temporary),
        stdin=subprocess.DEVNULL if case.stdin is None else subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        restore_signals=True,
    )
    first = b""
    try:
        if case.signal is not None:
            first = until_ready(process)
            time.sleep(SETTLED)  # its next line is the one that waits
            (os.killpg if case.group else os.kill)(process.pid, case.signal)
        stdout, stderr = process.communicate(case.stdin, timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        stdout, stderr = process.communicate()
        return first + stdout, stderr, None
    return first + stdout, stderr, process.returncode


def until_ready(process: subprocess.Popen[bytes]) -> bytes:
    """What it prints up to its word that a signal may come."""
    said, until = b"", time.monotonic() + PATIENCE
    pipe = process.stdout.fileno() if process.stdout else -1
    while b"ready\n" not in said and select.select([pipe], [], [], max(0.0, until - time.monotonic()))[0]:
        read = os.read(pipe, 1 << 16)
        if not read:
            break
        said += read
    return said


def environment(case: Case, temporary: Path) -> dict[str, str]:
    foreign = ("PYTHON", "LC_", "LANG", "KEEPBUSY")
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith(foreign)},
        "PYTHONPATH": os.pathsep.join(filter(None, [str(SOURCE), os.environ.get("PYTHONPATH")])),
        "PYTHONHASHSEED": "0",
        "TMPDIR": str(temporary),
        "LC_ALL": "C.UTF-8",
        "NO_COLOR": "1",
        **case.environment,
    }


def without_report(text: bytes) -> bytes:
    """And without notes, before or after it."""
    return _NOTES.sub(b"", _REPORT.sub(b"", _NOTES.sub(b"", text)))


def without_varying(text: bytes) -> bytes:
    for pattern, constant in _VARYING:
        text = pattern.sub(constant, text)
    return text


def named(code: int | None) -> str:
    if code is None:
        return f"did not end within {PATIENCE:.0f} s"
    return f"died by {signal.Signals(-code).name}" if code < 0 else f"exit {code}"


def content(path: Path) -> bytes:
    """Compiled files hold the time of their sources."""
    return path.read_bytes() if path.is_file() and path.suffix != ".pyc" else b""


def report(case: Case, here: Path, ours: bool) -> str:
    if not case.device:
        return ""
    if not ours:
        return "is there"
    import keepbusy

    path = here / SAVED
    if not path.exists():
        return f"no {SAVED}"
    try:
        count = int(keepbusy.load(path).on_device.sum())
    except Exception as error:  # whatever it is, it is what was found
        return f"{type(error).__name__}: {error}"
    return "is there" if count >= case.device else f"only {count} commands"


if __name__ == "__main__":
    sys.path.insert(1, str(SOURCE))
    sys.exit(main())
