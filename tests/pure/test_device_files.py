"""Device files: those that come along, and one's own."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from pathlib import Path

import pytest

from keepbusy.timeline.files import BadInput
from keepbusy.virtual.costs.device import names, read


def test_six_devices_come_along() -> None:
    assert names() == ["a100", "b200", "h100", "h200", "l4", "rtx4090"]
    for name in names():
        device = read(name)
        assert device.memory.size > 1 << 34
        assert device.matrix["bfloat16"] > device.matrix["float32"]


def test_what_a_file_leaves_out_is_as_on_the_h200(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('name = "Mine"\n')
    assert read(str(path)) == replace(read("h200"), name="Mine")


def test_a_device_of_ones_own_says_what_differs(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        'name = "Mine"\n[memory]\nsize = "8 GiB"\nbandwidth = "500 GB/s"\n[matrix]\nbfloat16 = "2 PFLOP/s"\n'
    )
    device = read(str(path))
    assert (device.name, device.memory.size, device.memory.bandwidth) == ("Mine", 8 << 30, 500.0)
    assert device.rate("bfloat16") == 2e6
    assert device.rate("float32") == read("h200").rate("float32")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "does not give the device a name"),
        ("name = 3", "does not give the device a name"),
        ("name = ", "cannot be understood (Invalid value"),
        ("x = " + "9" * 10_000, "cannot be understood (Exceeds the limit"),
        ("x = " + "[" * 10_000, "cannot be understood (maximum recursion depth"),
        ("x = " + "{a=" * 5_000, "cannot be understood (maximum recursion depth"),
        ("name" + ".x" * 7_000 + "= 1", "bad.toml "),  # Python 3.13 reads so many dots, and then there is no name
        ("[" * 100_000, "has more than 16 kB; give a device file"),
        ("#" * 20_000, "has more than 16 kB; give a device file"),
        ('name = "x"\nmultiprocessors = 99999999999', "give a whole number, at least 1 and below"),
        ('name = "x"\ncapability = "\N{SUPERSCRIPT TWO}.0"', "compute capability"),
        ('name = "x"\ncapability = "%s.0"' % ("9" * 10_000), "compute capability"),
        ('name = "x"\nspeed = 3', "sets speed, which keepbusy does not know"),
        ('name = "x"\n[memory]\nspeed = 3', "sets memory.speed, which keepbusy does not know"),
        ('name = "x"\nmemory = 3', "has memory = 3, where a table"),
        ('name = "x"\n[memory]\nsize = 80', "give a number and a unit, one of B, kB"),
        ('name = "x"\n[memory]\nsize = "80 us"', "give a number and a unit, one of B, kB"),
        ('name = "x"\n[memory]\nbandwidth = "-3 TB/s"', "has memory.bandwidth = '-3 TB/s'"),
        ('name = "x"\n[host]\nlaunch = "e us"', "has host.launch = 'e us'"),
        ('name = "x"\n[queue]\npending = 0', "give a whole number, at least 1 and below"),
        ('name = "x"\n[efficiency]\nmatrix = 1.5', "give a share of the peak"),
        ('name = "x"\n[matrix]\nfloat16 = "3 GB/s"', "one of GFLOP/s"),
        ('name = "x"\ncapability = "nine"', "compute capability"),
    ],
)
def test_a_bad_file_is_one_sentence(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(BadInput) as caught:
        read(str(path))
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unknown_names_and_missing_files(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="'h900' is no device; the devices are a100, b200"):
        read("h900")
    with pytest.raises(BadInput, match=r"none\.toml does not exist; give a device file"):
        read(str(tmp_path / "none.toml"))
    endless = tmp_path / "endless.toml"
    endless.symlink_to("/dev/zero")
    with pytest.raises(BadInput, match=r"endless\.toml has more than 16 kB"):
        read(str(endless))
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe")
    with pytest.raises(BadInput, match="cannot be understood"):
        read(str(binary))


def test_the_document_names_every_value_of_a_device_file() -> None:
    text = (Path(__file__).parents[2] / "docs" / "reference" / "device-file.md").read_text(encoding="utf-8")
    device = read("h200")
    for section in fields(device):
        values = getattr(device, section.name)
        for name in [one.name for one in fields(values)] if is_dataclass(values) else [section.name]:
            assert f"`{name}`" in text or f"[{name}]" in text, f"{section.name}.{name}"
