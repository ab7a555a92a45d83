"""Run a PyTorch program, on the GPU there is or on a virtual one, and say which line makes it wait."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import keepbusy
from keepbusy.cli import (
    MOST_RANKS,
    add_machine,
    add_program,
    add_timeline,
    add_what_if,
    add_workers,
    check_name,
    check_place,
    fixing,
    handed_on,
    hint_at_own_options,
    line_of,
    listed,
    need_pytorch,
    program,
    program_in,
    rendered,
    rendered_comparison,
    rendered_fixed,
    save,
    sentence_of,
    where_it_ran,
    write_page,
)
from keepbusy.fix.source import rewritten_run
from keepbusy.program.lines import set_launcher, shown
from keepbusy.program.processes import follow_with, make_folder
from keepbusy.program.script import flush
from keepbusy.timeline import last_run
from keepbusy.timeline.files import BadInput
from keepbusy.timeline.run_facts import ran_nothing

if TYPE_CHECKING:
    from keepbusy.explain.diagnosis import Diagnosis
    from keepbusy.explain.kept_plan import KeptPlan
    from keepbusy.report.verdict import Commands
    from keepbusy.timeline.model import Timeline


EXAMPLES = """\
examples:
  keepbusy run train.py --epochs 1
  keepbusy run --on a100 --save run.busy train.py
  keepbusy run --clock modelled -m package.train --steps 20
  keepbusy run --ranks 4 train.py
  keepbusy run --against before.busy train.py
  keepbusy run -c "import torch; torch.ones(8, device='cuda').sum().item()"

The program runs as it is: its arguments, its output and its exit code are its own.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_machine(parser, "auto")
    parser.add_argument(
        "--alike",
        action="store_true",
        help="of these ranks run the first alone, for all that do the same as it: a laptop is enough for 512",
    )
    add_what_if(parser)
    add_workers(parser)
    parser.add_argument("--full", action="store_true", help="print the whole report, not only its first ten lines")
    add_timeline(parser)
    parser.add_argument(
        "--json", action="store_true", help="print JSON instead; what the program prints goes to stderr then"
    )
    parser.add_argument("--save", metavar="RUN.busy", type=Path, help="keep the run, to explain it again or compare it")
    parser.add_argument(
        "--against",
        metavar="BEFORE.busy",
        type=Path,
        help="after a fix: what that run predicted, and what this one measures",
    )
    parser.add_argument("--quiet", action="store_true", help="print no report: the run is kept by --save")
    parser.add_argument("--page", metavar="OUT.html", type=Path, help="draw the run on a page, to look at and to send")
    parser.add_argument(
        "--live", action="store_true", help="on a real GPU: show the loops so far and the worst line while it runs"
    )
    parser.add_argument(
        "--memory", action="store_true", help="on a real GPU: note what takes its memory, too; --page draws it"
    )
    parser.add_argument(
        "--fix",
        action="store_true",
        help="run the program with the fixes of its last run's plan, made in memory: no file changes",
    )
    parser.add_argument(
        "--without",
        type=listed,
        metavar="FIXES",
        default=(),
        help="leave these out: graph,prefetch,readback,... as the plan names them",
    )
    parser.add_argument(
        "--also",
        type=listed,
        metavar="FIXES",
        default=(),
        help="these, too, whose results may differ: fuse_optimizer,accumulate,keep_shapes,num_workers",
    )
    add_program(parser, "the program to run, unchanged, and its own arguments; - reads it from standard input")
    parser.add_argument("-c", dest="is_text", action="store_true", help="what follows is the program itself")


def run(options: argparse.Namespace) -> Sequence[str]:
    """Exits with the program's exit code if that is not 0."""
    options.began = time.time()
    set_launcher()
    options.text = _text(options)
    if options.text is None:
        options.script, options.arguments = program_in(options)
    _check_files(options)
    need_pytorch("`keepbusy run`")
    options.rewriting = _rewriting(options) if options.fix else None
    if options.fix:  # the report finds the program's loops in its code
        rewritten_run.compile_alike(options.rewriting)
    real = options.on == "auto" and program.is_possible()
    _refuse_contradictions(options, real)
    if options.ranks > 1 and not options.alike:
        if options.fix:
            os.environ[rewritten_run.FILE] = str(options.rewriting)
        sys.exit(program.launch(options.ranks, _command(options)))
    program.enter_meeting_place()  # before any rank ends: a folder that nobody has entered is stale
    if not options.quiet and program.rank() == 0:  # runs of other verbs are quiet
        if not options.fix:  # the next run with fixes takes its plan from the same one
            last_run.forget(_name_of_program(options))
        if options.text is None:
            hint_at_own_options(options, add_arguments)
    streams = program.StandardStreams()
    if real:
        program.run_supervised(
            options,
            streams,
            lambda: _program(options),
            lambda timeline: _report(timeline, options, streams),
            lambda timeline: keepbusy.explain(timeline, None, options.what_if, options.workers),
        )
    return _virtual(options, streams)


def _text(options: argparse.Namespace) -> str | bytes | None:
    """The program if it is no file: with `-c` an argument, with `-` standard input, as for Python."""
    first, *arguments = options.program
    if options.module or not (options.is_text or first == "-"):
        return None
    options.script, options.arguments = ("-c" if options.is_text else "-"), arguments
    if options.is_text:
        return str(first)
    if sys.stdin is None or sys.stdin.isatty():
        raise BadInput(
            "`keepbusy run -` reads the program from standard input, and nothing is piped into it; name a file."
        )
    if options.ranks > 1 and not options.alike:
        raise BadInput("each rank reads the program, and standard input can be read once; save it, and name the file.")
    return sys.stdin.buffer.read()


def _check_files(options: argparse.Namespace) -> None:
    """Check paths before the program runs, and make them absolute, since the program may change its folder."""
    if options.save:
        check_name(options.save)
        options.save_at = options.save.absolute()
    if options.page:
        check_place(options.page)
        options.page_at = options.page.absolute()
    options.before = None
    if options.against:
        from keepbusy.timeline.busy_file import load

        options.before = load(options.against)


def _refuse_contradictions(options: argparse.Namespace, real: bool) -> None:
    if options.live and not real:
        raise BadInput(
            "--live shows what a real GPU does while it does it, and this run has a virtual one; leave it out."
        )
    if options.alike and real:
        raise BadInput("--alike is for virtual GPUs: name one with --on, or give --ranks alone.")
    if options.ranks > MOST_RANKS and not options.alike:
        raise BadInput(f"--ranks {options.ranks} is more than one machine starts; if all do the same, add --alike.")


def _program(options: argparse.Namespace) -> int:
    from keepbusy.program import script

    if options.json:  # standard output is for the result alone, also in children and native code
        with suppress(OSError):
            os.dup2(2, 1)
    if "KEEPBUSY_CANDIDATE" in os.environ:  # `keepbusy fix` tries another source
        be_candidate()
        follow_with(be_candidate)
    if options.fix:
        be_rewritten(str(options.rewriting))
        follow_with(be_rewritten, path=str(options.rewriting))
    if options.text is not None:
        return script.run_text(options.text, options.arguments)
    return (script.run_module if options.module else script.run_file)(options.script, options.arguments)


def be_candidate() -> None:
    """Called in this process, and in those that the program spawns."""
    from keepbusy.fix.source import proof
    from keepbusy.virtual.machine import MACHINE

    proof.begin(MACHINE.peek, lambda: program.rank() if MACHINE.rank is None else MACHINE.rank)


def be_rewritten(path: str) -> None:
    """Called in this process, and in those that the program spawns."""
    rewritten_run.begin(Path(path), program.rank())


def _rewriting(options: argparse.Namespace) -> Path:
    """A file that says what the plan of the last run, or of `--against`, makes of the program's sources."""
    if given := os.environ.pop(rewritten_run.FILE, ""):
        return Path(given)
    if options.text is not None:
        raise BadInput(
            "--fix changes the program's file in memory, and this program is in none; save it, and name the file."
        )
    if find_spec("libcst") is None:
        raise BadInput("`keepbusy run --fix` needs LibCST: `pip install libcst`.")
    path = make_folder() / "rewriting.json"
    before = options.against or last_run.plan_of(_name_of_program(options))
    if before is None or not before.is_file():
        raise BadInput(
            f"--fix takes its plan from a recorded run of this program, and there is none; "
            f"record one first: `{_plainly(options)}`."
        )
    _aside(lambda: _rewrite(options, before, path))
    return path


def _name_of_program(options: argparse.Namespace) -> str:
    """What its plan is kept under, whatever its arguments are."""
    return f"{_current_folder()} -m {options.script}" if options.module else str(Path(options.script).resolve())


def _script_of(command: Sequence[str]) -> str:
    """The script of a recorded command, which follows the device and the number of ranks."""
    while command and command[0] in ("--on", "--ranks", "-m"):
        command = command[1 if command[0] == "-m" else 2 :]
    return command[0] if command else ""


def _plainly(options: argparse.Namespace) -> str:
    """The command that records the program as it is."""
    return shlex.join(["keepbusy", "run", *_to_run_again(options)])


def _aside(work: Callable[[], None]) -> None:
    """Work in a child process, so that the program does not find imported what the work imports."""
    flush()
    child = os.fork()
    if not child:
        try:
            work()
        except Exception as error:
            sys.stderr.write(line_of(sentence_of(error)))
            os._exit(2)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code:
        sys.exit(code)


def _rewrite(options: argparse.Namespace, before: Path, path: Path) -> None:
    from keepbusy.fix.source.from_plan import check_names, rewriting_of

    check_names(options.without, options.also)
    kept, command = _plan_of(options, before), _plainly(options)
    in_its_folder = _script_of(kept.command) == options.script and kept.folder == _current_folder()
    recorded = {Path(kept.folder, source).resolve() for source in kept.sources}
    if not in_its_folder and Path(options.script).resolve() not in recorded:
        other = shlex.join(kept.command or kept.sources) or "another program"
        raise BadInput(
            f"--fix takes its plan from a recorded run of this program, and {before.name} is one of `{other}`; "
            f"record one first: `{command}`."
        )
    with where_it_ran(kept):
        places = [place.file for fix in kept.plan for place in fix.where]
        places += [lines.file for fix in kept.plan for lines in fix.captured]
        files = {Path(file).resolve() for file in places if file.endswith(".py") and Path(file).is_file()}
        made = rewriting_of(kept, options.without, options.also)
    for file in sorted(files):
        if file.stat().st_mtime > before.stat().st_mtime:
            raise BadInput(
                f"{shown(str(file))} has changed since the run that --fix takes its plan from; "
                f"record it again: `{command}`."
            )
    made.save(path)


def plan_to_keep(diagnosis: Diagnosis) -> KeptPlan:
    """Its plan, of the fixes that the report lists."""
    from keepbusy.explain.kept_plan import KeptPlan
    from keepbusy.report.run_report import planned_rows

    return KeptPlan.of(replace(diagnosis, plan=tuple(row.fix for row in planned_rows(diagnosis))))


def _plan_of(options: argparse.Namespace, before: Path) -> KeptPlan:
    """The one that is kept, or what explaining the run gives that `--against` names."""
    from keepbusy.explain.kept_plan import KeptPlan

    if options.against:
        return plan_to_keep(keepbusy.explain(options.before, None, (), options.workers))
    try:
        return KeptPlan.of_json(before.read_text(encoding="utf-8"))
    except ValueError as error:
        raise BadInput(
            f"The plan of the last run cannot be read ({error}); record one: `{_plainly(options)}`."
        ) from None


def _virtual(options: argparse.Namespace, streams: program.StandardStreams) -> NoReturn:
    from keepbusy.program.processes import RunFolder
    from keepbusy.program.script import Ending, cut_short

    started_in = Path.cwd()
    timeline: Callable[..., Timeline] | None = None

    def finish() -> None:
        if timeline is None:  # it never began, and the reason has been reported
            return
        try:
            with suppress(OSError):
                os.chdir(started_in)  # the program's places are relative to it
            timeline_of_rank = timeline(source=options.script).change_facts(cut_short=cut_short(ending.signal))
            whole = timeline_of_rank if options.alike else program.gathered(timeline_of_rank)
            if whole is not None:
                _report(without_first_steps(whole), options, streams)
                # only on a terminal: the sentence has measured times, and the log of a CI job should not change
                is_watched = streams.complains_to_terminal and not options.quiet
                if is_watched and MACHINE.uncounted and (uncounted := MACHINE.uncounted.sentence()):
                    streams.complain(uncounted)
        except Exception as error:
            streams.complain(sentence_of(error))

    run_folder = RunFolder()  # created before `Ending`, so that it is removed after the report
    ending = Ending(finish, in_handler=False)
    # imported now: the exit handlers of what PyTorch imports, such as logging's, run before the report
    from keepbusy.timeline.steps import without_first_steps
    from keepbusy.virtual import virtual_run
    from keepbusy.virtual.clock.real_time import suggest_skipping_values
    from keepbusy.virtual.machine import MACHINE

    device = "h200" if options.on == "auto" else options.on
    if device.endswith(".toml"):
        device = str(Path(device).absolute())
    measured, real, clocks = options.clock == "measured", options.values == "real", options.clocks == "virtual"
    alike = options.ranks if options.alike else 1
    virtual_options = virtual_run.Options(device, program.devices(options.gpus), measured, real, clocks, alike)
    timeline = virtual_run.start(virtual_options, program.rank(), run_folder)
    over = threading.Event()
    if options.values == "real" and streams.complains_to_terminal and not options.quiet:
        suggest_skipping_values(MACHINE.clock.first_thread, streams.complain, over)
    try:
        code = _program(options)
    finally:
        over.set()
        MACHINE.end()
    sys.exit(ending.exit_code(code))


_HANDED_ON = (
    "on", "clock", "values", "clocks", "what_if", "workers", "full", "json", "live", "fix", "without", "also",
    "quiet", "memory", "against", "save", "page", "timeline",
)  # fmt: skip
"""Options that each rank gets, too."""


def _command(options: argparse.Namespace) -> list[str]:
    """The arguments that each rank is started with: these, without `--ranks`."""
    own = handed_on(options, add_arguments, _HANDED_ON)
    module = ["-m"] if options.module else []
    text = [options.text] if isinstance(options.text, str) else []
    return [*own, *module, options.script, *text, *options.arguments]


def _report(timeline: Timeline, options: argparse.Namespace, streams: program.StandardStreams) -> None:
    from keepbusy.report.verdict import fixed_lines

    folder = "" if options.fix else _current_folder()  # a run with fixes did not run the sources of the folder
    timeline = timeline.change_facts(command=_to_run_again(options), folder=folder)
    if options.save:
        save(timeline, None, options.save_at)
        os.utime(options.save_at, (options.began, options.began))  # sources that changed later can be recognized
    if not timeline.on_device.any() and timeline.facts.run is None:
        ended = timeline.facts.cut_short
        raise BadInput(
            f"{options.script} ended with {ended.by} before anything ran on the GPU."
            if ended is not None
            else ran_nothing(options.script, timeline.has_operators)
        )
    if options.quiet and not options.page:
        return
    is_drawn = options.page is not None or options.timeline
    diagnosis = keepbusy.explain(timeline, None, options.what_if, options.workers, turns=is_drawn)
    if options.page:
        write_page(diagnosis, options.page_at, Path(options.script).name)
    if options.quiet:
        return
    its_own = getattr(sys, "stdout", None)
    flush(sys.__stdout__, its_own if isinstance(its_own, TextIOWrapper) else None)
    # a run with fixes does not become the last run: its fixes are made by the plan of one without
    is_last = not options.fix and last_run.keep(
        timeline, options.began, plan_to_keep(diagnosis).as_json(), _name_of_program(options)
    )
    commands = _commands(options, diagnosis, is_last)
    fixed = list[str]()
    if options.fix:
        made = json.loads(options.rewriting.read_text(encoding="utf-8"))
        fixed = fixed_lines(made, rewritten_run.graphs_of(options.rewriting.parent), diagnosis)
    if fixed and not options.json and not options.full:
        text = rendered_fixed(diagnosis, fixed, commands, streams.screen)
    else:
        text = rendered(diagnosis, options, commands, streams.screen)
        if options.json:
            streams.note(*fixed)
        else:
            text = "\n".join([text, *[""] * bool(fixed), *fixed])
    if options.before is not None and not options.fix:
        text = _with_comparison(options, diagnosis, text, streams)
    streams.show("" if options.json else "\n", text, "\n")


def _any_fix_held(rewriting: Path) -> bool:
    """False if only graphs were made, and none of them was ever replayed."""
    made = json.loads(rewriting.read_text(encoding="utf-8"))
    graphs = [line for text in rewritten_run.graphs_of(rewriting.parent) for line in text.splitlines()]
    return {edit for edit, _ in made["written"]} != {"graph"} or any(": 0 replayed" not in line for line in graphs)


def _with_comparison(
    options: argparse.Namespace, after: Diagnosis, report: str, streams: program.StandardStreams
) -> str:
    """The report and the comparison with the run before; as JSON the comparison alone."""
    from keepbusy.explain.comparison import compare

    before = keepbusy.explain(options.before, None, (), options.workers)
    text = rendered_comparison(compare(before, after), options.json, streams.screen)
    return text if options.json else f"{report}\n\n{text}"


def _current_folder() -> str:
    with suppress(OSError):  # somebody may have removed it
        return str(Path.cwd())
    return ""


def _ranks() -> list[str]:
    return ["--ranks", str(program.world())] if program.world() > 1 else []


def _to_run_again(options: argparse.Namespace) -> tuple[str, ...]:
    """The arguments that repeat this run; none if the program is in no file."""
    device = ["--on", options.on] if options.on != "auto" else []
    script = [*(["-m"] if options.module else []), options.script, *options.arguments]
    return (*device, *_ranks(), *script) if options.text is None else ()


def _commands(options: argparse.Namespace, diagnosis: Diagnosis, is_last: bool) -> Commands:
    """The next commands. `is_last`: the run was kept as the last run, which verbs take if no file is named."""
    from keepbusy.report.verdict import Commands

    saved = [str(options.save)] if options.save else []
    can_show = bool(saved) or is_last
    return Commands(
        fix_now="" if options.fix else fixing("run --fix", diagnosis),
        write_fix=fixing("fix", diagnosis) if not options.fix or _any_fix_held(options.rewriting) else "",
        page=shlex.join(["keepbusy", "show", *saved]) if can_show else "",
        full=shlex.join(["keepbusy", "explain", *saved, "--full"])
        if can_show
        else shlex.join(["keepbusy", "run", "--full", *_ranks(), *_command(options)]),
    )
