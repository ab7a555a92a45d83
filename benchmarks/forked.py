"""A measurement in a process of its own, without the seconds that it takes to import PyTorch."""

import json
import os
import traceback
from collections.abc import Callable
from typing import Any


def forked(act: Callable[[], Any]) -> Any:
    """What `act` returns, as JSON. CUDA must not have been begun here: it does not outlive a fork."""
    out, told = os.pipe()
    child = os.fork()
    if not child:
        _tell(told, act)
    os.close(told)
    with os.fdopen(out) as said:
        text = said.read()
    os.waitpid(child, 0)
    if not text:
        raise RuntimeError("a measurement in a process of its own failed; it said why on standard error")
    return json.loads(text)


def _tell(told: int, act: Callable[[], Any]) -> None:
    try:
        os.write(told, json.dumps(act()).encode())
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)
