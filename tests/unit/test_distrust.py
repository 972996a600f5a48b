# SPDX-License-Identifier: Apache-2.0
"""No image relies on a pack that is known, or can be seen, to be damaged: it is whole, or it is not made."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from devproxy.checkpoint import markers
from devproxy.checkpoint import shelf as shelves
from devproxy.checkpoint.backend import named
from devproxy.checkpoint.chunker import KIB, MIB
from devproxy.checkpoint.errors import DamagedChunk, DamagedPack, MissingChunk, StoreError
from devproxy.checkpoint.folder_backend import LocalBackend
from devproxy.checkpoint.manifest import Image
from devproxy.checkpoint.markers import Marker
from devproxy.checkpoint.packs import Location
from devproxy.checkpoint.store import Store
from devproxy.checkpoint.verify import Verifier
from tests.unit.test_store import files, load, noise, save

CHUNK = 64 * KIB  # of kind host, as save() has it


pytestmark = pytest.mark.usefixtures("own_key")


def flip(path: Path, place: int = 5) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)
    later(path)


def later(path: Path) -> None:
    """A write shows in a file's time where it comes a tick of the clock later; and here is no time to wait for one."""
    now = max(one.stat().st_mtime_ns for one in path.parent.iterdir()) + 1_000_000
    os.utime(path, ns=(now, now))


def rot(path: Path, place: int = 5) -> None:
    """What a disk does: no time changes."""
    before = path.stat()
    flip(path, place)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def shorten(path: Path, size: int) -> None:
    before = path.stat()
    path.write_bytes(path.read_bytes()[:size])
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"x")
    later(path)


def the_pack(root: Path) -> Path:
    [pack] = files(root, "packs", ".pack")
    return pack


def notes(root: Path) -> list[str]:
    folder = root / shelves.DISTRUSTED
    return sorted(os.listdir(folder)) if folder.exists() else []


def try_twice(url: str, image: str, data: bytes) -> tuple[Image, int]:
    """As the coordinator does: once more where a pack was found damaged. (The image, how often that was.)"""
    try:
        return save(Store.open(url), image, data), 0
    except DamagedPack as error:
        assert "is damaged" in str(error)
        return save(Store.open(url), image, data), 1


@pytest.mark.parametrize(
    ("damage", "first"),
    [
        (flip, "anew"),
        (rot, "refused"),
        (lambda path: rot(path, 3 * CHUNK), "refused"),
        (lambda path: shorten(path, path.stat().st_size // 2), "anew"),
        (lambda path: shorten(path, 0), "anew"),
        (lengthen, "anew"),
        (later, "anew"),
        (Path.unlink, "anew"),
        (lambda path: path.with_suffix(".idx").write_bytes(b"x"), "anew"),
    ],
    ids="flip rot rot-at-the-end halve empty lengthen touch remove index".split(),
)
def test_between_two_images(
    store: Store, root: Path, damage: Callable[[Path], None], first: str
) -> None:
    data = noise(1, 4 * CHUNK)
    save(store, "a", data)
    damage(the_pack(root))
    image, refusals = try_twice(store.url, "b", data)
    assert refusals == (first == "refused")
    assert (image.sizes["new"], image.sizes["deduplicated"]) == (4 * CHUNK, 0)
    fresh = Store.open(store.url)
    assert load(fresh, "b") == data
    assert fresh.verify("b", full=True).whole
    again = save(fresh, "c", data)
    assert again.sizes["new"] == 0, "what was stored anew is relied on again"
    assert load(Store.open(store.url), "c") == data


@pytest.mark.parametrize("found_by", ["verify", "restore", "commit"])
def test_what_was_found_is_remembered(store: Store, root: Path, found_by: str) -> None:
    data = noise(1, 4 * CHUNK)
    save(store, "a", data)
    pack = the_pack(root)
    rot(pack)
    if found_by == "verify":
        assert not Store.open(store.url).verify("a", full=True).whole
    elif found_by == "restore":
        with pytest.raises(DamagedChunk):
            load(Store.open(store.url), "a")
    else:
        with pytest.raises(DamagedPack):
            save(Store.open(store.url), "b", data)
        assert [image.id for image in store.images()] == ["a"]
    assert notes(root) == [pack.stem]
    assert store.damaged == {}, "another process has found it"
    with store.writer("c") as writer:
        refs = writer.put_bytes(data, kind="host")
        image = writer.commit({"data": {"chunks": refs, "name": "the data"}})
        assert writer.renewed == {pack.stem}
    assert image.sizes["new"] == 4 * CHUNK
    assert load(store, "c") == data
    assert load(Store.open(store.url), "a") == data, "it is whole again by the other's chunks"


def test_a_store_that_cannot_be_written(
    store: Store, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the process that has seen it knows."""
    save(store, "a", noise(1, CHUNK))
    pack = the_pack(root)
    rot(pack)

    def read_only(name: str, data: bytes, *, stage: str) -> bool:
        raise StoreError(stage, name, "Read-only file system")

    monkeypatch.setattr(store.backend, "create", read_only)
    assert not store.verify("a", full=True).whole
    assert notes(root) == []
    assert store.doubted_packs() == {pack.stem}
    monkeypatch.undo()
    monkeypatch.setenv("DEVPROXY_KEY_FILE", str(root.parent / "key" / "image.key"))
    assert save(store, "b", noise(1, CHUNK)).sizes["new"] == CHUNK


def test_two_uploads_that_have_begun(store: Store, root: Path) -> None:
    """Neither has seen the note when it put; both see it before they commit."""
    data = noise(1, 4 * CHUNK)
    save(store, "a", data)
    writers = [Store.open(store.url).writer(name) for name in ("b", "c")]
    refs = [writer.put_bytes(data, kind="host") for writer in writers]
    rot(the_pack(root))
    for _ in range(2):
        assert not Store.open(store.url).verify("a", full=True).whole
    for writer, chunks in zip(writers, refs, strict=True):
        with writer, pytest.raises(DamagedPack):
            writer.commit({"data": {"chunks": chunks}})
    assert [image.id for image in store.images()] == ["a"]
    for name in ("b", "c"):
        assert try_twice(store.url, name, data)[1] == 0
        assert load(Store.open(store.url), name) == data
    assert len(notes(root)) == 1


def test_a_pack_that_changes_during_the_upload(store: Store, root: Path) -> None:
    """Its chunks are right still, as far as a few reads tell: somebody else is about to damage it."""
    data = noise(1, 4 * CHUNK)
    save(store, "a", data)
    with store.writer("b") as writer:
        chunks = writer.put_bytes(data, kind="host")
        later(the_pack(root))
        with pytest.raises(DamagedPack):
            writer.commit({"job": "j", "job_id": "job", "data": {"name": "d", "chunks": chunks}})
    assert [image.id for image in store.images()] == ["a"]


@pytest.mark.parametrize("during", [False, True], ids=["between", "during"])
@pytest.mark.parametrize(
    ("damage", "first"),
    [
        (flip, "anew"),
        (rot, "refused"),
        (lambda path: shorten(path, 20), "anew"),
        (lengthen, "anew"),
        (Path.unlink, "anew"),
    ],
    ids="flip rot shorten lengthen remove".split(),
)
def test_an_index_that_was_read_before(
    store: Store, root: Path, damage: Callable[[Path], None], first: str, during: bool
) -> None:
    """The supervisor of a job keeps its store open: what it has in memory is not what a restore will find."""
    data = noise(1, 4 * CHUNK)
    save(store, "a", data)
    save(store, "b", data)  # has read the index
    index = the_pack(root).with_suffix(".idx")
    if during:
        with store.writer("c") as writer:
            chunks = writer.put_bytes(data, kind="host")
            damage(index)
            store.refresh()  # another thread of the supervisor
            with pytest.raises(StoreError):
                writer.commit({"data": {"name": "d", "chunks": chunks}})
    else:
        damage(index)
    try:
        image = save(store, "c", data)
        assert first == "anew" or during
    except DamagedPack:
        assert first == "refused" and not during
        image = save(store, "c", data)
    assert image.sizes["new"] == 4 * CHUNK
    assert load(Store.open(store.url), "c") == data


def take_refs_over(store: Store, old: str, new: str) -> Image:
    """As a file that is the same as in the last image: nobody puts it."""
    chunks = store.read_manifest(old)["data"]["chunks"]
    with store.writer(new) as writer:
        return writer.commit({"data": {"name": "the data", "chunks": chunks}})


def test_a_file_that_nobody_puts(store: Store, root: Path) -> None:
    data = noise(1, 4 * CHUNK)
    save(store, "a", data)
    pack = the_pack(root)
    lengthen(pack)  # every chunk of it is good
    image = take_refs_over(Store.open(store.url), "a", "b")
    assert image.sizes["new"] == 0
    pack.unlink()
    assert load(Store.open(store.url), "b") == data


def test_a_file_that_nobody_puts_and_that_is_lost(store: Store, root: Path) -> None:
    save(store, "a", noise(1, 4 * CHUNK))
    pack = the_pack(root)
    flip(pack)
    with pytest.raises(DamagedChunk, match=f"of data:the data is damaged in pack {pack.stem}"):
        take_refs_over(Store.open(store.url), "a", "b")
    assert [image.id for image in store.images()] == ["a"]
    pack.unlink()
    with pytest.raises(MissingChunk):
        take_refs_over(Store.open(store.url), "a", "b")


def test_a_few_reads_at_a_commit(store: Store, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounded in number and in bytes, whatever an image relies on; of as many packs as can be."""
    for number in range(5):
        save(store, f"small{number}", noise(number, CHUNK))
    data = noise(9, 64 * MIB)
    with store.writer("big") as writer:
        writer.commit({"data": {"chunks": writer.put_bytes(data, kind="device")}})
    seen: list[Location] = []
    plain = store.read_chunk

    def counted(hashed: bytes, where: Location) -> bytes | memoryview | None:
        seen.append(where)
        return plain(hashed, where)

    monkeypatch.setattr(store, "read_chunk", counted)
    with store.writer("again") as writer:
        refs = writer.put_bytes(data, kind="device")
        for number in range(5):
            refs += writer.put_bytes(noise(number, CHUNK), kind="host")
        writer.commit({"data": {"chunks": refs}})
    assert 8 <= len(seen) <= 16
    assert sum(where.stored_bytes for where in seen) <= 8 * MIB
    assert len(set(seen)) == len(seen)
    assert len({where.pack for where in seen}) >= 2
    seen.clear()
    with store.writer("small") as writer:
        refs = [ref for n in range(5) for ref in writer.put_bytes(noise(n, CHUNK), kind="host")]
        writer.commit({"data": {"chunks": refs}})
    assert len({where.pack for where in seen}) == 5


class BadDisk(LocalBackend):
    """One byte of one object cannot be read."""

    bad = ("", 0)

    def view_range(self, name: str, offset: int, length: int) -> memoryview:
        if name == self.bad[0] and offset <= self.bad[1] < offset + length:
            with named("read", f"{name} in store {self.url}"):
                raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().view_range(name, offset, length)


def test_a_sector_that_cannot_be_read(store: Store, root: Path) -> None:
    """Its chunk is damaged; its neighbours, the other image and the store are not."""
    data = noise(1, 4 * CHUNK)
    save(store, "a", data[:CHUNK])
    first = the_pack(root)
    save(store, "b", data)
    [pack] = set(files(root, "packs", ".pack")) - {first}
    disk = BadDisk(str(root))
    disk.bad = (f"packs/{pack.name}", CHUNK + 7)
    ill = Store(disk, store.key)
    assert ill.verify("a", full=True).whole
    look = Verifier(ill)
    verdict = look.check("b")
    assert verdict is not None
    assert f"is damaged in pack {pack.stem}" in verdict.image.problem
    assert verdict.damaged_chunks == 1
    assert list(look.packs()) == [pack.stem] == notes(root)
    with pytest.raises(DamagedChunk):
        load(ill, "b")
    assert save(ill, "c", data).sizes["new"] == 3 * CHUNK
    assert load(ill, "b") == load(ill, "c") == data
    assert ill.gc().removed_packs == 1
    assert not pack.exists()


def test_a_sector_that_a_commit_meets(store: Store, root: Path) -> None:
    data = noise(1, 4 * CHUNK)
    save(store, "a", data)
    disk = BadDisk(str(root))
    disk.bad = (f"packs/{the_pack(root).name}", CHUNK + 7)
    ill = Store(disk, store.key)
    with pytest.raises(DamagedPack):
        save(ill, "b", data)
    assert save(ill, "b", data).sizes["new"] == 4 * CHUNK
    assert load(ill, "b") == data


# ---- gc ----


def test_gc_removes_a_damaged_pack_that_nobody_needs_any_more(store: Store, root: Path) -> None:
    data = noise(1, 4 * CHUNK)
    save(store, "a", data)
    pack = the_pack(root)
    rot(pack)
    try_twice(store.url, "b", data)
    report = Store.open(store.url).gc()
    assert (report.removed_packs, report.busy) == (1, [])
    assert not pack.exists()
    assert notes(root) == []
    fresh = Store.open(store.url)
    assert [fresh.verify(name, full=True).whole for name in ("a", "b")] == [True, True]


def test_gc_keeps_what_is_nowhere_else(store: Store, root: Path) -> None:
    data, more = noise(1, 4 * CHUNK), noise(2, 4 * CHUNK)
    save(store, "a", data + more)
    pack = the_pack(root)
    rot(pack)
    try_twice(store.url, "b", data)
    assert Store.open(store.url).gc().removed_packs == 0
    assert notes(root) == [pack.stem]
    assert load(Store.open(store.url), "a") == data + more, "the damaged chunk is in the other pack"


@pytest.mark.parametrize("pinned", [False, True])
def test_a_doubted_pack_is_no_place_for_gc(store: Store, root: Path, pinned: bool) -> None:
    """Of two doubted packs with the same chunks neither goes for the other's sake, also where an upload keeps that one."""
    data = noise(1, CHUNK)
    for writer in (
        store.writer("a"),
        Store.open(store.url).writer("b"),
    ):  # neither knows of the other
        refs = writer.put_bytes(data, kind="host")
        writer.commit({"data": {"name": "the data", "chunks": refs}})
    bad, good = files(root, "packs", ".pack")
    rot(bad)
    later(good)
    upload = Marker(store.backend, markers.UPLOADS, {})
    upload.pin([bad.stem] if pinned else [])
    assert Store.open(store.url).verify("a", full=True).whole
    assert notes(root) == [bad.stem]
    for _ in range(2):
        assert Store.open(store.url).gc().removed_packs == 0
    upload.end()
    assert load(Store.open(store.url), "a") == data


def test_gc_finds_damage_while_it_writes_anew(store: Store, root: Path) -> None:
    with store.writer("a") as writer:
        refs = writer.put_bytes(noise(1, CHUNK), kind="host")
        writer.put_bytes(noise(3, 9 * CHUNK), kind="host")
        writer.commit({"data": {"chunks": refs}})
    pack = the_pack(root)
    rot(pack)
    assert Store.open(store.url).gc().busy == [f"pack {pack.stem} is damaged and stays as it is"]
    assert notes(root) == [pack.stem]


@pytest.mark.parametrize("damage", [flip, lambda path: shorten(path, 20), Path.unlink])
def test_gc_relies_on_no_index_that_was_read_before(
    store: Store, root: Path, damage: Callable[[Path], None]
) -> None:
    """The same chunks lie in two packs. One is doubted; the other one's index is damaged after this process has read it."""
    data = noise(1, 4 * CHUNK)
    both = [store.writer(name) for name in ("a", "b")]
    refs = [writer.put_bytes(data, kind="host") for writer in both]
    for writer, chunks in zip(both, refs, strict=True):
        writer.commit({"data": {"name": "d", "chunks": chunks}})
    store.refresh()
    doubted, other = files(root, "packs", ".pack")
    lengthen(doubted)
    damage(other.with_suffix(".idx"))
    store.gc()
    assert load(Store.open(store.url), "a") == data


def test_notes_of_packs_that_are_gone_go(store: Store, root: Path) -> None:
    save(store, "a", noise(1, CHUNK))
    (root / shelves.DISTRUSTED).mkdir()
    (root / shelves.DISTRUSTED / "0123456789abcdef.00000").write_text("{}")
    (root / shelves.DISTRUSTED / the_pack(root).stem).write_text("of any kind")
    store.gc()
    assert notes(root) == [the_pack(root).stem]
    assert save(Store.open(store.url), "b", noise(1, CHUNK)).sizes["new"] == CHUNK
