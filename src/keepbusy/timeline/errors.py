"""What reaches a person when the input is at fault."""

from __future__ import annotations


class BadInput(ValueError):  # noqa: N818  a person reads it as what it says
    """One sentence: what was found, what was expected and what to do. The CLI prints it and exits with 2."""
