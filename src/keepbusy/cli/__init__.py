"""The command line: `keepbusy VERB …`. One file a verb; what a verb returns is what it prints."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

from keepbusy import __version__
from keepbusy.cli.console import output
from keepbusy.cli.console.output import HUNG_UP, complain, sentence_of
from keepbusy.timeline.files import BadInput

FINE, BAD_INPUT, OWN_FAULT, INTERRUPTED = 0, 2, 3, 130
VERBS = {
    "explain": "which line makes the GPU wait, and what fixing it gains",
    "run": "run a program and explain the run: on the GPU there is, or else on a virtual one",
    "show": "a page to look at, and to send",
    "fix": "try the fixes of a program's plan, and show those that hold as a diff",
    "check": "fail where Python waits for the GPU too often, on a machine without one",
    "compare": "what changed between two runs, cause by cause",
    "plan": "which layout of a model over many GPUs is fastest and fits, before they are rented",
    "export": "write a run for Perfetto, or as JSON or CSV",
    "doctor": "measure what this machine can do, and find settings that harm",
    "completion": "complete verbs and options in bash, zsh or fish",
    "learn": "read the course: how GPUs work and wait, in programs that need none",
}
"""Each is a file here, which is imported once its verb is called: it holds `add_arguments`, `run` and EXAMPLES."""
DESCRIPTION = "Which line of a PyTorch program makes the GPU wait, and what fixing it gains."
EXAMPLES = """\
to begin with:
  keepbusy run train.py                     run a program, and explain the run
  keepbusy explain rank*.trace.json.gz      explain a trace of PyTorch's profiler
  keepbusy doctor                           what this machine can do, and which settings harm

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
        given = sys.argv[1:] if arguments is None else arguments
        parser = _parser(given)
        if not given:
            output.show((parser.format_help(),))
            return FINE
        options = parser.parse_args(given)
        output.show(options.run(options))
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        return HUNG_UP
    except Exception as error:
        complain(sentence_of(error))
        return BAD_INPUT if isinstance(error, BadInput | OSError) else OWN_FAULT
    return FINE


class _Parser(argparse.ArgumentParser):
    """Speaks in one sentence, like everything else here."""

    def error(self, message: str) -> NoReturn:
        raise BadInput(f"{message}. `{self.prog} --help` shows how it goes.")


def _parser(given: Sequence[str]) -> argparse.ArgumentParser:
    """Of all verbs by name; of the one that is called, with what it takes."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = _Parser(prog="keepbusy", description=DESCRIPTION, epilog=EXAMPLES, formatter_class=raw, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"keepbusy {__version__}")
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
    called = next((word for word in given if not word.startswith("-")), None)
    for name, summary in VERBS.items():
        one = verbs.add_parser(name, help=summary, formatter_class=raw, allow_abbrev=False)
        if name == called:
            verb = import_module(f"keepbusy.cli.{name}")
            one.description, one.epilog = verb.__doc__, verb.EXAMPLES
            verb.add_arguments(one)
            one.set_defaults(run=verb.run)
    return parser
