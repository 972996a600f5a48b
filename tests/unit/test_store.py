# SPDX-License-Identifier: Apache-2.0
"""The image store: what goes in comes out, damage has a name, a full store harms no image, gc harms no upload."""

from __future__ import annotations

import errno
import io
import json
import os
import random
import resource
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from devproxy import fault
from devproxy.checkpoint import chunker, markers, packs
from devproxy.checkpoint import manifest as manifests
from devproxy.checkpoint import writer as writers
from devproxy.checkpoint.chunker import KIB, MIB, ZERO
from devproxy.checkpoint.errors import (
    DamagedChunk,
    ImageError,
    MissingChunk,
    NoSuchImage,
    StaleJob,
    StoreError,
    StoreFull,
    StoreGone,
    UploadLost,
)
from devproxy.checkpoint.folder_backend import LocalBackend, LocalObject
from devproxy.checkpoint.manifest import Image
from devproxy.checkpoint.markers import Marker
from devproxy.checkpoint.store import Store
from devproxy.errors import Refused

pytestmark = pytest.mark.usefixtures("own_key")


def noise(seed: int, size: int) -> bytes:
    return random.Random(seed).randbytes(size)


def save(store: Store, image: str, data: bytes, *, job: str = "job", **fields: object) -> Image:
    with store.writer(image) as writer:
        chunks = writer.put_bytes(data, kind="host")
        return writer.commit(
            {"job": "j", "job_id": job, "data": {"name": "the data", "chunks": chunks}, **fields}
        )


def load(store: Store, image: str) -> bytes:
    return store.fetch_bytes(store.read_manifest(image)["data"]["chunks"], name="the data")


def files(root: Path, folder: str, suffix: str = "") -> list[Path]:
    return sorted(p for p in (root / folder).iterdir() if p.name.endswith(suffix))


# ---- round trips ----


class TestRoundTrip:
    def test_kinds_sizes_and_modes(self, store: Store, root: Path, tmp_path: Path) -> None:
        source = tmp_path / "source"
        data = noise(1, 3 * MIB + 5) + bytes(2 * MIB) + b"text " * 50_000
        source.write_bytes(data)
        with store.writer("i") as writer:
            got = {kind: writer.put_file(str(source), kind=kind) for kind in chunker.KINDS}
            got["stream"] = writer.put_stream(io.BytesIO(data), kind="file")
            image = writer.commit(
                {"job_id": "j", "all": [{"chunks": refs} for refs in got.values()]}
            )
        for kind, refs in got.items():
            assert store.fetch_bytes(refs) == data, kind
            assert store.fetch_file(refs, str(tmp_path / "out")) == len(data)
            assert (tmp_path / "out").read_bytes() == data
            stream = io.BytesIO()
            store.fetch_file(refs, stream)
            assert stream.getvalue() == data
        assert image.whole
        assert store.images() == [image]
        assert store.verify("i", full=True) == image
        assert image.sizes["device"] == len(data)
        assert image.sizes["file"] == 2 * len(data)
        total = sum(image.sizes[k] for k in ("new", "deduplicated", "zero"))
        assert total == 6 * len(data) == sum(image.sizes[k] for k in chunker.KINDS)
        assert image.sizes["stored"] < image.sizes["new"]
        for path in root.rglob("*"):
            assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
        assert not files(root, "uploads")
        assert not files(root, "tmp")

    @given(
        parts=st.lists(
            st.tuples(st.sampled_from("zne"), st.integers(0, 200 * KIB), st.integers(0, 3)),
            max_size=6,
        ),
        kind=st.sampled_from(chunker.KINDS),
    )
    @settings(
        max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
    )
    def test_anything(self, store: Store, parts: list, kind: chunker.Kind) -> None:
        data = b"".join(
            bytes(n) if what == "z" else noise(seed, n) if what == "n" else (b"%d," % seed * n)[:n]
            for what, n, seed in parts
        )
        with store.writer(f"i{markers.new_id()}") as writer:
            refs = writer.put_bytes(data, kind=kind)
            writer.commit({"data": {"chunks": refs}})
        assert store.fetch_bytes(refs) == data
        assert Store.open(store.url).fetch_bytes(refs) == data
        assert sum(size for _, size in refs) == len(data)

    def test_zeros_take_no_space_and_files_get_holes(
        self, store: Store, root: Path, tmp_path: Path
    ) -> None:
        with store.writer("i") as writer:
            refs = writer.put_bytes(bytes(64 * MIB + 3), kind="device")
            writer.commit({"d": {"chunks": refs}})
        assert {name for name, _ in refs} == {ZERO}
        assert not files(root, "packs")
        store.fetch_file(refs, str(tmp_path / "out"))
        facts = (tmp_path / "out").stat()
        assert facts.st_size == 64 * MIB + 3
        assert facts.st_blocks * 512 < MIB
        dirty = bytearray(b"x" * (64 * MIB + 3))
        store.fetch_into(refs, memoryview(dirty))
        assert not any(dirty)

    def test_ranges_have_hashes_per_buffer_and_per_chunk(
        self, store: Store, tmp_path: Path
    ) -> None:
        data = noise(3, 5 * MIB)
        (tmp_path / "dev").write_bytes(data)
        ranges = [(0, 512), (512, 2 * MIB), (512 + 2 * MIB, 0), (512 + 2 * MIB, MIB), (100, 412)]
        with store.writer("i") as writer:
            found = writer.put_ranges(str(tmp_path / "dev"), ranges)
            writer.commit({"device": [row.as_json() for row in found]})
        for (offset, size), row in zip(ranges, found, strict=True):
            want = data[offset : offset + size]
            assert store.fetch_bytes(row.chunks) == want
            assert row.hash == chunker.digest(want).hex()
            assert [n for _, n in row.chunks] == [
                len(want[i : i + MIB]) for i in range(0, size, MIB)
            ]
        with store.writer("j") as writer, pytest.raises(StoreError, match="the file has"):
            writer.put_ranges(str(tmp_path / "dev"), [(0, 5 * MIB + 1)])

    def test_two_puts_at_once(self, store: Store) -> None:
        data = [noise(n, 3 * MIB) for n in range(4)]
        refs: dict[int, list] = {}
        with store.writer("i") as writer:
            threads = [
                threading.Thread(
                    target=lambda n=n: refs.update({n: writer.put_bytes(data[n], kind="host")})
                )
                for n in range(4)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            writer.commit({str(n): {"chunks": refs[n]} for n in refs})
        for n in range(4):
            assert store.fetch_bytes(refs[n]) == data[n]

    def test_second_image_stores_what_changed(self, store: Store) -> None:
        data = bytearray(noise(1, 8 * MIB))
        first = save(store, "a", bytes(data))
        data[4 * MIB] ^= 1
        second = save(Store.open(store.url), "b", bytes(data))
        assert first.sizes["new"] == 8 * MIB
        assert second.sizes["new"] == second.sizes["stored"] == 64 * KIB
        assert load(store, "b") == bytes(data)

    def test_many_small_packs(
        self, store: Store, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(writers, "PACK_BYTES", 100 * KIB)
        data = noise(1, 10 * MIB)
        save(store, "a", data)
        assert len(files(root, "packs", ".pack")) >= 80
        assert load(Store.open(store.url), "a") == data

    def test_plain_fsspec_file_systems(self, tmp_path: Path) -> None:
        store = Store.open("memory://h3/store")
        data = noise(1, 2 * MIB)
        save(store, "a", data)
        assert load(Store.open("memory://h3/store"), "a") == data
        assert store.take_epoch("j") == 1

    def test_ids_are_names(self, store: Store) -> None:
        for bad in ("", "..", "a/b", ".x", "a\n"):
            with pytest.raises(Refused):
                store.writer(bad)
        save(store, "a", b"x" * 100)
        with pytest.raises(Refused, match="already"):
            store.writer("a")
        with pytest.raises(NoSuchImage):
            store.read_manifest("b")

    def test_another_users_store_is_refused(
        self, store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        mine = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: mine + 1)
        with pytest.raises(Refused, match=f"belongs to user {mine}, not to you"):
            Store.open(store.url)


# ---- damage ----


class TestDamage:
    @pytest.mark.parametrize("compressible", [False, True])
    def test_bit_flips_in_a_pack(self, store: Store, root: Path, compressible: bool) -> None:
        data = b"".join(b"%d " % n for n in range(60_000)) if compressible else noise(2, 300 * KIB)
        save(store, "a", data)
        [pack] = files(root, "packs", ".pack")
        whole = pack.read_bytes()
        unnoticed = 0
        for place in random.Random(0).sample(range(len(whole)), 60) + [0, len(whole) - 1]:
            bad = bytearray(whole)
            bad[place] ^= 1 << (place % 8)
            pack.write_bytes(bad)
            try:
                assert load(store, "a") == data  # a bit of a zstd frame that says nothing may flip
                unnoticed += 1
                continue
            except DamagedChunk as error:
                assert "of the data is damaged in pack" in str(error)
            assert not store.verify("a", full=True).whole
        assert unnoticed <= (3 if compressible else 0)

    def test_the_object_and_the_older_image_are_named(self, store: Store, root: Path) -> None:
        save(store, "old", noise(1, 100 * KIB), created=1.0)
        first = set(files(root, "packs", ".pack"))
        save(store, "new", noise(2, 100 * KIB), created=2.0)
        [pack] = set(files(root, "packs", ".pack")) - first
        pack.write_bytes(bytes(pack.stat().st_size))
        assert [i.whole for i in store.images()] == [True, True], "quick does not read"
        older = store.older_whole("new")
        assert older == "old"
        body = store.read_manifest("new")
        with pytest.raises(DamagedChunk, match="of weights is damaged.*older whole image: old"):
            store.fetch_bytes(body["data"]["chunks"], name="weights", older=older)
        assert [i.whole for i in store.images()] == [True, False], "it knows what was read"
        assert "of data:the data is damaged" in store.verify("new", full=True).problem

    def test_a_missing_and_a_short_pack(self, store: Store, root: Path) -> None:
        save(store, "a", noise(2, 300 * KIB))
        [pack] = files(root, "packs", ".pack")
        whole = pack.read_bytes()
        pack.write_bytes(whole[:-1])
        assert "is not whole" in store.images()[0].problem
        with pytest.raises(DamagedChunk):
            load(store, "a")
        pack.unlink()
        assert not store.images()[0].whole
        with pytest.raises(MissingChunk, match="of the data is not in the store"):
            load(store, "a")

    def test_every_bit_flip_in_an_index(self, store: Store, root: Path) -> None:
        data = noise(2, 100 * KIB)
        save(store, "a", data)
        [index] = files(root, "packs", ".idx")
        whole = index.read_bytes()
        for place in range(len(whole)):
            bad = bytearray(whole)
            bad[place] ^= 1 << (place % 8)
            if place >= len(whole) - 32:  # the signature: it can be read, and nobody relies on it
                assert not packs.decode_index(index.stem, bytes(bad), store.key).ours
                continue
            with pytest.raises(packs.DamagedIndex):
                packs.decode_index(index.stem, bytes(bad), store.key)
        index.write_bytes(whole[:40] + b"x" + whole[41:])
        with pytest.raises(MissingChunk, match="the index of pack .* is damaged"):
            load(Store.open(store.url), "a")
        report = Store.open(store.url).gc()
        assert report.removed_packs == 0
        index.write_bytes(whole)
        assert load(Store.open(store.url), "a") == data

    def test_another_copy_is_used(self, store: Store, root: Path) -> None:
        data = noise(2, 300 * KIB)
        one, two = (
            store.writer("a"),
            Store.open(store.url).writer("b"),
        )  # neither knows of the other
        for writer, name in ((one, "a"), (two, "b")):
            writer.commit({"data": {"chunks": writer.put_bytes(data, kind="host")}})
            assert load(Store.open(store.url), name) == data
        first, second = files(root, "packs", ".pack")
        for broken in (first, second):
            keep = broken.read_bytes()
            broken.write_bytes(bytes(len(keep)))
            assert load(Store.open(store.url), "a") == data
            broken.write_bytes(keep)

    def test_a_chunk_that_was_never_put(self, store: Store) -> None:
        with store.writer("a") as writer, pytest.raises(MissingChunk, match="never put"):
            writer.commit({"data": {"chunks": [["ab" * 32, 5]]}})
        assert store.images() == []


# ---- full, gone, killed ----


class Failing(LocalBackend):
    """A disk with so many bytes left; -1 is endless."""

    left = -1
    code = errno.ENOSPC

    def spend(self, size: int) -> None:
        if self.left < 0:
            return
        if size > self.left:
            raise OSError(self.code, os.strerror(self.code))
        self.left -= size


@pytest.fixture
def failing(store: Store, monkeypatch: pytest.MonkeyPatch) -> Store:
    disk = Failing(store.backend.root)  # type: ignore[attr-defined]
    monkeypatch.setattr(
        LocalObject,
        "_write",
        lambda self, view, plain=LocalObject._write: (
            self._backend.spend(len(view)) if isinstance(self._backend, Failing) else None,
            plain(self, view),
        )[1],
    )
    return Store(disk, store.key)


class TestBreaks:
    def test_store_full_at_every_write(
        self, store: Store, failing: Store, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(writers, "PACK_BYTES", 128 * KIB)
        data = noise(2, MIB)
        save(store, "old", noise(1, 200 * KIB))
        stages: set[str] = set()
        tries = 0
        for left in [0, 300, 600, 1000] + list(range(1200, MIB + 64 * KIB, 60 * KIB + 7)):
            failing.backend.left = left  # type: ignore[attr-defined]
            try:
                save(failing, f"new{left}", data)
                break
            except StoreFull as error:
                stages.add(error.stage)
                assert "the store is full" in str(error)
                assert "images that were whole before are whole still" in str(error)
            tries += 1
            failing.backend.left = -1  # type: ignore[attr-defined]
            fresh = Store.open(store.url)
            assert [(i.id, i.whole) for i in fresh.images()] == [("old", True)]
            assert load(fresh, "old") == noise(1, 200 * KIB)
        assert tries > 5
        assert {"mark the upload", "write a pack"} <= stages
        failing.backend.left = -1  # type: ignore[attr-defined]
        done = save(Store.open(store.url), "final", data)
        assert done.sizes["deduplicated"] > 0, "the retry goes on where the last one broke"
        assert load(store, "final") == data
        store.gc(0.0)
        assert not files(root, "tmp")

    def test_a_real_full_disk(self, tmp_path: Path) -> None:
        """On a tmpfs of 6 MiB, in a mount namespace of its own."""
        program = """
import os, sys
from devproxy.checkpoint.store import Store
from devproxy.checkpoint.errors import StoreFull
store = Store.open(sys.argv[1])
old, big = os.urandom(1 << 20), os.urandom(8 << 20)
with store.writer("old") as w:
    w.commit({"data": {"chunks": w.put_bytes(old, kind="host")}})
try:
    with store.writer("new") as w:
        w.commit({"data": {"chunks": w.put_bytes(big, kind="host")}})
except StoreFull as error:
    print("full:", error)
assert [(i.id, i.whole) for i in store.images()] == [("old", True)]
assert store.verify("old", full=True).whole
store.gc(0.0)
with store.writer("small") as w:
    w.commit({"data": {"chunks": w.put_bytes(big[:1 << 20], kind="host")}})
print([i.id for i in store.images()])
"""
        mount = tmp_path / "disk"
        mount.mkdir()
        command = (
            f'mount -t tmpfs -o size=6m none {mount} && exec {sys.executable} -c "$0" {mount}/s'
        )
        prefix = ["unshare", "-m"] if os.geteuid() == 0 else ["unshare", "-mr"]
        done = subprocess.run(
            [*prefix, "sh", "-c", command, program], capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        assert "full: write a pack failed on packs/" in done.stdout
        assert "['old', 'small']" in done.stdout

    def test_the_store_goes_away(self, store: Store, root: Path) -> None:
        writer = store.writer("a")
        refs = writer.put_bytes(noise(1, MIB), kind="host")
        root.rename(root.with_name("elsewhere"))
        with pytest.raises(StoreError) as caught:
            writer.commit({"data": {"chunks": refs}})
        assert isinstance(caught.value, StoreGone)
        assert "the store is gone" in str(caught.value)
        writer.abort()
        with pytest.raises(StoreGone):
            store.images()

    @pytest.mark.parametrize(
        ("point", "stage"),
        [
            ("store_pack_write:3", "write a pack"),
            ("store_index_write:2", "write an index"),
            ("store_manifest_write", "write the manifest"),
        ],
    )
    def test_injected_errors(
        self, store: Store, point: str, stage: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(writers, "PACK_BYTES", 128 * KIB)
        save(store, "old", noise(1, 200 * KIB))
        for action, wanted in (("error", StoreGone), ("enospc", StoreFull)):
            fault.arm(f"{point}:{action}")
            with pytest.raises(wanted, match=f"{stage} failed on"):
                save(store, "new", noise(2, MIB))
            assert [(i.id, i.whole) for i in store.images()] == [("old", True)]
        save(store, "new", noise(2, MIB))
        assert load(store, "new") == noise(2, MIB)

    def test_injected_errors_elsewhere(self, store: Store) -> None:
        fault.arm("store_open")
        with pytest.raises(StoreGone, match="open failed on store"):
            Store.open(store.url)
        save(store, "a", noise(1, MIB))
        fault.arm("store_read_chunk:enospc")
        with pytest.raises(StoreError, match="read a chunk failed on packs/"):
            load(store, "a")
        save(store, "b", noise(1, MIB))
        fault.arm("store_prune")
        with pytest.raises(StoreGone, match="prune failed on image a"):
            store.prune("job", 1)
        assert len(store.images()) == 2
        fault.arm("store_after_manifest")
        with pytest.raises(StoreGone, match="end the upload"):
            save(store, "c", noise(1, MIB))

    @pytest.mark.parametrize(
        "point",
        [
            "store_pack_write:9",
            "store_index_write:3",
            "store_manifest_write",
            "store_after_manifest",
        ],
    )
    def test_killed_and_resumed(self, store: Store, root: Path, point: str) -> None:
        """kill -9 in the middle: finished packs are used by the next try, gc sees that the process is gone."""
        program = """
import sys, random
from devproxy.checkpoint import writer
writer.PACK_BYTES = 256 << 10
from devproxy.checkpoint.store import Store
with Store.open(sys.argv[1]).writer("a") as w:
    refs = w.put_bytes(random.Random(5).randbytes(4 << 20), kind="host")
    w.commit({"data": {"chunks": refs}})
"""
        env = {**os.environ, "DEVPROXY_FAULT": f"{point}:kill"}
        done = subprocess.run([sys.executable, "-c", program, str(root)], env=env, timeout=60)
        assert done.returncode == -signal.SIGKILL
        data = noise(5, 4 * MIB)
        if point == "store_after_manifest":
            assert load(store, "a") == data
        else:
            assert store.images() == []
            again = save(store, "b", data)
            if point != "store_pack_write:9":
                assert again.sizes["deduplicated"] > 0
            assert load(store, "b") == data
        assert len(files(root, "uploads")) == 2, "the marker and the pins of the dead"
        report = store.gc()
        assert report.uploads_ended == 1
        assert not report.busy
        assert not files(root, "uploads")
        assert not files(root, "tmp")
        [image] = store.images()
        assert store.verify(image.id, full=True).whole


# ---- epochs ----


class TestEpochs:
    def test_a_stale_job_cannot_commit(self, store: Store) -> None:
        mine = store.take_epoch("job")
        assert mine == 1
        save(store, "a", b"x" * 100, epoch=mine)
        writer = store.writer("b")
        refs = writer.put_bytes(b"y" * 100, kind="host")
        assert Store.open(store.url).take_epoch("job") == 2
        with pytest.raises(StaleJob, match="epoch 1 is over, the store says 2"):
            writer.commit({"job_id": "job", "epoch": mine, "data": {"chunks": refs}})
        writer.abort()
        assert [i.id for i in store.images()] == ["a"]

    def test_a_restore_while_the_manifest_is_on_its_way(
        self, store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        mine = store.take_epoch("job")
        plain = fault.point
        monkeypatch.setattr(
            fault,
            "point",
            lambda n: store.take_epoch("job") if n == "store_after_manifest" else plain(n),
        )
        with pytest.raises(StaleJob):
            save(store, "a", b"x" * 100, epoch=mine)
        assert store.images() == []

    def test_no_two_takers_get_one_number(self, root: Path) -> None:
        program = """
import sys
from devproxy.checkpoint.store import Store
s = Store.open(sys.argv[1])
print(*[s.take_epoch("job") for _ in range(20)])
"""
        runs = [
            subprocess.Popen(
                [sys.executable, "-c", program, str(root)], stdout=subprocess.PIPE, text=True
            )
            for _ in range(3)
        ]
        taken = [int(word) for run in runs for word in run.communicate(timeout=60)[0].split()]
        assert sorted(taken) == list(range(1, 61))


# ---- objects that somebody else wrote ----


def signed(store: Store, image: str, body: bytes) -> bytes:
    """A manifest whose checksum and signature are right, whatever its body is."""
    signature = manifests._authentication(store.key, manifests.FORMAT, body)
    head = manifests._head(manifests.FORMAT, len(body), chunker.digest(body).hex(), signature)
    return head + b"\n" + body + b"\n}\n"


def body_with(more: str) -> bytes:
    return f'{{"format":2,"image":"odd","job":"j","job_id":"job",{more}}}'.encode()


ODD_MANIFESTS = {
    "infinity": body_with('"created":Infinity'),
    "beyond all numbers": body_with('"created":1e999'),
    "a year that no calendar has": body_with('"created":1e300'),
    "lone surrogate": body_with('"job":"\\udcff"'),
    "deep": body_with('"a":' + "[" * 100_000 + "]" * 100_000),
    "rather deep": body_with('"a":' + "[" * 900 + "]" * 900),
    "no list": body_with('"trees":7'),
    "no hash": body_with('"x":{"chunks":[["zz",1]]}'),
    "no reference": body_with('"x":{"chunks":[3]}'),
    "no size": body_with('"x":{"chunks":[["aa",Infinity]]}'),
    "no epoch": body_with('"epoch":"now"'),
    "no object": b"[]",
    "bytes": b"\xff\xfe\x00",
}


class TestOddObjects:
    """One object that is none of ours is said, and takes nothing else with it."""

    @pytest.mark.parametrize("odd", ODD_MANIFESTS)
    def test_manifests(self, store: Store, root: Path, odd: str) -> None:
        save(store, "good", noise(0, KIB), created=1.0)
        (root / "images" / "odd").mkdir()
        manifest = root / "images" / "odd" / "manifest.json"
        manifest.write_bytes(signed(store, "odd", ODD_MANIFESTS[odd]))
        by_id = {image.id: image for image in store.images()}
        assert by_id["good"].whole
        if not by_id["odd"].whole:
            assert "image odd" in by_id["odd"].problem or "chunk" in by_id["odd"].problem
            assert not store.verify("odd", full=True).whole
        json.dumps([image.as_json() for image in by_id.values()], allow_nan=False)
        for image in by_id.values():
            time.localtime(image.created)
            image.job.encode()
        assert store.older_whole("odd") in ("good", None)
        assert store.gc().removed_packs == 0
        assert store.prune("job", 1) in ([], ["odd"])
        assert load(store, "good") == noise(0, KIB)

    @pytest.mark.timeout(30)
    @pytest.mark.parametrize("odd", ["file", "folder", "pipe", "nowhere"])
    def test_epochs(self, store: Store, root: Path, odd: str) -> None:
        """The name is taken, whatever stands there."""
        (root / "jobs" / "job").mkdir(parents=True)
        path = root / "jobs" / "job" / "epoch-00000001"
        make = {"file": path.touch, "folder": path.mkdir, "pipe": lambda: os.mkfifo(path)}
        make.get(odd, lambda: path.symlink_to("/devproxy-none"))()
        assert [store.take_epoch("job") for _ in range(2)] == [2, 3]

    @pytest.mark.parametrize(
        "line", [b'{"format":Infinity,', b"[" * 200_000, b'{"format":2,"body_bytes":1e999,']
    )
    def test_first_lines(self, store: Store, root: Path, line: bytes) -> None:
        save(store, "good", noise(0, KIB))
        (root / "images" / "odd").mkdir()
        (root / "images" / "odd" / "manifest.json").write_bytes(line + b'"body":\n{}\n}\n')
        assert {image.id: image.whole for image in store.images()} == {"good": True, "odd": False}

    def test_names_files_folders_and_pipes(self, store: Store, root: Path) -> None:
        save(store, "good", noise(0, KIB))
        images = root / "images"
        (images / "a file").write_text("x")
        (images / "file").write_text("x")
        (images / "two words").mkdir()
        os.mkdir(os.fsencode(images) + b"/\xff")
        (images / "pipe").mkdir()
        os.mkfifo(images / "pipe" / "manifest.json")
        (images / "folder" / "manifest.json").mkdir(parents=True)
        (root / "packs" / "x.1.idx").mkdir()
        (root / "packs" / "x.1.pack").mkdir()
        os.mkfifo(root / "packs" / "y.1.idx")
        os.mkfifo(root / "packs" / "y.1.pack")
        (root / "uploads").mkdir(exist_ok=True)
        (root / "uploads" / "z.json").mkdir()
        (root / "jobs" / "job").mkdir(parents=True)
        (root / "jobs" / "job" / "epoch-²").write_text("")
        fresh = Store.open(store.url)
        assert [image.id for image in fresh.images()] == ["good"]
        assert set(fresh.strange()) == {"a file", "file", "two words", "\udcff"}
        assert fresh.take_epoch("job") == 1
        fresh.gc()
        save(fresh, "next", noise(1, KIB))
        assert fresh.prune("job", 1) == ["good"]
        assert load(Store.open(store.url), "next") == noise(1, KIB)

    def test_markers(self, store: Store, root: Path) -> None:
        save(store, "good", noise(0, KIB))
        (root / "uploads").mkdir(exist_ok=True)
        for name, text in (("a", "[" * 100_000), ("b", '{"heartbeat":Infinity}')):
            (root / "uploads" / f"{name}.json").write_text(text)
            (root / "uploads" / f"{name}.pins").write_text("[[]]")
        (root / "gc").mkdir(exist_ok=True)
        (root / "gc" / "a.json").write_text("[" * 100_000)
        assert store.gc().busy == []
        save(store, "next", noise(1, KIB))
        assert load(store, "good") == noise(0, KIB)

    @pytest.mark.parametrize(
        "record",
        [
            packs.Record(bytes(32), 0, 100, (1 << 32) - 1, chunker.ZSTD),
            packs.Record(bytes(32), 0, (1 << 32) - 1, (1 << 32) - 1, chunker.RAW),
            packs.Record(bytes(32), 1 << 60, 100, 100, chunker.RAW),
        ],
    )
    def test_an_index_claims_what_cannot_be(self, record: packs.Record) -> None:
        with pytest.raises(packs.DamagedIndex, match="places that cannot be"):
            packs.decode_index("p", packs.encode_index("p", 1 << 20, [record], b"key"), b"key")

    def test_an_index_that_would_fill_memory_is_not_read(self, store: Store, root: Path) -> None:
        save(store, "good", noise(0, KIB))
        (root / "packs" / "huge.1.pack").write_bytes(b"")
        with open(root / "packs" / "huge.1.idx", "wb") as file:
            file.truncate(8 << 30)
        resource_before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        fresh = Store.open(store.url)
        assert [image.whole for image in fresh.images()] == [True]
        grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - resource_before
        assert grown_kib < 256 << 10

    @pytest.mark.parametrize("signed", ["by another key", "not at all", "for another pack"])
    def test_nobody_relies_on_an_index_that_is_not_ours(
        self, store: Store, root: Path, signed: str
    ) -> None:
        """It claims a chunk that an image will need, or of which a gc asks whether it has another place."""
        data = noise(0, KIB)
        false = packs.Record(chunker.digest(data), 0, len(data), len(data), chunker.RAW)
        (root / "packs" / "0.00000.pack").write_bytes(bytes(len(data)))
        pack, key = "0.00000", b"another key" if signed == "by another key" else store.key
        text = packs.encode_index(
            "1.00000" if signed == "for another pack" else pack, KIB, [false], key
        )
        if signed == "not at all":  # as written before there were signatures
            text = text[:5] + b"\1" + text[6:-64]
            text += chunker.digest(text)
        (root / "packs" / f"{pack}.idx").write_bytes(text)
        assert save(store, "good", data).sizes["deduplicated"] == 0
        assert load(Store.open(store.url), "good") == data
        sparse = store.writer("gone")
        sparse.put_bytes(noise(5, 9 * KIB), kind="host")
        refs = sparse.put_bytes(noise(6, KIB), kind="host")
        sparse.commit({"job": "j", "job_id": "job", "data": {"chunks": refs}})
        Store.open(store.url).gc()
        fresh = Store.open(store.url)
        assert load(fresh, "good") == data
        assert [image.whole for image in fresh.images()] == [True, True]

    def test_an_old_index_is_read(self, store: Store, root: Path) -> None:
        """Without a signature; its chunks are stored anew by the next image, and that is all."""
        data = noise(0, 5 * KIB)
        save(store, "old", data)
        [path] = files(root, "packs", ".idx")
        text = path.read_bytes()[:-64]
        text = text[:5] + b"\1" + text[6:]
        path.write_bytes(text + chunker.digest(text))
        fresh = Store.open(store.url)
        assert load(fresh, "old") == data
        assert save(fresh, "new", data).sizes["deduplicated"] == 0
        assert save(fresh, "next", data).sizes["deduplicated"] == len(data)
        for name in ("old", "new"):
            fresh.remove_image(name)
        fresh.gc()
        assert load(Store.open(store.url), "next") == data

    def test_a_false_place_does_not_hide_a_good_one(self, store: Store, root: Path) -> None:
        data = noise(0, KIB)
        save(store, "good", data)
        false = packs.Record(chunker.digest(data), 0, 5, 5, chunker.RAW)
        (root / "packs" / "0.00000.pack").write_bytes(b"wrong")
        (root / "packs" / "0.00000.idx").write_bytes(
            packs.encode_index("0.00000", 5, [false], store.key)
        )
        assert load(Store.open(store.url), "good") == data


# ---- gc ----


class TestGc:
    @pytest.mark.parametrize("why", ["job j needs it", ""])
    def test_one_that_is_needed_after_all_is_put_back(self, store: Store, why: str) -> None:
        """Nobody sees it while that is asked, and a gc that runs then takes no chunk of it."""
        save(store, "a", noise(1, 100_000))

        def needed() -> str:
            assert store.images() == []
            assert store.gc().removed_packs == 0
            return why

        assert store.remove_unless("a", needed) == why
        assert [image.id for image in store.images()] == (["a"] if why else [])
        if why:
            assert store.verify("a", full=True).whole
        assert (store.gc().removed_packs == 0) == bool(why)

    def test_one_is_put_back_where_nobody_can_say(self, store: Store) -> None:
        save(store, "a", noise(1, 1000))

        def needed() -> str:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            store.remove_unless("a", needed)
        assert store.verify("a", full=True).whole

    def test_prune_keeps_and_frees(self, store: Store, root: Path) -> None:
        common = noise(0, MIB)
        for n in range(5):
            save(store, f"i{n}", common + noise(n + 1, MIB))
        save(store, "other", noise(99, MIB), job="other")
        assert store.prune("job", 3) == ["i0", "i1"]
        assert [i.id for i in store.images()] == ["i2", "i3", "i4", "other"]
        for n in (2, 3, 4):
            assert load(store, f"i{n}") == common + noise(n + 1, MIB)
        left = sum(p.stat().st_size for p in files(root, "packs", ".pack"))
        assert left <= 6 * MIB, "i0's pack had half of it alive and may stay"
        for image in store.images():
            store.remove_image(image.id)
        assert store.gc().removed_packs > 0
        assert not files(root, "packs")

    def test_a_clock_set_back_removes_no_new_image(self, store: Store) -> None:
        data = noise(0, KIB)
        for n, created in enumerate((900.0, 901.0, 100.0, 101.0, 102.0)):
            save(store, f"i{n}", data, epoch=1 if n < 2 else 2, sequence=n + 1, created=created)
        save(store, "between", data, job="other", created=500.0)
        assert store.older_whole("i2") == "i1"
        assert [i.id for i in store.images()] == ["between", "i0", "i1", "i2", "i3", "i4"]
        assert store.prune("job", 2) == ["i0", "i1", "i2"]

    def test_images_of_before_there_was_an_order_go_by_their_clocks(self, store: Store) -> None:
        for name, epoch, created in (("c", 2, 1.0), ("b", 1, 9.0), ("a", 1, 8.0)):
            save(store, name, noise(0, KIB), epoch=epoch, created=created)
        save(store, "d", noise(0, KIB), epoch=2, sequence=1, created=0.5)
        assert [i.id for i in store.images()] == ["a", "b", "c", "d"]

    def test_what_was_just_committed_stays_whatever_the_order_says(self, store: Store) -> None:
        for name, created in (("new", 1.0), ("old", 9.0)):
            save(store, name, noise(0, KIB), created=created)
        assert store.prune("job", 1, committed="new") == []

    def test_mostly_dead_packs_are_written_anew(self, store: Store, root: Path) -> None:
        small = noise(0, 256 * KIB)
        save(store, "a", small + noise(1, 4 * MIB))
        save(store, "b", small)
        store.remove_image("a")
        report = store.gc()
        assert (report.repacked_packs, report.removed_packs) == (1, 1)
        assert sum(p.stat().st_size for p in files(root, "packs", ".pack")) == 256 * KIB
        assert load(store, "b") == small
        assert load(Store.open(store.url), "b") == small
        assert not files(root, "uploads")
        assert store.gc().removed_packs == 0

    def test_a_running_upload_may_rely_on_garbage(self, store: Store) -> None:
        """The pack of a removed image is garbage, but an upload has deduplicated against it."""
        data = noise(0, MIB)
        save(store, "a", data)
        store.remove_image("a")
        writer = store.writer("b")
        refs = writer.put_bytes(data, kind="host")
        assert store.gc().removed_packs == 0
        image = writer.commit({"data": {"chunks": refs}})
        assert image.sizes["new"] == 0
        assert load(store, "b") == data
        assert store.gc().removed_packs == 0

    def test_packs_of_a_running_upload_stay(
        self, store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(writers, "PACK_BYTES", 128 * KIB)
        data = noise(0, MIB)
        writer = store.writer("b")
        refs = writer.put_bytes(data, kind="host")
        writer.flush()
        other = Store.open(store.url)
        assert other.gc().removed_packs == 0
        writer.commit({"data": {"chunks": refs}})
        assert load(other, "b") == data
        aborted = store.writer("c")
        aborted.put_bytes(noise(1, MIB), kind="host")
        aborted.flush()
        aborted.abort()
        assert other.gc().removed_packs >= 8
        assert load(other, "b") == data

    def test_an_upload_that_begins_blocks(self, store: Store) -> None:
        save(store, "a", noise(0, MIB))
        store.remove_image("a")
        marker = Marker(store.backend, markers.UPLOADS, {})  # between U1 and U4
        report = store.gc()
        assert report.removed_packs == 0
        assert report.busy == ["an upload has just begun"]
        marker.end()
        assert store.gc().removed_packs == 1

    def test_victims_are_not_relied_on(self, store: Store) -> None:
        """An upload that begins between G4 and G6 stores its own copy."""
        data = noise(0, MIB)
        save(store, "a", data)
        store.remove_image("a")
        tombstone = Marker(store.backend, markers.TOMBSTONES, {"victims": store.pack_ids()})
        image = save(store, "b", data)
        assert image.sizes["new"] == MIB
        assert store.gc().busy == ["another gc is running"]
        tombstone.end()
        assert store.gc().removed_packs <= 1
        assert load(store, "b") == data

    def test_an_upload_taken_for_dead_says_so(self, store: Store, root: Path) -> None:
        writer = store.writer("b")
        refs = writer.put_bytes(noise(0, MIB), kind="host")
        writer.flush()
        for path in files(root, "uploads", ".json"):
            marker = json.loads(path.read_text())
            path.write_text(
                json.dumps({**marker, "boot": "another", "heartbeat": time.time() - 1e6})
            )
        assert store.gc().uploads_ended == 1
        with pytest.raises(UploadLost, match="took this upload for dead"):
            writer.commit({"data": {"chunks": refs}})
        writer.abort()
        assert store.images() == []

    def test_a_clock_that_is_set_forward_makes_nobody_dead(
        self, store: Store, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The writer is of this boot: its process can be looked up, and it has a clock that nobody sets."""
        save(store, "old", noise(7, MIB))
        data = noise(0, MIB)
        writer = store.writer("b")
        refs = writer.put_bytes(data, kind="host")
        store.remove_image("old")
        year = time.time() + 3e7
        with monkeypatch.context() as patch:
            patch.setattr(time, "time", lambda: year)
            report = Store.open(store.url).gc()
        assert (report.uploads_ended, report.removed_packs) == (0, 0), "the upload has pinned it"
        writer.commit({"data": {"name": "d", "chunks": refs}})
        assert load(store, "b") == data

    def test_whose_temporary_files_stay(self, store: Store, root: Path) -> None:
        backend = store.backend
        assert isinstance(backend, LocalBackend)
        mine = Path(backend._temporary())
        namespace, process, *rest = mine.name.split(".")
        pid, _, started = process.partition("-")
        child = subprocess.Popen(["true"])
        child.wait()
        stay = {
            mine.name: 1.0,  # written long ago, as the clock has it now
            ".".join(["another", "1-1", *rest]): time.time(),
            ".".join([namespace, pid, *rest]): time.time(),  # of an older version
        }
        go = {
            ".".join([namespace, f"{pid}-{int(started) + 1}", *rest]): time.time(),
            ".".join([namespace, f"{child.pid}-5", *rest]): time.time(),
            ".".join([namespace, str(child.pid), *rest]): time.time(),
            ".".join(["another", "2-2", *rest]): 1.0,
            ".".join([namespace, pid, *rest, "x"]): 1.0,
        }
        for name, when in (stay | go).items():
            (mine.parent / name).write_text("x")
            os.utime(mine.parent / name, (when, when))
        store.gc()
        assert {path.name for path in mine.parent.iterdir()} == set(stay)

    def test_pins_without_a_marker_go(self, store: Store, root: Path) -> None:
        (root / "uploads").mkdir(exist_ok=True)
        (root / "uploads" / "0123.pins").write_text("[]")
        with store.writer("b"):
            store.gc()
            assert len(list((root / "uploads").iterdir())) == 2
        assert not list((root / "uploads").iterdir())

    def test_a_file_that_nobody_puts_while_its_pack_may_go(self, store: Store, root: Path) -> None:
        """A gc that was killed has left its tombstone; or one is at work."""
        data = noise(0, MIB)
        save(store, "a", data)
        [old] = store.pack_ids()
        chunks = store.read_manifest("a")["data"]["chunks"]
        tombstone = Marker(store.backend, markers.TOMBSTONES, {"victims": [old]})
        with Store.open(store.url).writer("b") as writer:
            writer.commit({"data": {"name": "d", "chunks": chunks}})
            assert not writer.renewed, "nobody says that the pack is damaged"
        tombstone.end()
        (root / "packs" / f"{old}.pack").unlink()
        assert load(Store.open(store.url), "b") == data

    def test_an_image_that_cannot_be_read_blocks(self, store: Store, root: Path) -> None:
        save(store, "a", noise(0, MIB))
        save(store, "b", noise(1, MIB))
        manifest = root / "images" / "a" / "manifest.json"
        manifest.write_bytes(manifest.read_bytes()[:-10])
        [a, b] = store.images()
        assert (a.id, a.whole, b.whole) == ("a", False, True)
        assert "ends after" in a.problem
        assert "manifest of image a" in store.gc().busy[0]
        store.remove_image("a")
        assert store.gc().removed_packs == 1
        assert load(store, "b") == noise(1, MIB)

    def test_hold(self, store: Store) -> None:
        save(store, "a", noise(0, MIB))
        body = store.read_manifest("a")
        with store.hold("a"):
            store.remove_image("a")
            assert store.gc().removed_packs == 0
            assert store.fetch_bytes(body["data"]["chunks"]) == noise(0, MIB)
        assert store.gc().removed_packs == 1

    def test_stress_uploads_prunes_and_gcs_at_once(self, root: Path) -> None:
        """Three processes upload from a small set of contents and prune, two collect: every image stays whole."""
        program = """
import os, random, sys, time
from devproxy.checkpoint import writer
writer.PACK_BYTES = 96 << 10
from devproxy.checkpoint.errors import UploadLost
from devproxy.checkpoint.store import Store
seed, role, seconds = int(sys.argv[2]), sys.argv[3], float(sys.argv[4])
rng = random.Random(seed)
store = Store.open(sys.argv[1])
pieces = [random.Random(n).randbytes(40 << 10) for n in range(40)]
end, n, lost, removed = time.time() + seconds, 0, 0, 0
while time.time() < end:
    if role == "gc":
        removed += Store.open(sys.argv[1]).gc().removed_packs
        n += 1
        continue
    data = [pieces[i] for i in rng.sample(range(40), 8)]
    name = f"{role}-{n}"
    with store.writer(name) as w:
        refs = []
        for piece in data:
            refs += w.put_bytes(piece, kind="file")
            if rng.random() < 0.2:
                w.flush()
        w.commit({"job_id": role, "data": {"chunks": refs}})
    if store.fetch_bytes(refs) != b"".join(data):
        sys.exit("wrong bytes")
    n += 1
    if n % 4 == 0:
        store.prune(role, 2)
print(n, removed)
"""
        roles = ["a", "b", "c", "gc", "gc"]
        runs = [
            subprocess.Popen(
                [sys.executable, "-c", program, str(root), str(seed), role, "6"],
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )
            for seed, role in enumerate(roles)
        ]  # fmt: skip
        outputs = [run.communicate(timeout=120) for run in runs]
        for run, (_, err) in zip(runs, outputs, strict=True):
            assert run.returncode == 0, err[-2000:]
        uploads = sum(int(out.split()[0]) for out, _ in outputs[:3])
        removed = sum(int(out.split()[1]) for out, _ in outputs[3:])
        store = Store.open(str(root))
        images = store.images()
        assert uploads >= 12
        assert len(images) >= 6
        for image in images:
            assert store.verify(image.id, full=True).whole
        store.gc()
        for image in images:
            assert store.verify(image.id, full=True).whole
            store.remove_image(image.id)
        store.gc()
        assert not files(root, "packs")
        assert not files(root, "tmp")
        assert not files(root, "gc")
        print(f"{uploads} uploads, {removed} packs removed by the other collectors")


# ---- speed ----


def test_incompressible_data_is_not_compressed(monkeypatch: pytest.MonkeyPatch) -> None:
    codec, body = chunker.compress(memoryview(noise(0, MIB)))
    assert codec == chunker.RAW
    assert len(body) == MIB
    codec, body = chunker.compress(memoryview(b"abcd" * (MIB // 4)))
    assert codec == chunker.ZSTD
    assert chunker.decompress(codec, body, MIB) == b"abcd" * (MIB // 4)
    assert chunker.decompress(codec, body, MIB - 1) is None
    assert chunker.decompress(7, body, MIB) is None


def test_fault_specs() -> None:
    for bad in ("x:0", "x:boom", "x:1:2:what"):
        with pytest.raises(ValueError, match="neither a count"):
            fault.arm(bad)
    fault.arm("here:2:enospc")
    fault.point("here")
    fault.point("there")
    with pytest.raises(OSError, match="injected at here"):
        fault.point("here")
    fault.point("here")


def test_errors_are_one_line(store: Store) -> None:
    for error in (
        StoreFull("write", "a pack", "No space\nleft"),
        StaleJob("j", 1, 2),
        MissingChunk("ab" * 32, "x", "old", "why"),
        DamagedChunk("ab" * 32).about("y", None),
    ):
        assert "\n" not in str(error)
        assert isinstance(error, StoreError | ImageError)
