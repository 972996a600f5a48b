# SPDX-License-Identifier: Apache-2.0
"""Staged dumps, as servers write them (in C++) and the upload reads them."""

from __future__ import annotations

import os
import random
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from devproxy.checkpoint import staged
from devproxy.checkpoint.errors import StoreError
from devproxy.checkpoint.staged import Ref, staged_file
from tests.native.build import built

SERVERS, RANGES = 4, 12
MIB = 1 << 20


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="devproxy-test-", dir="/dev/shm") as path:
        yield Path(path)


def start(verb: str, folder: Path, gpu: int, seed: int) -> subprocess.Popen[str]:
    words = [str(built("server_blocks")), verb, str(folder), str(gpu), str(seed), str(RANGES)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True)


def everywhere(verb: str, folder: Path, seed: int) -> list[str]:
    """In one process per server, at once: what each says."""
    running = [start(verb, folder, gpu, seed) for gpu in range(SERVERS)]
    said = [process.communicate(timeout=60)[0] for process in running]
    assert [process.returncode for process in running] == [0] * SERVERS
    return said


@pytest.mark.parametrize("seed", range(1, 4))
def test_several_servers_at_once(folder: Path, seed: int) -> None:
    staged.make_index(str(folder), SERVERS * 30)
    counts = [tuple(map(int, line.split())) for line in everywhere("write", folder, seed)]
    written, own = (sum(column) for column in zip(*counts, strict=True))
    assert own <= written <= own + 21 * MIB  # they have 15 MiB alike
    everywhere("read", folder, seed)
    everywhere("plain", folder, seed)
    dice = random.Random(seed)
    elsewhere: set[str] = set()
    for gpu in range(SERVERS):
        plain = (folder / f"plain-{gpu}").read_bytes()
        path = folder / f"gpu{gpu}-1.dev"
        assert path.stat().st_size == len(plain)
        refs = staged.read_refs(str(path.with_suffix(".refs")))
        elsewhere |= {ref.file for ref in refs if not ref.zeros} - {path.name}
        with staged_file(str(path)) as file:
            assert b"".join(file.slices(0, file.size, MIB)) == plain
            for _ in range(20):
                at = dice.randrange(file.size)
                length = dice.randrange(file.size - at + 1)
                step = dice.choice((1000, MIB, 5 * MIB))
                pieces = list(file.slices(at, length, step))
                assert all(len(piece) == step for piece in pieces[:-1])
                assert b"".join(pieces) == plain[at : at + length]
                del pieces
    assert elsewhere


def test_one_dies_in_the_middle(folder: Path) -> None:
    """Its list never comes, so nobody reads what it owes."""
    staged.make_index(str(folder), SERVERS * 30)
    dead = start("write", folder, 0, 0)
    dead.communicate(timeout=60)
    assert dead.returncode == 7
    assert not (folder / "gpu0-1.refs").exists()
    other = start("write", folder, 1, 3)
    other.communicate(timeout=60)
    assert other.returncode == 0
    refs = staged.read_refs(str(folder / "gpu1-1.refs"))
    assert "gpu0-1.dev" in {ref.file for ref in refs}
    with pytest.raises(StoreError, match=r"gpu0-1\.dev, whose dump came to no end"):
        with staged_file(str(folder / "gpu1-1.dev")):
            pass
    assert start("read", folder, 1, 3).wait(60) != 0


def test_without_an_index_files_are_whole(folder: Path) -> None:
    everywhere("write", folder, 1)
    everywhere("plain", folder, 1)
    assert not list(folder.glob("*.refs"))
    for gpu in range(SERVERS):
        plain = (folder / f"plain-{gpu}").read_bytes()
        assert (folder / f"gpu{gpu}-1.dev").read_bytes() == plain


def test_an_index_is_of_one_dump(folder: Path) -> None:
    staged.make_index(str(folder), 10)
    index = folder / staged.INDEX
    first = index.read_bytes()
    assert len(first) == 4096 + 1024 * 32
    assert index.stat().st_blocks * 512 >= len(first)  # a map of it needs no more room
    with pytest.raises(FileExistsError):
        staged.make_index(str(folder), 10)
    index.unlink()
    staged.make_index(str(folder), 1000)
    second = index.read_bytes()
    assert len(second) == 4096 + 2048 * 32
    assert first[16:208] != second[16:208]  # the secret


def test_blocks_that_are_expected() -> None:
    clients = [{"live_bytes": 10 * MIB, "ranges": 7}, {"live_bytes": MIB - 1}]
    assert staged.expected_blocks(clients) == 17


def dump(folder: Path, name: str, data: bytes, refs: list[Ref] | bytes) -> str:
    (folder / f"{name}.dev").write_bytes(data)
    if not isinstance(refs, bytes):
        rows = [struct.pack("<QQIIQ", r.offset, r.bytes, r.gpu, r.client, r.there) for r in refs]
        refs = struct.pack("<8sQ", b"DPREFS01", len(rows)) + b"".join(rows)
    (folder / f"{name}.refs").write_bytes(refs)
    return str(folder / f"{name}.dev")


GOOD = Ref(2, 3, 1, 1, 4)


@pytest.mark.parametrize(
    ("refs", "why"),
    [
        (b"", "too short"),
        (b"DPREFS02" + bytes(8), "none, or not all"),
        (b"DPREFS01" + bytes(7) + b"\1", "none, or not all"),
        ([GOOD, Ref(4, 1, 1, 1, 0)], "overlap"),
        ([Ref(9, 2, 1, 1, 0)], "beyond its end"),
        ([Ref(0, 2, 1, 1, 9)], "leads beyond gpu1-1.dev"),
        ([Ref(0, 2, 2, 1, 0)], "came to no end"),
    ],
)
def test_damaged_lists(folder: Path, refs: list[Ref] | bytes, why: str) -> None:
    dump(folder, "gpu1-1", b"abcdefghij", [])
    path = dump(folder, "gpu0-1", b"0123456789", refs)
    with pytest.raises(StoreError, match=why), staged_file(path):
        pass


def test_pieces_that_lie_in_several_places(folder: Path) -> None:
    dump(folder, "gpu1-1", b"abcdefghij", [])
    zeros = Ref(7, 2, 0xFFFFFFFF, 0, 0)
    path = dump(folder, "gpu0-1", b"0123456789", [GOOD, Ref(5, 1, 1, 1, 0), zeros])
    whole = b"01efga6\0\x009"
    with staged_file(path) as file:
        for start in range(11):
            for length in range(11 - start):
                for step in (1, 3, 20):
                    assert (
                        b"".join(file.slices(start, length, step)) == whole[start : start + length]
                    )
    os.remove(folder / "gpu1-1.dev")
    with pytest.raises(FileNotFoundError), staged_file(path):
        pass
