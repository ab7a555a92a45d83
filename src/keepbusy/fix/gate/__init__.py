"""How often a program waits for the GPU, held against how often it may: while it runs, and in a run that is kept."""

SYNC, BLOCKING_COPY = "sync", "blocking copy"
PLURALS = {SYNC: "syncs", BLOCKING_COPY: "blocking copies"}


def several(count: int, kind: str) -> str:
    return f"{count} {kind if count == 1 else PLURALS[kind]}"
