"""Pickles of lists, dicts, strings and numbers, read without being able to do anything else.

Python's own reader runs what a pickle names. Of its instructions this one knows only those that build plain values; any
other refuses the file.
"""

from __future__ import annotations

import pickle
import struct
from io import BytesIO
from typing import Any

MAGIC = pickle.PROTO
_KNOWN = b"".join(
    (
        *(pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.MARK, pickle.MEMOIZE),
        *(pickle.BINPUT, pickle.LONG_BINPUT, pickle.BINGET, pickle.LONG_BINGET),
        *(pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.BININT, pickle.BININT1, pickle.BININT2),
        *(pickle.LONG1, pickle.BINFLOAT, pickle.SHORT_BINUNICODE, pickle.BINUNICODE, pickle.BINUNICODE8),
        *(pickle.EMPTY_LIST, pickle.APPEND, pickle.APPENDS, pickle.EMPTY_DICT, pickle.SETITEM, pickle.SETITEMS),
        *(pickle.EMPTY_TUPLE, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3),
    )
)


class _PlainUnpickler(pickle._Unpickler):  # the one in Python: that in C can be given no other instructions
    dispatch = {code: pickle._Unpickler.dispatch[code] for code in _KNOWN}  # noqa: RUF012 -- as Python names it


def loads(data: bytes) -> Any:
    """The value; ValueError for anything that is no plain one."""
    try:
        return _PlainUnpickler(BytesIO(data)).load()
    except KeyError as error:
        raise ValueError(f"it has instruction {error}, which plain values do not need") from None
    except (pickle.UnpicklingError, EOFError, IndexError, TypeError, AttributeError, struct.error) as error:
        raise ValueError(f"damaged ({type(error).__name__})") from None
