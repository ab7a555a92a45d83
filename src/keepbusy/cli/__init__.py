"""The command line: `keepbusy VERB …`. Each verb has a file, and its `run` returns what is printed.

This file holds what verbs share: output, option values, programs, files, explanations. Other rooms are imported only
when needed, so that the command starts at once.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import re
import shlex
import shutil
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, chdir, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TypeAlias

from keepbusy import __version__
from keepbusy.timeline.figures import NANOSECONDS, listing
from keepbusy.timeline.files import BadInput, write_whole
from keepbusy.torch_names.cpython import flags_by_name

if TYPE_CHECKING:
    from keepbusy.explain.comparison import Comparison
    from keepbusy.explain.diagnosis import Diagnosis
    from keepbusy.explain.kept_plan import KeptPlan
    from keepbusy.report.verdict import Commands
    from keepbusy.timeline.model import Timeline
    from keepbusy.traces.trace_file import EachOf


FINE, BAD_INPUT, OWN_FAULT = 0, 2, 3
VERBS = {
    "explain": "which line makes the GPU wait, and what fixing it saves",
    "run": "run a program and explain the run, on a real GPU or a virtual one",
    "show": "a page to look at, and to send",
    "fix": "try the fixes of a program's plan, and show those that hold as a diff",
    "check": "fail where Python waits for the GPU too often, on a machine without one",
    "compare": "what changed between two runs, cause by cause",
    "plan": "which layout of a model over many GPUs is fastest and fits",
    "export": "write a run for Perfetto, or as JSON or CSV",
    "doctor": "measure what this machine can do, and find harmful settings",
    "completion": "complete verbs and options in bash, zsh or fish",
    "learn": "read the course: how GPUs work and wait, in programs that need none",
}
"""Each verb is a file with `add_arguments`, `run` and EXAMPLES, which is imported when the verb is called."""
DESCRIPTION = "Which line of a PyTorch program makes the GPU wait, what fixing it saves, and the fix."
EXAMPLES = """\
to begin with:
  keepbusy run train.py                     run a program, and explain the run
  keepbusy explain rank*.trace.json.gz      explain a trace of PyTorch's profiler
  keepbusy doctor                           what this machine can do, and which settings are harmful

examples:
  keepbusy explain rank*.trace.json.gz --plain-step 25.0 --save run.busy
  keepbusy explain run.busy --what-if host_sync,blocking_copy
  keepbusy show run.busy -o run.html
  keepbusy compare before.busy after.busy
  keepbusy export run.busy --to perfetto -o run.json.gz

exit codes: 0 fine, 1 a check failed, 2 something was wrong with the input, 3 a bug of keepbusy
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb; return the exit code."""
    try:
        arguments = sys.argv[1:] if arguments is None else arguments
        parser = _parser(arguments)
        if not arguments:
            print_parts((parser.format_help(),))
            return FINE
        options, unknown = parser.parse_known_args(arguments)
        if unknown:
            raise BadInput(
                f"`{options.prog}` does not know {' '.join(unknown)}; `{options.prog} --help` shows what it takes."
            )
        print_parts(options.run(options))
    except KeyboardInterrupt:  # Python dies of the signal, so that a loop of the shell ends, too
        sys.excepthook = lambda *_: None
        raise
    except BrokenPipeError:
        return HUNG_UP
    except Exception as error:
        complain(sentence_of(error))
        return BAD_INPUT if isinstance(error, BadInput | OSError) else OWN_FAULT
    return FINE


class _Parser(argparse.ArgumentParser):
    """Reports errors in one sentence."""

    def error(self, message: str) -> NoReturn:
        raise BadInput(f"{message}. `{self.prog} --help` shows how it goes.")


def _parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    """A parser that knows the names of all verbs, and the arguments of the verb that is called."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = _Parser(prog="keepbusy", description=DESCRIPTION, epilog=EXAMPLES, formatter_class=raw, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"keepbusy {__version__}")
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
    called = next((word for word in arguments if not word.startswith("-")), None)
    for name, summary in VERBS.items():
        verb_parser = verbs.add_parser(name, help=summary, formatter_class=raw, allow_abbrev=False)
        if name == called:
            verb = import_module(f"keepbusy.cli.{name}")
            verb_parser.description, verb_parser.epilog = verb.__doc__, verb.EXAMPLES
            verb.add_arguments(verb_parser)
            verb_parser.set_defaults(run=verb.run, prog=verb_parser.prog)
    return parser


# Standard output, errors, and files

ISSUES = "the issue tracker of keepbusy"
HUNG_UP = 141  # 128 + SIGPIPE: the shell's code for a program whose reader has gone


def line_of(sentence: str) -> str:
    """Format a sentence as one line of printable letters."""
    letters = " ".join(sentence.split())
    line = "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in letters)
    return f"keepbusy: {line}\n"


def sentence_of(error: Exception) -> str:
    """The message for the user, without a traceback."""
    if isinstance(error, BadInput):
        return str(error)
    if isinstance(error, OSError):
        reason = error.strerror or type(error).__name__
        return f"{error.filename}: {reason}." if error.filename else f"{reason}."
    if os.environ.get("KEEPBUSY_DEBUG") == "1":
        traceback.print_exception(error)
    return (
        f"this is a bug of keepbusy {__version__}, not of your input ({f'{type(error).__name__}: {error}'[:200]}). "
        f"Please report it at {ISSUES}; KEEPBUSY_DEBUG=1 shows the traceback to put into the report."
    )


def need_pytorch(subject: str) -> None:
    if find_spec("torch") is None:
        raise BadInput(without_pytorch(subject))


def without_pytorch(subject: str) -> str:
    """The message if PyTorch is not installed."""
    return (
        f"{subject} needs PyTorch, which {sys.executable} does not have; install it with "
        f"`{sys.executable} -m pip install 'torch>=2.9'`. Traces are explained without it."
    )


def complain(sentence: str) -> None:
    """Write one line to standard error, if there is one."""
    if sys.stderr is not None:
        encoding = sys.stderr.encoding or "utf-8"
        sys.stderr.write(line_of(sentence).encode(encoding, "replace").decode(encoding))


def print_parts(parts: Iterable[str]) -> None:
    """Write to standard output in its encoding, and fail at once if it is closed."""
    if sys.stdout is None:
        return
    encoding = sys.stdout.encoding or "utf-8"
    binary = getattr(sys.stdout, "buffer", None)
    try:
        for part in parts:
            encoded = part.encode(encoding, "replace")
            if binary is None:
                sys.stdout.write(encoded.decode(encoding))
                continue
            sys.stdout.flush()
            rest = memoryview(encoded)
            while rest:  # with PYTHONUNBUFFERED one write may take only a part, and Python's text layer drops the rest
                rest = rest[binary.write(rest) :]
        sys.stdout.flush()
    except OSError:  # otherwise it would fail again when Python closes standard output
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise


def check_place(path: Path) -> None:
    """Raise BadInput before the work begins if no file can be written there."""
    target = Path(os.path.realpath(path))
    if target.is_dir() or not target.parent.is_dir():
        raise BadInput(f"{path}: this is no place for a file; name a file in a folder that exists.")


@dataclass(frozen=True)
class Screen:
    """The abilities of standard output."""

    width: int
    colour: bool
    unicode: bool
    is_terminal: bool


def screen() -> Screen:
    """The terminal's width, or 100 without a terminal; colour only if it is wanted."""
    width = shutil.get_terminal_size((100, 40)).columns
    is_terminal = sys.stdout is not None and sys.stdout.isatty()
    colour = bool(os.environ.get("FORCE_COLOR")) or (is_terminal and os.environ.get("TERM") != "dumb")
    unicode = True
    try:
        "→–µ·…█▓▒".encode(getattr(sys.stdout, "encoding", None) or "ascii")
    except (UnicodeEncodeError, LookupError):
        unicode = False
    return Screen(max(40, min(width, 110)), colour and not os.environ.get("NO_COLOR"), unicode, is_terminal)


# Values of options

_LONGEST = 24 * 3600 * NANOSECONDS["s"]
_DURATION = re.compile(r"([+-]?[0-9.]+(?:e[+-]?[0-9]+)?)\s*([a-zµ]*)", re.IGNORECASE)


def step_time(text: str) -> int:
    """Nanoseconds of a text such as `25.0`, which is milliseconds, `25ms` or `0.025s`."""
    match = _DURATION.fullmatch(text.strip())
    unit = NANOSECONDS.get(match[2].lower() or "ms") if match else None
    time = _number(match[1]) * unit if match and unit else math.nan
    if not 1 <= time <= _LONGEST:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not the time of a step; give milliseconds above 0, as in 25.0, or a unit: 25ms, 0.025s"
        )
    return round(time)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def add_plain_step(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--plain-step",
        type=step_time,
        metavar="MS",
        help="how long a step takes without the profiler: milliseconds, or with a unit, as in 0.025s",
    )


def fixable() -> list[str]:
    from keepbusy.explain.diagnosis import CAUSES, UNFIXABLE

    return [cause for cause in CAUSES if cause not in UNFIXABLE]


def listed(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def causes(text: str) -> tuple[str, ...]:
    choices, names = fixable(), listed(text)
    for name in names:
        if name not in choices:
            raise argparse.ArgumentTypeError(f"{name!r} is no cause that can be fixed; there are {', '.join(choices)}")
    if not names:
        raise argparse.ArgumentTypeError(f"no cause was named; there are {', '.join(choices)}")
    return tuple(dict.fromkeys(names))


def add_what_if(parser: argparse.ArgumentParser) -> None:
    """`--mend` is the old name of the option, kept for old commands."""
    parser.add_argument(
        "--what-if", type=causes, metavar="CAUSES", default=(), help="predict the step with these fixed"
    )
    parser.add_argument("--mend", dest="what_if", type=causes, default=(), help=argparse.SUPPRESS)


def add_timeline(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--timeline", action="store_true", help="draw one iteration below the report, in characters")


def add_workers(parser: argparse.ArgumentParser) -> None:
    from keepbusy.timeline.run_facts import USUAL_WORKERS

    parser.add_argument(
        "--workers",
        type=whole_number("workers", 1024),
        metavar="N",
        help=f"loader workers that a prediction may count on (default {USUAL_WORKERS}, and no more than cores)",
    )


def whole_number(unit: str, most: int, least: int = 1) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not text.isdecimal() or len(text) > len(str(most)) or not least <= int(text) <= most:
            message = f"{text!r} is no number of {unit}; give a whole number from {least} to {most:,}"
            raise argparse.ArgumentTypeError(message)
        return int(text)

    return read


def amount(text: str) -> float:
    """A number of hours or an amount of money, above 0."""
    number = _number(text)
    if not 0 < number < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0; give one, as in 48 or 2.50")
    return number


# Options of verbs that run a program: the program and its machine

MOST_RANKS = 64
"""The most ranks that are started on one machine."""


def add_program(parser: argparse.ArgumentParser, description: str, metavar: str = "SCRIPT") -> None:
    parser.add_argument("-m", dest="module", action="store_true", help="what follows names a module, not a script")
    parser.add_argument("program", metavar=metavar, nargs=argparse.PARSER, help=description)


def program_in(options: argparse.Namespace) -> tuple[str, list[str]]:
    """The script, which exists, and its arguments; `--` may separate both from keepbusy's options."""
    from keepbusy.program.script import find

    script, *arguments = options.program[1:] if options.program[0] == "--" else options.program
    if script == "-" and not options.module:
        raise BadInput(f"`{options.prog}` needs a file or a module: it runs it again, or reads it; save the program.")
    if not options.module:
        find(script)
    return script, arguments


def hint_at_own_options(options: argparse.Namespace, add_arguments: Callable[[argparse.ArgumentParser], None]) -> None:
    """Write a hint if arguments of the program are options of this verb, unless the script contains them itself."""
    parser = argparse.ArgumentParser(add_help=False)
    add_arguments(parser)
    script, arguments = program_in(options)
    text = ""
    with suppress(OSError):
        text = "" if options.module else Path(script).read_text(encoding="utf-8", errors="replace")
    flags = dict.fromkeys(word.partition("=")[0] for word in arguments if word.startswith("--"))
    misplaced = [flag for flag in flags if flag in flags_by_name(parser) and flag not in text]
    if misplaced:
        are, they = ("is", "it") if len(misplaced) == 1 else ("are", "them")
        complain(
            f"{listing(misplaced)} {are} passed to {script}, whose name comes before {they}; "
            f"options of `{options.prog}` stand before the script."
        )


def add_machine(parser: argparse.ArgumentParser, device: str, clock: str = "measured") -> None:
    """Options for the machine. `device` and `clock` are the defaults of `--on` and `--clock`."""
    parser.add_argument(
        "--on",
        metavar="DEVICE",
        default=device,
        help="a virtual GPU: h200, h100, a100, b200, l4, rtx4090, or a .toml file "
        f"(default: {'the real GPU where there is one, else h200' if device == 'auto' else device})",
    )
    parser.add_argument(
        "--gpus", type=whole_number("GPUs", MOST_RANKS), metavar="N", default=1, help="how many of them (default 1)"
    )
    parser.add_argument(
        "--ranks",
        type=whole_number("GPUs", 1 << 20),
        metavar="N",
        default=1,
        help="run N ranks, a GPU each, through torchrun",
    )
    parser.add_argument(
        "--values",
        choices=("real", "none"),
        default="real",
        help="none: compute nothing and touch no memory, so that large models run too; what is read is zero",
    )
    parser.add_argument(
        "--clock",
        choices=("measured", "modelled"),
        default=clock,
        help="whether the host takes the time it really takes, or a modelled one that is the same in every run",
    )
    parser.add_argument(
        "--clocks",
        choices=("virtual", "real"),
        default="virtual",
        help="what the program's own clocks (time.time, perf_counter, timeit) show on a virtual GPU: "
        "the time of the report, or the real one",
    )


def handed_on(
    options: argparse.Namespace, add_arguments: Callable[[argparse.ArgumentParser], None], names: Iterable[str]
) -> list[str]:
    """Options that differ from their defaults, as arguments for another `keepbusy run`."""
    parser, arguments = argparse.ArgumentParser(), list[str]()
    add_arguments(parser)
    for name in names:
        value = getattr(options, name)
        if value != parser.get_default(name):
            text = [] if value is True else [",".join(value) if isinstance(value, tuple) else str(value)]
            arguments += [f"--{name.replace('_', '-')}", *text]
    return arguments


# Files of the command line as a timeline: traces, a folder of them, or a saved run

SAVED = ".busy"
Progress: TypeAlias = Callable[[str, float], None]
READ = 0.5
"""Reading a long trace is so much of the work of explaining it."""


def part(on_progress: Progress | None, begin: float, end: float) -> Progress | None:
    """The progress of a part of the work, as a share of all of it."""
    return on_progress and (lambda text, share: on_progress(text, begin + share * (end - begin)))


def open_timeline(paths: Sequence[Path], on_progress: Progress | None, each: EachOf | None = None) -> Timeline:
    """Load a saved run, or read the traces of all ranks of one run."""
    saved = [path for path in paths if path.suffix == SAVED]
    if not saved:
        from keepbusy.traces import read

        return read(paths, on_progress, each)
    if len(paths) > 1:
        raise BadInput(
            f"{saved[0]} is a whole saved run, but {len(paths)} files were given; "
            "give it alone, or compare two runs with `keepbusy compare`."
        )
    from keepbusy.timeline.busy_file import load

    return load(saved[0])


def expand(arguments: Iterable[str]) -> list[Path]:
    """The named files, each once: those of a folder are its traces, those of a quoted pattern what it matches."""
    paths = [path for argument in arguments for path in _files_of(argument)]
    if not paths:
        raise BadInput("no file was named; give a trace, a folder of traces or a saved run.busy.")
    return list({path.resolve(): path for path in reversed(paths)}.values())[::-1]


def _files_of(argument: str) -> list[Path]:
    path = Path(argument)
    if path.is_dir():
        files = sorted(path.iterdir())
        for endings in ((".trace.json", ".trace.json.gz"), (".json", ".json.gz")):
            if traces := [file for file in files if file.name.endswith(endings) and file.is_file()]:
                return traces
        if dumps := flight_dumps(files):
            return dumps
        raise BadInput(f"{path}: this folder holds no traces (*.trace.json or *.trace.json.gz).")
    if path.exists():
        return [path]
    if matching := matches(argument):
        return matching
    raise BadInput(f"{argument}: there is no such file or folder.")


def matches(pattern: str) -> list[Path]:
    """The files that a pattern of the shell matches."""
    if not set(pattern) & set("*?["):
        return []
    anchor = Path(pattern).anchor
    return sorted(Path(anchor).glob(str(Path(pattern).relative_to(anchor))))


def flight_dumps(paths: Iterable[Path]) -> list[Path]:
    """The files among these that PyTorch's flight recorder wrote."""
    from keepbusy.hang.flight_recorder import is_dump

    return [path for path in paths if path.is_file() and path.suffix != SAVED and is_dump(path)]


@contextmanager
def no_garbage_search() -> Iterator[None]:
    """Turn garbage collection off: reading a trace makes no cycles, and the search would take a tenth of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def progress(quiet: bool = False) -> Iterator[Progress | None]:
    """A progress bar, or None if standard error is no terminal."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    with Bar(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
        transient=True,
        console=Console(stderr=True),
    ) as bar:
        task = bar.add_task("", total=1.0)
        yield lambda text, share: bar.update(task, description=text, completed=share)


# Reports, pages and saved runs


def fixing(verb: str, diagnosis: Diagnosis) -> str:
    """The command that applies the plan: `run --fix` in memory, `fix` in the source. "" if the run cannot be repeated,
    or if the verb can make none of these fixes."""
    command = diagnosis.command
    if not command and len(diagnosis.sources) == 1 and diagnosis.sources[0].endswith(".py"):
        ranks = ("--ranks", str(len(diagnosis.given))) if len(diagnosis.given) > 1 else ()
        command = (*ranks, *diagnosis.sources)  # recorded by the program itself, or by an older version
    return f"keepbusy {verb} {shlex.join(command)}" if command and _changes_sources(verb, diagnosis) else ""


def _changes_sources(verb: str, diagnosis: Diagnosis) -> bool:
    """True if the verb makes a fix of the plan that changes the existing sources, or may do so (without LibCST)."""
    from keepbusy.fixes import is_made_in_memory, is_written

    can_make = is_written if verb == "fix" else is_made_in_memory
    plan = [planned for planned in diagnosis.plan if can_make(planned.fix)]
    if find_spec("libcst") is None or not plan:
        return bool(plan)
    from keepbusy.fix.source.from_plan import changes

    loops = diagnosis.loop, *(planned.loop for planned in plan if planned.loop)
    with where_it_ran(diagnosis):
        return any(changes(planned, loops, in_memory=verb == "run --fix") for planned in plan)


def where_it_ran(diagnosis: Diagnosis | KeptPlan) -> AbstractContextManager[None]:
    """Change into the folder that the places of a run are relative to, unless it does not exist on this machine."""
    exists = bool(diagnosis.folder) and Path(diagnosis.folder).is_dir()
    return chdir(diagnosis.folder) if exists else nullcontext()


def rendered(diagnosis: Diagnosis, options: argparse.Namespace, commands: Commands, shape: Screen | None = None) -> str:
    from keepbusy.report import as_json, terminal, turn_drawing, verdict

    shape = shape or screen()
    width, style = shape.width, {"colour": shape.colour, "unicode": shape.unicode}
    with where_it_ran(diagnosis):
        if options.json:
            return as_json.render(diagnosis)
        if options.full:
            text = terminal.render_full(diagnosis, width, commands=commands, wrap=shape.is_terminal, **style)
        else:
            text = verdict.render(diagnosis, commands, width, **style)
        if options.timeline:
            text = f"{text}\n\n{turn_drawing.render(diagnosis, width, **style)}"
        return text


def rendered_fixed(diagnosis: Diagnosis, fixed: list[str], commands: Commands, shape: Screen) -> str:
    from keepbusy.report import verdict

    return verdict.render_fixed(diagnosis, fixed, commands, shape.width, colour=shape.colour, unicode=shape.unicode)


def rendered_comparison(comparison: Comparison, json: bool, shape: Screen | None = None) -> str:
    from keepbusy.report import as_json, terminal

    shape = shape or screen()
    with where_it_ran(comparison.after):
        if json:
            return as_json.render_comparison(comparison)
        style = {"colour": shape.colour, "unicode": shape.unicode, "wrap": shape.is_terminal}
        return terminal.render_comparison(comparison, shape.width, **style)


def write_page(diagnosis: Diagnosis, path: Path, source: str) -> None:
    """Write the page of a run. `source` is the run's name on it."""
    from keepbusy.report import page

    with where_it_ran(diagnosis):
        text = page.render(diagnosis, source)
    write_whole(path, text)


def write_comparison(comparison: Comparison, path: Path, before: str, after: str) -> None:
    """Write the page of two runs, with the names that the user gave."""
    from keepbusy.report import page

    with where_it_ran(comparison.after):
        text = page.render_both(comparison, Path(before).name, Path(after).name)
    write_whole(path, text)


def check_name(path: Path) -> None:
    if path.suffix != SAVED:
        raise BadInput(f"--save {path}: a saved run is named *{SAVED}, so that it is known again.")
    check_place(path)


def save(timeline: Timeline, plain_step: int | None, path: Path) -> None:
    from keepbusy.timeline import busy_file

    if plain_step is not None:
        timeline = timeline.change_facts(plain_step=plain_step)
    busy_file.save(timeline, path)
