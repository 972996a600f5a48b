# SPDX-License-Identifier: Apache-2.0
"""The manifest: every kind of damage has its own name, and images of older formats stay readable."""

from __future__ import annotations

import json
import os
import random
import shutil
import stat
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from devproxy.checkpoint import image as images
from devproxy.checkpoint import key as keys
from devproxy.checkpoint import manifest as manifests
from devproxy.checkpoint.errors import (
    ImageError,
    TruncatedManifest,
    UnknownFormat,
    WrongAuthentication,
    WrongChecksum,
)
from devproxy.checkpoint.store import Store
from devproxy.errors import Refused

KEY = bytes(range(32))
BODY = {
    "format": 1,
    "image": "i",
    "job": "ünicode",
    "device": [{"name": "b", "chunks": [["ab" * 32, 5]]}],
}
GOLDEN = Path(__file__).parent.parent / "data" / "image-format-1"


def test_round_trip_and_any_json_tool_reads_it() -> None:
    data = manifests.encode(BODY, KEY)
    assert manifests.decode("i", data, KEY) == BODY
    assert json.loads(data)["body"] == BODY
    assert manifests.encode(dict(reversed(BODY.items())), KEY) == data, "canonical"
    assert list(manifests.chunk_lists(BODY)) == [("device[0]:b", [("ab" * 32, 5)])]


def test_every_truncation_is_named() -> None:
    data = manifests.encode(BODY, KEY)
    for size in range(len(data)):
        with pytest.raises(TruncatedManifest, match="manifest of image i ends after"):
            manifests.decode("i", data[:size], KEY)


def test_every_bit_flip_is_found() -> None:
    data = manifests.encode(BODY, KEY)
    for place in range(len(data)):
        for bit in range(8):
            bad = bytearray(data)
            bad[place] ^= 1 << bit
            with pytest.raises(ImageError) as caught:
                manifests.decode("i", bytes(bad), KEY)
            assert "\n" not in str(caught.value)
            if place >= data.index(b"\n") + 1:
                assert type(caught.value) is WrongChecksum


def test_wrong_key_and_a_forged_checksum() -> None:
    data = manifests.encode(BODY, KEY)
    with pytest.raises(WrongAuthentication, match="not signed with the key in /k"):
        manifests.decode("i", data, bytes(32), "/k")
    forged = manifests.encode({**BODY, "job": "evil"}, bytes(32))
    with pytest.raises(WrongAuthentication):
        manifests.decode("i", forged, KEY)


@pytest.mark.parametrize("version", [0, 3, 99, "1", 1.0, None, True])
def test_unknown_format_is_named_before_anything_else(version: object) -> None:
    data = manifests.encode(BODY, KEY).replace(
        b'"format":%d,"body"' % manifests.FORMAT,
        b'"format":%s,"body"' % json.dumps(version).encode(),
    )
    head, _, rest = data.partition(b"\n")
    head = json.loads(head + b"null}")
    head["format"] = version
    del head["body"]
    line = json.dumps(head).encode()[:-1] + b',"body":'
    with pytest.raises(UnknownFormat, match="which this devproxy does not know"):
        manifests.decode("i", line + b"\n" + rest, KEY)


@given(st.binary(max_size=300))
@settings(max_examples=300, deadline=None)
def test_noise_is_an_image_error(noise: bytes) -> None:
    with pytest.raises(ImageError):
        manifests.decode("i", noise, KEY)


@given(
    st.dictionaries(
        st.text(max_size=5),
        st.recursive(st.none() | st.integers() | st.text(max_size=9), st.lists, max_leaves=6),
    )
)
@settings(max_examples=100, deadline=None)
def test_any_body_comes_back(body: dict) -> None:
    assert manifests.decode("i", manifests.encode(body, KEY), KEY) == body


def test_a_name_that_is_no_utf8_comes_back() -> None:
    name = os.fsdecode(b"/data/\xff\xe4.txt")
    data = manifests.encode({"files": [{"path": name}]}, KEY)
    data.decode("utf-8")
    (file,) = manifests.decode("i", data, KEY)["files"]
    assert os.fsencode(file["path"]) == b"/data/\xff\xe4.txt"


def test_the_image_of_format_1_is_still_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The golden image was written by the first version; changing the format must not lose it."""
    shutil.copytree(GOLDEN, tmp_path / "g")
    key = tmp_path / "g" / "image.key"
    key.chmod(0o600)
    monkeypatch.setenv("DEVPROXY_KEY_FILE", str(key))
    before = {p: p.read_bytes() for p in GOLDEN.rglob("*") if p.is_file()}
    store = Store.open(str(tmp_path / "g" / "store"))
    [image] = store.images()
    assert (image.id, image.job, image.job_id, image.epoch, image.format) == (
        "golden",
        "train",
        "job-1",
        3,
        1,
    )
    assert store.verify("golden", full=True).whole
    body = store.read_manifest("golden")
    expected = body["expected"]
    assert store.fetch_bytes(body["file"]["chunks"]) == b"".join(b"%d\n" % i for i in range(30000))
    assert store.fetch_bytes(body["zeros"]["chunks"]) == bytes(100_000)
    noise = store.fetch_bytes(body["noise"]["chunks"])
    assert manifests.digest(noise).hex() == expected
    assert before, "the golden image is not in tests/data"


def test_the_image_of_format_2_is_still_understood(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its golden image has one tree with each kind of part; what is fetched is what was staged."""
    shutil.copytree(GOLDEN.with_name("image-format-2"), tmp_path / "g")
    key = tmp_path / "g" / "image.key"
    key.chmod(0o600)
    monkeypatch.setenv("DEVPROXY_KEY_FILE", str(key))
    store = Store.open(str(tmp_path / "g" / "store"))
    assert store.verify("golden", full=True).whole
    golden = images.load(store, "golden")
    (tree,) = golden.trees
    assert (golden.job, tree.host, tree.gpus, golden.gpus) == ("train", "a-host", [0], 1)
    assert (tree.criu, tree.facts) == ({"tcp": "close"}, {"gpus": [{}]})
    fetch = images.Fetch(
        store, tree, str(tmp_path / "s"), golden.staged_bytes, lambda done, total: None
    )
    fetch.device()
    assert sorted(os.listdir(tmp_path / "s")) == ["gpu0-1.dev", "gpu0.state.json"]
    fetch.processes()
    device = random.Random(2).randbytes(5000) + bytes(3000)
    assert (tmp_path / "s" / "gpu0-1.dev").read_bytes() == device
    assert (tmp_path / "s" / "criu" / "inventory.img").read_bytes() == b"inventory"
    (file,) = tree.files
    assert store.fetch_bytes(file.refs) == b"a line\n" * 3
    (library,) = golden.build["files"].values()
    assert store.fetch_bytes(library["chunks"]) == b"a library"


class TestKey:
    def test_made_once_private(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        name = tmp_path / "a" / "b" / "image.key"
        monkeypatch.setenv("DEVPROXY_KEY_FILE", str(name))
        key = keys.load()
        assert len(key) == 32 == len(set(range(32)))
        assert stat.S_IMODE(name.stat().st_mode) == 0o600
        assert stat.S_IMODE(name.parent.stat().st_mode) == 0o700
        assert keys.load() == key
        assert os.listdir(name.parent) == ["image.key"]

    @pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o620])
    def test_readable_by_others_is_refused(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int
    ) -> None:
        name = tmp_path / "k"
        name.write_bytes(bytes(32))
        name.chmod(mode)
        monkeypatch.setenv("DEVPROXY_KEY_FILE", str(name))
        with pytest.raises(Refused, match="can be read by others"):
            keys.load()

    @pytest.mark.parametrize("size", [0, 31, 33])
    def test_not_a_key(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
        name = tmp_path / "k"
        name.write_bytes(bytes(size))
        name.chmod(0o600)
        monkeypatch.setenv("DEVPROXY_KEY_FILE", str(name))
        with pytest.raises(Refused, match="has not 32 bytes"):
            keys.load()

    def test_another_users(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        name = tmp_path / "k"
        name.write_bytes(bytes(32))
        name.chmod(0o600)
        monkeypatch.setenv("DEVPROXY_KEY_FILE", str(name))
        monkeypatch.setattr(os, "geteuid", lambda: name.stat().st_uid + 1)
        with pytest.raises(Refused, match="belongs to user"):
            keys.load()

    def test_not_made_when_it_must_exist(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("DEVPROXY_KEY_FILE", str(tmp_path / "k"))
        with pytest.raises(Refused, match="does not exist"):
            keys.load(create=False)
