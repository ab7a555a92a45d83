"""What reaches a person when the input is at fault."""


class BadInput(ValueError):
    """One sentence: what was found, what was expected and what to do. The CLI prints it and exits with 2."""
