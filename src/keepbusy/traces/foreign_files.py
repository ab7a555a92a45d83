"""Files that people take for a trace of PyTorch's profiler: what they are, and what to do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from keepbusy.timeline.errors import BadInput

RECORD = "record with torch.profiler.profile(...) and give what its export_chrome_trace writes"
_BEGINNINGS = (
    (b"version https://git-lfs", "the pointer that Git LFS leaves in place of a file", "fetch the file: git lfs pull"),
    (b"PK\x03\x04", "a zip archive", "unpack it and give the .json or .json.gz within"),
    (b"SQLite format 3", "an SQLite database, as `nsys export` writes it", RECORD),
    (b"\x28\xb5\x2f\xfd", "compressed with zstd", "unpack it and give the .json"),
    (b"BZh", "compressed with bzip2", "unpack it and give the .json"),
    (b"\xfd7zXZ", "compressed with xz", "unpack it and give the .json"),
    (b"\x89busy", "a run that keepbusy saved", "load it, or let its name end in .busy"),
)
_AUTOGRAD = {"CPU functions", "CUDA functions"}
"""The processes of the autograd profiler."""


def refuse_by_beginning(path: str, block: bytes) -> None:
    for beginning, what, advice in _BEGINNINGS:
        if block.startswith(beginning):
            raise BadInput(f"{path} is {what}; {advice}.")


def refuse_lines(path: str) -> None:
    raise BadInput(
        f"{path} holds a JSON object a line, as `nsys export --type jsonlines` and logs do, not a trace; {RECORD}."
    )


def refuse_by_content(path: str, facts: Mapping[str, Any], kinds: Iterable[tuple[str, str]]) -> None:
    """`facts`: what stands beside the events; `kinds`: categories and processes of events, none of PyTorch's."""
    kinds = set(kinds)
    about = facts.get("metadata")
    if {process for _, process in kinds} & _AUTOGRAD:
        raise BadInput(
            f"{path} is of the autograd profiler, which does not tell which call launched which kernel; {RECORD}."
        )
    if isinstance(about, dict) and "highres-ticks" in about:
        raise BadInput(f"{path} is of the profiler of JAX and TensorFlow; keepbusy reads PyTorch's: {RECORD}.")
    categories = sorted({category for category, _ in kinds if category})
    if categories:
        raise BadInput(
            f"{path} is of another profiler (its categories: {', '.join(categories[:5])}); "
            f"keepbusy reads PyTorch's: {RECORD}."
        )
