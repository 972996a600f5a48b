# SPDX-License-Identifier: Apache-2.0
"""The store on S3, against moto's server on 127.0.0.1: the same promises as in a folder."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from moto.server import ThreadedMotoServer

from devproxy import fault
from devproxy.checkpoint import object_backend
from devproxy.checkpoint import writer as writers
from devproxy.checkpoint.backends import open_backend
from devproxy.checkpoint.chunker import KIB, MIB
from devproxy.checkpoint.errors import (
    DamagedChunk,
    MissingChunk,
    StaleJob,
    StoreError,
    StoreGone,
    TruncatedManifest,
    WrongAuthentication,
)
from devproxy.checkpoint.manifest import Image
from devproxy.checkpoint.store import Store
from devproxy.cli import ctl
from devproxy.errors import Refused

BUCKET = "images"


@pytest.fixture(scope="module")
def server() -> Iterator[ThreadedMotoServer]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    yield server
    server.stop()


@pytest.fixture
def url(server: ThreadedMotoServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    host, port = server.get_host_and_port()
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "NO_PROXY": "127.0.0.1",
        "DEVPROXY_KEY_FILE": str(tmp_path / "image.key"),
    }.items():
        monkeypatch.setenv(name, value)
    fault.arm("")
    import s3fs

    fs = s3fs.S3FileSystem(endpoint_url=os.environ["AWS_ENDPOINT_URL"], skip_instance_cache=True)
    if not fs.exists(BUCKET):
        fs.mkdir(BUCKET)
    return f"s3://{BUCKET}/{tmp_path.name}"


def noise(seed: int, size: int) -> bytes:
    return random.Random(seed).randbytes(size)


def save(store: Store, image: str, data: bytes, **fields: object) -> Image:
    with store.writer(image) as writer:
        chunks = writer.put_bytes(data, kind="host")
        body = {"job": "j", "job_id": "job", "data": {"name": "the data", "chunks": chunks}}
        return writer.commit({**body, **fields})


def load(store: Store, image: str) -> bytes:
    return store.fetch_bytes(store.read_manifest(image)["data"]["chunks"], name="the data")


def test_round_trip_dedup_prune_gc(url: str) -> None:
    store = Store.open(url)
    data = noise(1, 5 * MIB) + bytes(MIB) + b"text " * 100_000
    save(store, "a", data)
    second = save(Store.open(url), "b", data[:-1] + b"x")
    assert second.sizes["new"] <= 64 * KIB
    fresh = Store.open(url)
    assert [(i.id, i.whole) for i in fresh.images()] == [("a", True), ("b", True)]
    assert load(fresh, "a") == data
    assert fresh.verify("b", full=True).whole
    assert fresh.prune("job", 1) == ["a"]
    assert load(fresh, "b") == data[:-1] + b"x"
    fresh.remove_image("b")
    assert fresh.gc().removed_packs > 0
    assert [fresh.backend.list(f) for f in ("packs", "images", "uploads", "gc")] == [[], [], [], []]


def test_a_broken_upload_goes_on(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writers, "PACK_BYTES", 512 * KIB)
    store = Store.open(url)
    save(store, "old", noise(0, MIB))
    data = noise(1, 4 * MIB)
    for point in ("store_pack_write:30", "store_index_write:5", "store_manifest_write"):
        fault.arm(point)
        with pytest.raises(StoreGone):
            save(store, "new", data)
        assert [(i.id, i.whole) for i in Store.open(url).images()] == [("old", True)]
    fault.arm("")
    image = save(Store.open(url), "new", data)
    assert image.sizes["deduplicated"] == 4 * MIB, "all packs were whole at the last break"
    assert load(store, "new") == data


def test_killed_in_the_middle_and_resumed(url: str) -> None:
    program = """
import random, sys
from devproxy.checkpoint import writer
writer.PACK_BYTES = 256 << 10
from devproxy.checkpoint.store import Store
with Store.open(sys.argv[1]).writer("a") as w:
    refs = w.put_bytes(random.Random(5).randbytes(4 << 20), kind="host")
    w.commit({"data": {"chunks": refs}})
"""
    env = {**os.environ, "DEVPROXY_FAULT": "store_index_write:6:kill"}
    assert (
        subprocess.run([sys.executable, "-c", program, url], env=env, timeout=90).returncode == -9
    )
    store = Store.open(url)
    assert store.images() == []
    data = noise(5, 4 * MIB)
    assert save(store, "a", data).sizes["deduplicated"] == 5 * 256 * KIB
    assert store.gc().uploads_ended == 1
    assert load(Store.open(url), "a") == data


def test_two_writers_at_once(url: str) -> None:
    data = noise(1, 3 * MIB)
    errors: list[BaseException] = []

    def one(name: str) -> None:
        try:
            save(Store.open(url), name, data + noise(hash(name) & 255, MIB), created=1.0)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=one, args=(name,)) for name in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    store = Store.open(url)
    store.gc()
    assert [store.verify(name, full=True).whole for name in ("a", "b")] == [True, True]
    assert load(store, "a")[: 3 * MIB] == data


def test_verify(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    store = Store.open(url)
    save(store, "j-1-a", noise(1, MIB), created=1.0)
    first = store.pack_ids()
    save(store, "j-2-b", noise(2, MIB), created=2.0)
    words = ["images", "verify", "j", "--store", url]
    assert ctl._main(words) == 0
    assert "2 image(s), 2 whole, 0 damaged" in capsys.readouterr().out
    [pack] = set(store.pack_ids()) - set(first)
    name = f"packs/{pack}.pack"
    data = bytearray(store.backend.read(name))
    data[MIB // 2] ^= 1
    store.backend.write(name, bytes(data), stage="damage")
    assert ctl._main(words) == 1
    out = capsys.readouterr().out
    assert "image j-1-a is whole" in out
    assert f"is damaged in pack {pack};" in out
    assert "job j: the newest whole image is j-1-a" in out
    assert save(Store.open(url), "j-3-c", noise(2, MIB)).sizes["new"] == MIB, "nobody relies on it"
    assert load(Store.open(url), "j-3-c") == noise(2, MIB)
    assert Store.open(url).gc().removed_packs == 1
    assert Store.open(url).noted_packs() == []
    assert ctl._main(words) == 0


def test_a_pack_that_was_overwritten_long_after(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its time says so, as far as the clocks of such a server can be believed."""
    data = noise(1, MIB)
    save(Store.open(url), "a", data)
    monkeypatch.setattr(object_backend.FsspecBackend, "clocks_ns", 0)
    time.sleep(1.1)  # the times are whole seconds
    store = Store.open(url)
    [pack] = store.pack_ids()
    name = f"packs/{pack}.pack"
    store.backend.write(name, store.backend.read(name), stage="touch")
    assert save(Store.open(url), "b", data).sizes["new"] == MIB
    assert save(Store.open(url), "c", data).sizes["new"] == 0


def test_epochs_are_exclusive(url: str) -> None:
    taken: list[int] = []

    def take() -> None:
        store = Store.open(url)
        for _ in range(5):
            taken.append(store.take_epoch("job"))

    threads = [threading.Thread(target=take) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(taken) == list(range(1, 16))
    with pytest.raises(StaleJob):
        save(Store.open(url), "a", b"x" * 100, epoch=3)


def test_damage_is_named(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store.open(url)
    save(store, "a", noise(1, MIB))
    [pack] = [e.name for e in store.backend.list("packs") if e.name.endswith(".pack")]
    whole = store.backend.read(f"packs/{pack}")
    bad = bytearray(whole)
    bad[len(bad) // 2] ^= 4
    store.backend.write(f"packs/{pack}", bytes(bad), stage="test")
    with pytest.raises(DamagedChunk, match="of the data is damaged in pack"):
        load(Store.open(url), "a")
    store.backend.remove(f"packs/{pack}")
    with pytest.raises(MissingChunk):
        load(Store.open(url), "a")
    name = "images/a/manifest.json"
    manifest = store.backend.read(name)
    store.backend.write(name, manifest[:-7], stage="test")
    with pytest.raises(TruncatedManifest):
        store.read_manifest("a")
    store.backend.write(name, manifest, stage="test")
    monkeypatch.setenv("DEVPROXY_KEY_FILE", str(tmp_path / "other.key"))
    with pytest.raises(WrongAuthentication):
        Store.open(url).read_manifest("a")


def test_no_bucket_and_no_server(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Refused, match="there is no bucket nobucket"):
        Store.open("s3://nobucket/x")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    with pytest.raises(StoreError) as caught:
        Store.open(url)
    assert isinstance(caught.value, StoreGone)


def test_a_server_that_fails_is_no_missing_bucket(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = object_backend.FsspecBackend._ask

    def fails(
        self: object_backend.FsspecBackend, call: str, *words: object, **more: object
    ) -> object:
        if call == "ls":
            return ask(self, call, *words, **more)
        raise OSError("the server said 500")

    monkeypatch.setattr(object_backend.FsspecBackend, "_ask", fails)
    with pytest.raises(StoreError, match="the server said 500"):
        Store.open(url)


@pytest.mark.parametrize("how", ["says nothing", "stops reading"])
def test_an_endpoint_that_hangs(url: str, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """It is asked again a few times, and then named."""
    monkeypatch.setattr(object_backend, "ANSWER_S", 0.3, raising=False)
    asked = []
    with socket.create_server(("127.0.0.1", 0)) as endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{endpoint.getsockname()[1]}")

        def take() -> None:
            with contextlib.suppress(OSError):
                while True:
                    asked.append(endpoint.accept()[0])

        threading.Thread(target=take, daemon=True).start()
        began = time.monotonic()
        with pytest.raises(StoreGone) as caught:
            if how == "says nothing":
                Store.open(url)
            else:
                monkeypatch.setattr(object_backend, "ANSWER_S", 60.0, raising=False)
                monkeypatch.setattr(object_backend, "REQUEST_S", 3.5, raising=False)
                monkeypatch.setattr(object_backend, "SLOWEST_BYTES_PER_S", 64 << 20, raising=False)
                store = open_backend(url)
                store.write("packs/x.pack", bytes(32 << 20), stage="upload")
        assert time.monotonic() - began < 15
        endpoint.shutdown(socket.SHUT_RDWR)
    assert url in str(caught.value)
    if how == "says nothing":
        assert len(asked) == object_backend.ATTEMPTS * object_backend.ROUNDS
        assert "Read timeout" in str(caught.value)
    else:
        assert "no end of it after 4 s" in str(caught.value)
    for one in asked:
        one.close()


def test_the_server_goes_away(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server of its own, stopped between the packs and the manifest."""
    own = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    own.start()
    host, port = own.get_host_and_port()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    try:
        store = Store.open(url)
        writer = store.writer("a")
        refs = writer.put_bytes(noise(1, MIB), kind="host")
    finally:
        own.stop()
    with pytest.raises(StoreGone, match="the store is gone"):
        writer.commit({"data": {"chunks": refs}})
    writer.abort()
