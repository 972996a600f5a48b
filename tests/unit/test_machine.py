# SPDX-License-Identifier: Apache-2.0
"""Sizes, memory shares, and what counts as an NVIDIA device."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from devproxy import machine
from devproxy.errors import Refused
from devproxy.machine import GIB, MIB


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("4GiB", 4 * GIB),
        ("4g", 4 * GIB),
        ("4GB", 4 * GIB),
        ("512 MiB", 512 * MIB),
        ("1.5GiB", 3 * GIB // 2),
        ("1048576", MIB),
        ("64M", 64 * MIB),
    ],
)
def test_sizes(text: str, count: int) -> None:
    assert machine.parse_size(text) == count


@pytest.mark.parametrize(
    "text", ["", "x", "4XiB", "-1G", "0", "nan", "inf", "4GiBs", "1e99", "4ii", "IB", "4 4G"]
)
def test_bad_sizes(text: str) -> None:
    with pytest.raises(Refused, match="not a memory size"):
        machine.parse_size(text)


@given(st.text(max_size=12))
def test_any_text_is_a_size_or_refused(text: str) -> None:
    try:
        assert 1 <= machine.parse_size(text) < 1 << 50
    except Refused:
        pass


def test_memory_share() -> None:
    assert machine.gpu_memory_bytes(None, 1, 64 * GIB) == 4 * GIB
    assert machine.gpu_memory_bytes(None, 2, 4 * GIB) == GIB
    assert machine.gpu_memory_bytes(GIB, 2, 4 * GIB) == GIB
    assert machine.gpu_memory_bytes(None, 1, 0) == 4 * GIB  # unknown: the server will see


@pytest.mark.parametrize(
    ("wanted", "gpus", "available"), [(None, 1, 100 * MIB), (GIB, 5, 4 * GIB), (MIB, 1, GIB)]
)
def test_no_memory(wanted: int | None, gpus: int, available: int) -> None:
    with pytest.raises(Refused):
        machine.gpu_memory_bytes(wanted, gpus, available)


def test_cgroup_limits_what_is_available(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9 kB\nMemAvailable:  4096 kB\n")
    assert machine.available_memory_bytes(str(tmp_path)) == 4 * MIB
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("3145728\n")
    (group / "memory.current").write_text("1048576\n")
    assert machine.available_memory_bytes(str(tmp_path)) == 2 * MIB
    (group / "memory.max").write_text("max\n")
    assert machine.available_memory_bytes(str(tmp_path)) == 4 * MIB


def test_shm(tmp_path: Path) -> None:
    machine.check_shm(str(tmp_path), 1)
    with pytest.raises(Refused, match="too small"):
        machine.check_shm(str(tmp_path), 1 << 60)
    with pytest.raises(Refused, match="cannot be used"):
        machine.check_shm(str(tmp_path / "no"), 1)


def test_nvidia_device_is_seen_in_three_places(tmp_path: Path) -> None:
    def root(name: str) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        return folder

    assert machine.find_nvidia(str(root("none"))) is None
    node = root("node")
    (node / "dev").mkdir()
    (node / "dev/nvidia0").touch()
    assert machine.find_nvidia(str(node)) is not None
    driver = root("driver")
    (driver / "proc/driver/nvidia/gpus/0000:01:00.0").mkdir(parents=True)
    assert machine.find_nvidia(str(driver)) is not None
    pci = root("pci")
    for function, vendor, kind in (("00:1", "0x10de", "0x040300"), ("00:0", "0x8086", "0x030000")):
        place = pci / "sys/bus/pci/devices" / function
        place.mkdir(parents=True)
        (place / "vendor").write_text(vendor + "\n")
        (place / "class").write_text(kind + "\n")
    assert machine.find_nvidia(str(pci)) is None  # its sound function, and another vendor's display
    (pci / "sys/bus/pci/devices/00:1/class").write_text("0x030200\n")
    found = machine.find_nvidia(str(pci))
    assert found is not None
    assert "00:1" in found
