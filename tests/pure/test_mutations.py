"""Two thousand and more damaged traces: each is explained or refused with one sentence, never with a traceback.

The damage is drawn from seeds, so a failure names the case that shows it again:
`explain_bytes(damaged("swapped", 17), path)`.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
from told import assert_sound
from traces import parts, small

from keepbusy.explain import explain
from keepbusy.explain.diagnosis import Diagnosis
from keepbusy.report.as_json import render
from keepbusy.timeline.files import BadInput
from keepbusy.traces import json_events, read

EACH = 25
"""Mutations a test; there are `SEEDS` tests of each kind."""
SEEDS = 14
TOKENS = [
    b'"',
    b"\\",
    b"{",
    b"}",
    b"[",
    b"]",
    b",",
    b":",
    b"\n",
    b"null",
    b"NaN",
    b"1e999",
    b"-",
    b"\xff",
    b"\\ud800",
    b"\0",
]
VALUES: list[Any] = [
    None,
    True,
    "",
    "x",
    "7",
    -1,
    0,
    2.5,
    1e30,
    2**31,
    2**53,
    2**63,
    -(2**63),
    2**70,
    [],
    [1],
    {},
    {"a": 1},
]


def explain_bytes(data: bytes, path: Path, plain: bool = True) -> Diagnosis | None:
    """What a person does with a file, and again with a plain step; None if it was refused."""
    path.write_bytes(data)
    try:
        timeline = read([path])
        diagnosis = explain(timeline)
        if plain:
            render(explain(timeline, plain_step=max(1, diagnosis.plain_step * 4 // 5), what_if=["host_sync"]))
    except BadInput as error:
        message = str(error)
        assert message.startswith(str(path)), message
        assert message.endswith("."), message
        assert "\n" not in message
        assert len(message) < 600
        return None
    render(diagnosis)
    return diagnosis


def flipped(text: bytes, random: Random) -> bytes:
    damaged = bytearray(text)
    for _ in range(random.choice([1, 2, 8])):
        damaged[random.randrange(len(text))] ^= 1 << random.randrange(8)
    return bytes(damaged)


def cut(text: bytes, random: Random) -> bytes:
    begin, end = sorted(random.randrange(len(text) + 1) for _ in range(2))
    return random.choice([text[:end], text[:begin] + text[end:], text[begin:]])


def sprinkled(text: bytes, random: Random) -> bytes:
    for _ in range(random.choice([1, 2, 5])):
        place = random.randrange(len(text))
        text = text[:place] + random.choice(TOKENS) + text[place + random.choice([0, 0, 1, 3]) :]
    return text


def shuffled(text: bytes, random: Random) -> bytes:
    """Events deleted, doubled and moved."""
    head, rows, tail = parts(text)
    for _ in range(random.choice([1, 5, 60])):
        place = random.randrange(len(rows))
        rows.insert(random.randrange(len(rows)), random.choice([rows[place], rows.pop(place)]))
        if random.random() < 0.5 and len(rows) > 1:
            rows.pop(random.randrange(len(rows)))
    return head + b"\n  },\n  {".join(rows) + tail


def swapped(text: bytes, random: Random) -> bytes:
    """Values of random keys, by values of random types or of other events; keys lost."""
    trace = json.loads(text)
    events = trace["traceEvents"]
    for _ in range(random.choice([1, 3, 40, 400])):
        where = trace if random.random() < 0.05 else random.choice(events)
        if isinstance(where.get("args"), dict) and random.random() < 0.5:
            where = where["args"]
        if where:
            key = random.choice(list(where))
            where[key] = random.choice([random.choice(VALUES), random.choice(events).get(key), where.get("dur", 3)])
            if random.random() < 0.2:
                del where[key]
    return json.dumps(trace, indent=random.choice([None, 1, 2])).encode()


def zipped(text: bytes, random: Random) -> bytes:
    return random.choice([flipped, cut, sprinkled])(gzip.compress(text, 6), random)


MUTATIONS: dict[str, Callable[[bytes, Random], bytes]] = {
    mutation.__name__: mutation for mutation in (flipped, cut, sprinkled, shuffled, swapped, zipped)
}


MILD = ("shuffled", "swapped", "flipped")


def damaged(kind: str, seed: int) -> bytes:
    random = Random(f"{kind} {seed}")
    return MUTATIONS[kind](small(random.choice(["images", "tokens_checked"])), random)


@pytest.mark.parametrize(
    "part", [0, *(pytest.param(part, marks=pytest.mark.sweep(room="traces")) for part in range(1, SEEDS))]
)
@pytest.mark.parametrize("kind", MUTATIONS)
def test_damage_never_ends_in_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, part: int
) -> None:
    """And refusing everything would be no proof of anything."""
    outcomes = []
    for seed in range(part * EACH, (part + 1) * EACH):
        monkeypatch.setattr(json_events, "BLOCK_SIZE", [3_000, 1 << 18][seed % 2])
        outcomes.append(explain_bytes(damaged(kind, seed), tmp_path / "damaged.trace.json", plain=seed % 3 == 0))
    survived = [diagnosis for diagnosis in outcomes if diagnosis is not None]
    assert kind not in MILD or len(survived) > EACH // 2
    for diagnosis in survived:
        assert_sound(diagnosis)
