"""Device files: docs/reference/device-file.md describes them.

A value is a number with its unit, in a string: "4.8 TB/s", "5 us". So nobody has to know in which
unit the program counts, and a bandwidth given for a time is found out.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

from keepbusy.timeline.errors import BadInput
from keepbusy.virtual.costs.device import Copies, Device, Efficiency, HostCosts, HostTensors, Memory, Queue, Wire

_OWN = Path(__file__).parents[1] / "devices"
_SECTIONS: dict[str, type] = {
    "host": HostCosts,
    "host_tensors": HostTensors,
    "queue": Queue,
    "copies": Copies,
    "memory": Memory,
    "wire": Wire,
    "efficiency": Efficiency,
}
_TOP = {"name", "capability", "multiprocessors"}
_TIMES = {"ns": 1.0, "us": 1e3, "µs": 1e3, "ms": 1e6, "s": 1e9}
_SIZES = {"B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9, "KiB": 1024.0, "MiB": 1024.0**2, "GiB": 1024.0**3}
_BANDWIDTHS = {"MB/s": 1e-3, "GB/s": 1.0, "TB/s": 1e3}
_RATES = {"GFLOP/s": 1.0, "TFLOP/s": 1e3, "PFLOP/s": 1e6}
_PER_BYTE = {"ns/B": 1.0, "us/MB": 1e-3, "ms/GB": 1e-3}
_SIZED = {("memory", "size"), ("copies", "staged"), ("copies", "mapped")}
_COUNTS = {("queue", "pending"), ("wire", "devices")}
_PER_BYTES = {("memory", "host_alloc")}
_PER_ELEMENT = {("host_tensors", name) for name in ("draw", "each", "shuffle", "sort")}
_QUANTITY = re.compile(r"^\s*([0-9.eE+-]+)\s*(\S+)\s*$")


def names() -> list[str]:
    """The devices that come with keepbusy."""
    return sorted(path.stem for path in _OWN.glob("*.toml"))


def read(name: str) -> Device:
    """A device by its name, or from a file of one's own; raises `BadInput` for anything else."""
    path = _OWN / f"{name}.toml"
    if name not in names():
        path = Path(name)
        if path.suffix != ".toml":
            raise BadInput(f"{name!r} is no device; the devices are {', '.join(names())}, or give a .toml file.")
    try:
        text = path.read_text(encoding="utf-8")
        return _device(tomllib.loads(text), str(path))
    except OSError as error:
        raise BadInput(f"{path} cannot be read ({error.strerror or error}); give a device file.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadInput(f"{path} is no TOML ({error}); fix it, or copy one of keepbusy's device files.") from None


def _device(table: Mapping[str, Any], path: str) -> Device:
    known = {*_TOP, *_SECTIONS, "matrix"}
    _refuse_unknown(table, known, path)
    if not isinstance(table.get("name"), str):
        raise BadInput(f'{path} does not give the device a name; add a line like name = "NVIDIA H200".')
    sections = {
        section: kind(**_values(_section(table, section, path), kind, section, path))
        for section, kind in _SECTIONS.items()
    }
    matrix = {
        dtype: _quantity(value, _RATES, f"matrix.{dtype}", path)
        for dtype, value in _section(table, "matrix", path).items()
    }
    return Device(
        name=table["name"],
        capability=_capability(table.get("capability", "9.0"), path),
        multiprocessors=_whole(table.get("multiprocessors", 132), "multiprocessors", path),
        matrix=MappingProxyType({**Device().matrix, **matrix}),
        **sections,
    )


def _section(table: Mapping[str, Any], section: str, path: str) -> Mapping[str, Any]:
    value = table.get(section, {})
    if not isinstance(value, dict):
        raise BadInput(f"{path} has {section} = {value!r}, where a table [{section}] belongs.")
    return value


def _values(table: Mapping[str, Any], kind: type, section: str, path: str) -> dict[str, Any]:
    columns = {one.name: one for one in fields(kind)}
    _refuse_unknown(table, set(columns), path, f"{section}.")
    return {name: _value(value, columns[name], section, path) for name, value in table.items()}


def _value(value: Any, column: Field[Any], section: str, path: str) -> float | int:
    """By what it is: a share, a count, a size, a bandwidth or a time."""
    key, what = (section, column.name), f"{section}.{column.name}"
    assert column.default is not MISSING
    if section == "efficiency":
        return _share(value, what, path)
    if key in _COUNTS:
        return _whole(value, what, path)
    if key in _SIZED:
        return round(_quantity(value, _SIZES, what, path))
    if key in _PER_BYTES:
        return _quantity(value, _PER_BYTE, what, path)
    if key in _PER_ELEMENT:
        return _quantity(value, _TIMES, what, path)
    if isinstance(column.default, float):
        return _quantity(value, _BANDWIDTHS, what, path)
    return round(_quantity(value, _TIMES, what, path))


def _quantity(value: Any, units: Mapping[str, float], what: str, path: str) -> float:
    found = _QUANTITY.match(value) if isinstance(value, str) else None
    try:
        number = float(found[1]) * units[found[2]] if found else -1.0
    except (ValueError, KeyError):
        number = -1.0
    if not 0 < number < 1e18 and not (number == 0 and units is _TIMES):
        raise BadInput(f"{path} has {what} = {value!r}; give a number and a unit, one of {', '.join(units)}.")
    return number


def _share(value: Any, what: str, path: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= 1:
        raise BadInput(f"{path} has {what} = {value!r}; give a share of the peak, above 0 and at most 1.")
    return float(value)


def _whole(value: Any, what: str, path: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise BadInput(f"{path} has {what} = {value!r}; give a whole number, at least 1.")
    return value


def _capability(value: Any, path: str) -> tuple[int, int]:
    major, _, minor = str(value).partition(".")
    if not (isinstance(value, str) and major.isdigit() and minor.isdigit()):
        raise BadInput(f'{path} has capability = {value!r}; give CUDA\'s compute capability, like "9.0".')
    return int(major), int(minor)


def _refuse_unknown(table: Mapping[str, Any], known: set[str], path: str, before: str = "") -> None:
    for name in table:
        if name not in known:
            raise BadInput(
                f"{path} sets {before}{name}, which keepbusy does not know; it knows {', '.join(sorted(known))}."
            )
