"""The command line: `keepbusy VERB …`. One file a verb; what a verb returns is what it prints."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

from keepbusy import __version__
from keepbusy.cli import compare, doctor, explain, export, run
from keepbusy.cli.output import HUNG_UP, show
from keepbusy.timeline.errors import BadInput

FINE, BAD_INPUT, OWN_FAULT, INTERRUPTED = 0, 2, 3, 130
ISSUES = "the issue tracker of keepbusy"
DESCRIPTION = "Which line of a PyTorch program makes the GPU wait, and what fixing it gains."
EXAMPLES = """\
examples:
  keepbusy explain rank*.trace.json.gz --plain-step 25.0 --save run.busy
  keepbusy explain run.busy --what-if host_sync,blocking_copy
  keepbusy compare before.busy after.busy
  keepbusy export run.busy --to perfetto -o run.json.gz

exit codes: 0 fine, 2 something was wrong with the input, 3 a bug of keepbusy
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb; return the exit code."""
    try:
        options = _parser().parse_args(arguments)
        show(options.run(options))
    except BadInput as error:
        return _complain(str(error), BAD_INPUT)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        return HUNG_UP
    except OSError as error:
        return _complain(_sentence(error), BAD_INPUT)
    except Exception as error:  # the last line of defence: no user should have to read a traceback
        return _own_fault(error)
    return FINE


class _Parser(argparse.ArgumentParser):
    """Speaks in one sentence, like everything else here."""

    def error(self, message: str) -> NoReturn:
        raise BadInput(f"{message}. `{self.prog} --help` shows how it goes.")


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = _Parser(prog="keepbusy", description=DESCRIPTION, epilog=EXAMPLES, formatter_class=raw, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"keepbusy {__version__}")
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
    for verb in (explain, run, compare, export, doctor):
        name = verb.__name__.rpartition(".")[2]
        one = verbs.add_parser(
            name,
            help=verb.SUMMARY,
            description=verb.__doc__,
            epilog=verb.EXAMPLES,
            formatter_class=raw,
            allow_abbrev=False,
        )
        verb.add_arguments(one)
        one.set_defaults(run=verb.run)
    return parser


def _complain(sentence: str, code: int) -> int:
    """One line on stderr, whatever stands in it."""
    line = "".join(letter if letter.isprintable() else "�" for letter in " ".join(sentence.split()))
    encoding = sys.stderr.encoding or "utf-8"
    sys.stderr.write(f"keepbusy: {line}\n".encode(encoding, "replace").decode(encoding))
    return code


def _sentence(error: OSError) -> str:
    what = error.strerror or type(error).__name__
    return f"{error.filename}: {what}." if error.filename else f"{what}."


def _own_fault(error: Exception) -> int:
    if os.environ.get("KEEPBUSY_DEBUG") == "1":
        traceback.print_exception(error)
    what = f"{type(error).__name__}: {error}"[:200]
    return _complain(
        f"this is a bug of keepbusy {__version__}, not of your input ({what}). Please report it at {ISSUES}; "
        "KEEPBUSY_DEBUG=1 shows the traceback to put into the report.",
        OWN_FAULT,
    )
