"""Write what makes a shell complete keepbusy's verbs, options and their values: for bash, zsh or fish."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import NamedTuple

from keepbusy.cli import VERBS, fixable
from keepbusy.torch_names.cpython import read_flags

EXAMPLES = """\
examples:
  keepbusy completion bash >> ~/.bash_completion
  keepbusy completion zsh > ~/.zfunc/_keepbusy      that folder stands in fpath, before compinit
  keepbusy completion fish > ~/.config/fish/completions/keepbusy.fish
"""


class Flag(NamedTuple):
    """An option of a verb: its names, its values (None if it takes none, empty for a file), and its help."""

    names: Sequence[str]
    values: Sequence[str] | None
    help: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=tuple(_WRITERS), help="the shell")


def run(options: argparse.Namespace) -> Iterator[str]:
    """Written from the parsers themselves, so that the completion is never out of date."""
    flags = {verb: list(_flags(verb)) for verb in VERBS}
    return (f"{line}\n" for line in _WRITERS[options.shell](VERBS, flags))


def _flags(verb: str) -> Iterator[Flag]:
    parser = argparse.ArgumentParser()
    import_module(f"keepbusy.cli.{verb}").add_arguments(parser)
    for action in read_flags(parser):
        if action.option_strings and action.help != argparse.SUPPRESS:
            values = None if action.nargs == 0 else list(action.choices or _values(action.metavar))
            yield Flag(action.option_strings, values, action.help or "")


def _values(metavar: object) -> Sequence[str]:
    """The values of an option; empty if it takes a file or free text."""
    if metavar == "DEVICE":
        from keepbusy.virtual.costs import device

        return device.names()
    return fixable() if metavar == "CAUSES" else ()


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def _bash(verbs: Mapping[str, str], flags: Mapping[str, list[Flag]]) -> Iterator[str]:
    yield "# keepbusy completion bash"
    yield "_keepbusy() {"
    yield "    local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD - 1]} verb=${COMP_WORDS[1]} known="
    yield "    COMPREPLY=()"
    yield f'    if [ "$COMP_CWORD" = 1 ]; then known="{" ".join(verbs)} --help --version"'
    yield '    else case "$verb $before" in'
    for verb, verb_flags in flags.items():
        for flag in verb_flags:
            if flag.values:
                cases = "|".join(_quoted(f"{verb} {name}") for name in flag.names)
                yield f'    {cases}) known="{" ".join(flag.values)}" ;;'
    yield '    *) [[ $word == -* ]] && case "$verb" in'
    for verb, verb_flags in flags.items():
        yield f'        {verb}) known="{" ".join(name for flag in verb_flags for name in flag.names)}" ;;'
    yield "        esac ;;"
    yield "    esac fi"
    yield '    [ -n "$known" ] && COMPREPLY=($(compgen -W "$known" -- "$word"))'
    yield "}"
    yield "complete -o default -F _keepbusy keepbusy"


def _zsh(verbs: Mapping[str, str], flags: Mapping[str, list[Flag]]) -> Iterator[str]:
    yield "#compdef keepbusy"
    yield "if (( CURRENT == 2 )); then"
    yield f"    local -a verbs=({' '.join(_quoted(f'{verb}:{summary}') for verb, summary in verbs.items())})"
    yield "    _describe verb verbs"
    yield "    return"
    yield "fi"
    yield "local verb=$words[2]"
    yield "shift words; (( CURRENT-- ))"
    yield "case $verb in"
    for verb, verb_flags in flags.items():
        specs = [_quoted(_zsh_spec(name, flag)) for flag in verb_flags for name in flag.names]
        yield f"{verb}) _arguments {' '.join(specs)} '*:file:_files' ;;"
    yield "esac"


def _zsh_spec(name: str, flag: Flag) -> str:
    help_text = "".join(f"\\{letter}" if letter in "[]:\\" else letter for letter in flag.help)
    if flag.values is None:
        return f"{name}[{help_text}]"
    return f"{name}[{help_text}]:{name.lstrip('-')}:" + (f"({' '.join(flag.values)})" if flag.values else "_files")


def _fish(verbs: Mapping[str, str], flags: Mapping[str, list[Flag]]) -> Iterator[str]:
    yield "# keepbusy completion fish"
    for verb, summary in verbs.items():
        yield f"complete -c keepbusy -n __fish_use_subcommand -f -a {verb} -d {_fish_quoted(summary)}"
    for verb, verb_flags in flags.items():
        where = f"-n '__fish_seen_subcommand_from {verb}'"
        for flag in verb_flags:
            names = " ".join(f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in flag.names)
            takes = "" if flag.values is None else " -r"
            if flag.values:
                takes = f" -x -a {_fish_quoted(' '.join(flag.values))}"
            yield f"complete -c keepbusy {where} {names}{takes} -d {_fish_quoted(flag.help)}"


def _fish_quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


_WRITERS = {"bash": _bash, "zsh": _zsh, "fish": _fish}
