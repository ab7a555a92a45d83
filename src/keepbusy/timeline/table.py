"""Columns of equal length: what a timeline is made of, in place of an object a span."""

from __future__ import annotations

from dataclasses import field, fields, replace
from typing import Any, Self

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

NONE = -1
"""No row, no lane, no frame: what an index column holds when there is nothing to point to."""
_ONE_VALUE = (0,)
"""The strides of a column that holds the same number everywhere, and takes no memory for it."""


def sorted_once(numbers: Ints) -> Ints:
    """In order, each number once; `np.unique` hashes them first, which takes many times as long where most differ."""
    ordered = np.sort(numbers)
    return ordered[np.append(True, ordered[1:] != ordered[:-1])[: len(ordered)]]


class Table:
    """Columns of equal length. Subclasses are frozen dataclasses whose fields are numpy arrays."""

    def __post_init__(self) -> None:
        for one in fields(self):  # type: ignore[arg-type]
            column = np.asarray(getattr(self, one.name), dtype=one.metadata["dtype"])
            if column.strides != _ONE_VALUE:
                column = np.ascontiguousarray(column)
            if column.flags.writeable:
                column = column.view()
                column.flags.writeable = False
            object.__setattr__(self, one.name, column)

    def __setstate__(self, columns: dict[str, npt.NDArray[Any]]) -> None:
        """From a pickle, where columns are writable again."""
        self.__dict__.update(columns)
        self.__post_init__()

    def __len__(self) -> int:
        return len(getattr(self, fields(self)[0].name))  # type: ignore[arg-type]

    def columns(self) -> dict[str, npt.NDArray[Any]]:
        return {one.name: getattr(self, one.name) for one in fields(self)}  # type: ignore[arg-type]

    def take(self, rows: npt.NDArray[Any] | slice) -> Self:
        """The rows of these numbers, or those that a mask chooses."""
        if isinstance(rows, np.ndarray) and rows.dtype == np.bool_:
            rows = np.flatnonzero(rows)
        return type(self)(**{name: column[rows] for name, column in self.columns().items()})

    def change(self, **columns: npt.NDArray[Any]) -> Self:
        return replace(self, **columns)  # type: ignore[type-var]

    def numbering(self) -> list[tuple[str, str, int]]:
        """Columns that number rows of a table: the name, of which one, and what stands where there is none."""
        about = [(one.name, one.metadata) for one in fields(self)]  # type: ignore[arg-type]
        return [(name, meta["of"], meta["fill"]) for name, meta in about if meta["of"]]

    def renumbered(self, **new: Ints) -> Self:
        """The same where rows of these tables have new numbers; what is less than 0 stays."""
        columns = {name: (getattr(self, name), new[of]) for name, of, _ in self.numbering() if of in new}
        return self.change(
            **{name: np.where(old < 0, old, np.append(number, NONE)[old]) for name, (old, number) in columns.items()}
        )

    @classmethod
    def concatenate(cls, parts: list[Self]) -> Self:
        names = [one.name for one in fields(cls)]  # type: ignore[arg-type]
        return cls(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})

    @classmethod
    def of(cls, length: int, **columns: npt.ArrayLike) -> Self:
        """A table of `length` rows. Columns that are not given hold their default, once in memory."""
        filled = {}
        for one in fields(cls):  # type: ignore[arg-type]
            value = np.asarray(columns.pop(one.name, one.metadata["fill"]), dtype=one.metadata["dtype"])
            filled[one.name] = np.broadcast_to(value, length) if value.ndim == 0 else value
        if columns:
            raise TypeError(f"{cls.__name__} has no column {', '.join(columns)}")
        return cls(**filled)


def column(dtype: type, fill: int = 0, of: str = "") -> Any:
    """A column of a `Table`: its type, what stands where nothing was given, and of which table it numbers rows."""
    return field(metadata={"dtype": dtype, "fill": fill, "of": of})
