"""What users read is plain English: short sentences, and the words that PyTorch's documentation uses."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from keepbusy.fixes import FIXES

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "src" / "keepbusy").rglob("*.py"))
DOCUMENTS = sorted(
    path
    for path in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").glob("*.md"))
    if path.name != "design.md"
)
LONGEST = 25
"""Words of a sentence at most."""
AVOIDED = {
    "iteration": r"\b(?:a|each|every|per|the|of|this|one|whole|first|last|slow|plain|rare|its) turns?\b|\d turns?\b",
    "predicted": r"\bforetold\b|\bforetells?\b",
    "measured": r"\bwhat came\b|\bcame of\b|\bas it came\b",
    "is idle": r"\bstands idle\b|\bnothing to do\b",
    "saves, faster": r"\bgains?\b(?! access)|\btakes? less\b|% less\b",
    "asynchronously, in the background": r"\btravels?\b|\btravelled\b",
    "stack, thread, stream": r"(?<!PCIe )\blanes?\b",
    "instead of": r"\bin place of\b",
}
"""By the word to use: what nobody says to a colleague."""
EMPTY_NAMES = {"one", "told", "mine", "ours", "theirs", "met", "came", "here"}
"""Of variables, functions and attributes."""
WORD = "word"
"""What a value that is filled in counts as."""


def messages_in(path: Path) -> Iterator[tuple[int, str]]:
    """Texts in a source that read like prose, without docstrings: those of verbs are their help, and stay."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    skipped = set[int]()
    for node in ast.walk(tree):
        if isinstance(node, documented) and not (isinstance(node, ast.Module) and path.parent.name == "cli"):
            skipped |= {id(one) for one in ast.walk(node.body[0])} if ast.get_docstring(node) is not None else set()
        for body in (getattr(node, name, []) for name in ("body", "orelse", "finalbody")):
            for before, after in pairwise(body) if isinstance(body, list) else ():
                if isinstance(before, ast.Assign | ast.AnnAssign) and isinstance(after, ast.Expr):
                    skipped |= {id(one) for one in ast.walk(after.value)}  # what documents a constant
        if isinstance(node, ast.JoinedStr):
            skipped |= {id(one) for one in node.values}
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.JoinedStr):
            yield node.lineno, "".join(_part(part) for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def _part(part: ast.expr) -> str:
    return part.value if isinstance(part, ast.Constant) and isinstance(part.value, str) else WORD


def reads_like_prose(text: str) -> bool:
    """Code and regular expressions do not."""
    code = r"[{}]|\w\|\w|^\s*(?:import|def|for|with) "
    return len(re.findall(r"\b[a-z]{2,}\b", text)) >= 4 and not re.search(code, text)


def sentences_of(text: str) -> list[str]:
    """Also each row and column of a list of commands or names: columns have two spaces between them."""
    ends = r"(?<=[.!?:;])\s+|\n\s*\n|\n(?=\s*[-*|#])|\n(?=\S+ {2,}\S)|\n? {2,}"
    return [part for part in re.split(ends, text) if part.strip()]


def too_long(text: str) -> list[str]:
    return [part for part in sentences_of(text) if len(re.findall(r"[A-Za-z]['\w.-]*", part)) > LONGEST]


def avoided_in(text: str) -> list[str]:
    prose = re.sub(r"`[^`]*`", "", text)
    return [f"{use!r} for {found!r}" for use, words in AVOIDED.items() for found in re.findall(words, prose, re.I)]


def advice() -> dict[str, str]:
    return {f"{fix.name} {number}": said.advice for fix in FIXES for number, said in enumerate(fix.advices())}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT / "src" / "keepbusy")))
def test_messages_are_short_and_in_plain_words(path: Path) -> None:
    texts = [(line, text) for line, text in messages_in(path) if reads_like_prose(text)]
    assert [(line, said) for line, text in texts for said in too_long(text)] == []
    assert [(line, said, text) for line, text in texts for said in avoided_in(text)] == []


def test_advice_is_short_and_in_plain_words() -> None:
    assert {name: said for name, text in advice().items() if (said := too_long(text) + avoided_in(text))} == {}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_documents_are_in_plain_words(path: Path) -> None:
    text = re.sub(r"```.*?```|<[^>]*>|\]\([^)]*\)", "", path.read_text(encoding="utf-8"), flags=re.S)
    assert avoided_in(text) == []


def test_variables_say_what_they_hold() -> None:
    bound = {
        f"{path.name}:{node.lineno} {name}"
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        for name in _bound_names(node) & EMPTY_NAMES
    }
    assert not bound


def _bound_names(node: ast.AST) -> set[str]:
    match node:
        case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name) | ast.Attribute(attr=name, ctx=ast.Store()):
            return {name}
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
            return {name}
    return set()


def test_the_readme_is_read_in_a_few_minutes() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 900


def test_a_sentence_of_26_words_and_an_old_word_are_found() -> None:
    assert too_long("word " * 26)
    assert not too_long("word " * 25)
    assert not too_long("\n".join(["name   what it is for"] * 9 + ["  program --option value  what that does"] * 9))
    assert avoided_in("A turn gains 3 ms.") == ["'iteration' for 'A turn'", "'saves, faster' for 'gains'"]
    assert avoided_in("`gains` is code. In turn, it returns.") == []


PAGE = sorted((ROOT / "page" / "src").rglob("*.ts"))
AVOIDED_ON_THE_PAGE = re.compile(r"\b(?:turns?|rounds?|lanes?|foretold|told|came|gains?|stands? idle|nothing to do)\b")


def texts_of_typescript(code: str) -> list[str]:
    """Strings and templates, also those within others. A value that is filled in counts as a word."""
    found, at = list[str](), 0
    while at < len(code):
        if code.startswith("//", at) and code[at - 1 : at] != "\\":
            at = code.find("\n", at)
            if at < 0:
                break
        elif code.startswith("/*", at):
            at = code.index("*/", at) + 2
        elif code[at] in "\"'`":
            text, at = _text_from(code, at, found)
            found.append(text)
        else:
            at += 1
    return found


def _text_from(code: str, at: int, found: list[str]) -> tuple[str, int]:
    """The text that begins here, and where it ends."""
    quote, text, at = code[at], "", at + 1
    while code[at] != quote:
        if quote == "`" and code.startswith("${", at):
            end, depth = at + 2, 1
            while depth:
                if code[end] in "\"'`":
                    inner, end = _text_from(code, end, found)
                    found.append(inner)
                    continue
                depth += {"{": 1, "}": -1}.get(code[end], 0)
                end += 1
            text, at = text + WORD, end
        else:
            step = 2 if code[at] == "\\" else 1
            text, at = text + code[at : at + step], at + step
    return text, at + 1


@pytest.mark.parametrize("path", PAGE, ids=lambda path: path.name)
def test_the_page_is_in_short_and_plain_words(path: Path) -> None:
    texts = [text for text in texts_of_typescript(path.read_text(encoding="utf-8")) if len(text.split()) >= 3]
    assert [said for text in texts for said in too_long(text)] == []
    assert [(text, said) for text in texts for said in avoided_in(text)] == []
    assert [text for text in texts if AVOIDED_ON_THE_PAGE.search(text)] == []


def test_texts_of_the_page_are_found_also_within_others() -> None:
    code = """const says = `one turn ${many ? `of ${count} turns` : "alone"} more`; // "no text"\n f('a b')"""
    assert texts_of_typescript(code) == ["of word turns", "alone", "one turn word more", "a b"]
