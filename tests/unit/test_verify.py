# SPDX-License-Identifier: Apache-2.0
"""`devproxy images verify`: what is damaged is named, what is whole is offered, and nothing is written but which images were read."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from devproxy import fault, records
from devproxy.checkpoint import chunker, packs
from devproxy.checkpoint.chunker import KIB
from devproxy.checkpoint.shelf import VERIFIED
from devproxy.checkpoint.store import Store
from devproxy.cli import ctl, jobs
from devproxy.errors import Refused
from devproxy.machine import show_time
from tests.unit.test_store import files, noise, save

CHUNK = 64 * KIB  # of kind host, as save() has it


pytestmark = pytest.mark.usefixtures("own_key")


def three(store: Store, root: Path) -> list[Path]:
    """Images j-1-a, j-2-b and j-3-c of job j, which share a chunk; each one's pack."""
    found: list[Path] = []
    for number, name in enumerate(("j-1-a", "j-2-b", "j-3-c"), 1):
        data = noise(0, CHUNK) + noise(number, 2 * CHUNK)
        save(store, name, data, created=float(number), epoch=1, sequence=number)
        found += set(files(root, "packs", ".pack")) - set(found)
    return found


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def snapshot(root: Path) -> dict[str, tuple[int, int, int]]:
    """The files, but for the notes of whole images."""
    return {
        str(path): (info.st_mtime_ns, info.st_size, info.st_ino)
        for path in root.rglob("*")
        if path.is_file() and VERIFIED not in path.parts
        for info in [path.lstat()]
    }


def run(*words: str) -> int:
    return ctl._main(["images", "verify", *words])


def test_whole_images(store: Store, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    three(store, root)
    before = snapshot(root)
    assert run("--store", str(root)) == 0
    assert snapshot(root) == before
    assert capsys.readouterr().out.splitlines() == [
        "image j-1-a is whole: 3 chunks, 192 KiB read",
        "image j-2-b is whole: 3 chunks, 192 KiB read (64.0 KiB of them for an image before)",
        "image j-3-c is whole: 3 chunks, 192 KiB read (64.0 KiB of them for an image before)",
        "job j: the newest whole image is j-3-c",
        f"store file://{root}: 3 image(s), 3 whole, 0 damaged; 0 damaged pack(s); 448 KiB read",
    ]


def test_a_flipped_byte(store: Store, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The newest image's own chunk: the one before it is offered."""
    pack = three(store, root)[2]
    flip(pack, CHUNK + 5)
    assert [image.whole for image in store.images()] == [True] * 3, "a quick look does not see it"
    assert run("j", "--store", str(root)) == 1
    out = capsys.readouterr().out.splitlines()
    chunk = chunker.digest(noise(3, 2 * CHUNK)[CHUNK:]).hex()[:16]
    assert out[2] == (
        f"image j-3-c is damaged: chunk {chunk} of data:the data is damaged in pack {pack.stem};"
        " 3 chunks, 192 KiB read (64.0 KiB of them for an image before)"
    )
    assert f"pack {pack.stem} is damaged: chunk {chunk} of it is damaged" in out
    assert "job j: the newest whole image is j-2-b" in out
    assert out[-1].startswith(f"store file://{root}: 3 image(s), 2 whole, 1 damaged; 1 damaged")


def test_a_chunk_of_all_images(
    store: Store, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flip(three(store, root)[0], 0)
    assert run("--store", str(root), "--json") == 1
    found = json.loads(capsys.readouterr().out)
    assert [image["whole"] for image in found["images"]] == [False] * 3
    assert [image["damaged_chunks"] for image in found["images"]] == [1] * 3
    assert found["stores"][0]["newest_whole"] == {"j": ""}
    assert found["stores"][0]["read_bytes"] == 7 * CHUNK


@pytest.mark.parametrize("size", [0, 2 * CHUNK - 1])
def test_a_short_pack(
    store: Store, root: Path, capsys: pytest.CaptureFixture[str], size: int
) -> None:
    pack = three(store, root)[1]
    pack.write_bytes(pack.read_bytes()[:size])
    assert run("--store", str(root)) == 1
    out = capsys.readouterr().out
    assert "image j-1-a is whole" in out
    assert "image j-2-b is damaged: chunk" in out
    more = " and 1 more" if size == 0 else ""
    assert f"is damaged in pack {pack.stem}{more}; 3 chunks" in out
    assert "image j-3-c is whole" in out
    assert f"pack {pack.stem} is damaged: it has {size} bytes, and {2 * CHUNK} were written" in out


def test_a_pack_that_is_too_long(
    store: Store, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each image can be restored, and yet something is wrong there."""
    pack = three(store, root)[1]
    pack.write_bytes(pack.read_bytes() + b"x")
    assert run("--store", str(root)) == 1
    out = capsys.readouterr().out
    assert "3 image(s), 3 whole, 0 damaged; 1 damaged pack(s)" in out
    assert f"pack {pack.stem} is damaged: it has {2 * CHUNK + 1} bytes" in out


def test_a_pack_that_is_gone(store: Store, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    three(store, root)[1].unlink()
    assert run("--store", str(root)) == 1
    assert "image j-2-b is damaged: chunk" in capsys.readouterr().out


def test_one_copy_of_two_is_damaged(
    store: Store, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = noise(1, CHUNK)
    one, two = store.writer("a"), Store.open(store.url).writer("b")  # neither knows of the other
    for writer in (one, two):
        refs = writer.put_bytes(data, kind="host")
        writer.commit({"job": "j", "data": {"chunks": refs}})
    first, second = files(root, "packs", ".pack")
    flip(first, 1)
    assert run("--store", str(root)) == 1
    out = capsys.readouterr().out
    assert "2 image(s), 2 whole, 0 damaged; 1 damaged pack(s)" in out
    assert f"pack {first.stem} is damaged" in out
    assert second.stem not in out


def test_one_image(store: Store, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Others are read only where it is damaged, the newest first, until one is whole."""
    made = three(store, root)
    assert run("--image", "j-2", "--store", str(root)) == 0
    out = capsys.readouterr().out
    assert "image j-2-b is whole" in out
    assert "job j" not in out
    assert "1 image(s), 1 whole" in out
    flip(made[1], 0)
    flip(made[2], 0)
    assert run("j", "--image", "j-2-b", "--store", str(root)) == 1
    out = capsys.readouterr().out
    assert "job j: the newest whole image is j-1-a" in out
    assert "image j-3-c" not in out, "nobody asked for it"


def test_a_manifest_that_cannot_be_read(
    store: Store, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    three(store, root)
    manifest = root / "images" / "j-3-c" / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:-9])
    (root / "images" / "a file").write_text("x")
    (root / "packs" / "notes.txt").write_text("x")
    assert run("j", "--store", str(root)) == 1
    out, err = capsys.readouterr()
    assert "image j-3-c is damaged: the manifest of image j-3-c ends after" in out
    assert "job j: the newest whole image is j-2-b" in out
    assert f"1 thing(s) among the images of file://{root} are none: 'a file'" in err
    assert f"1 thing(s) among the packs of file://{root} are none: 'notes.txt'" in err


def test_bad_input(store: Store, root: Path) -> None:
    three(store, root)
    at = ["--store", str(root)]
    for words, why in (
        (["k", *at], "no image of job 'k'"),
        (["j", "k", *at], "takes one job"),
        (["--image", "x", *at], "there is no image 'x'"),
        (["--image", "j-", *at], "is one of 3 images"),
        (["k", "--image", "j-1", *at], "image j-1-a is of job 'j', not of 'k'"),
        (["--store", str(root / "not")], "there is no store"),
    ):
        with pytest.raises(Refused, match=why) as caught:
            run(*words)
        assert caught.value.exit_code == 2
    for words, why in (
        (["--image", "x"], "images list takes no --image"),
        (["gc", "--for", "1s"], "images gc takes no --for"),
        (["verify", "--image", "j-1", "--for", "1s"], "images verify --image takes no --for"),
        (["verify", "--for", "soon"], "'soon' is not a time"),
    ):
        with pytest.raises(Refused, match=why):
            ctl._main(["images", *words])


def test_an_image_that_goes_meanwhile(
    store: Store, root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = three(store, root)
    plain = fault.point

    def point(name: str) -> None:
        if name == "store_read_chunk" and (root / "images" / "j-2-b").exists():
            shutil.rmtree(root / "images" / "j-2-b")
            made[1].unlink()
        plain(name)

    monkeypatch.setattr(fault, "point", point)
    assert run("--store", str(root)) == 0
    out = capsys.readouterr().out
    assert "image j-2-b was removed meanwhile" in out
    assert "2 image(s), 2 whole" in out


def test_an_empty_store_gets_nothing(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root.mkdir()
    assert run("--store", str(root)) == 0
    assert capsys.readouterr().out == "no images\n"
    assert not list(root.iterdir())
    assert not os.path.lexists(os.environ["DEVPROXY_KEY_FILE"])


def noted(root: Path) -> list[str]:
    return [path.name for path in files(root, VERIFIED)]


def test_what_was_read_is_known(
    store: Store, root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until the image goes, or is found damaged."""
    made = three(store, root)
    at = ["--store", str(root)]
    assert store.verified() == {}
    assert run("--image", "j-2", *at) == 0
    [read] = store.verified().items()
    assert read[0] == "j-2-b" and abs(read[1] - time.time()) < 60
    capsys.readouterr()
    assert ctl._main(["images", *at, "--json"]) == 0
    shown = {i["id"]: i["verified"] for i in json.loads(capsys.readouterr().out)["images"]}
    assert shown == {"j-1-a": 0, "j-2-b": read[1], "j-3-c": 0}
    assert ctl._main(["images", *at]) == 0
    assert show_time(read[1]) in capsys.readouterr().out
    monkeypatch.setattr(records, "read", lambda name: {"stores": [store.url]})
    assert jobs._verified("j") == (
        f"verified by reading every chunk: 1 of 3 images, the last one at {show_time(read[1])}"
    )
    flip(made[1], 0)
    assert run("--image", "j-2", *at) == 1
    assert noted(root) == ["j-3-c"], "read to be offered"
    flip(made[2], 0)
    assert run("--image", "j-3", *at) == 1
    assert noted(root) == ["j-1-a"]
    flip(made[0], 0)
    assert run("--image", "j-1", *at) == 1
    assert jobs._verified("j") == "verified by reading every chunk: 0 of 3 images"
    flip(made[0], 0)
    assert run("--image", "j-1", *at) == 0
    store.remove_image("j-1-a")
    assert noted(root) == ["j-1-a"]
    store.gc()
    assert noted(root) == []


def test_odd_notes(store: Store, root: Path) -> None:
    """Things of another kind where notes are, and a file in the folder's place."""
    three(store, root)
    at = ["--store", str(root)]
    (root / VERIFIED / "j-1-a").mkdir(parents=True)
    (root / VERIFIED / "folder").mkdir()
    os.mkfifo(root / VERIFIED / "fifo")
    (root / VERIFIED / "link").symlink_to("/nowhere")
    for _ in range(2):
        assert run(*at) == 0 and run("--for", "10m", *at) == 0
        assert ctl._main(["images", *at]) == 0
        store.gc()
        assert [image.whole for image in store.images()] == [True] * 3
        shutil.rmtree(root / VERIFIED, ignore_errors=True)
        (root / VERIFIED).unlink(missing_ok=True)
        (root / VERIFIED).write_text("a file")


def test_a_part_at_a_time(store: Store, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The next call begins with those that nobody has read, and then with those that were read longest ago."""
    three(store, root)
    at = ["--store", str(root)]
    store.note_whole("j-1-a")
    os.utime(root / VERIFIED / "j-1-a", (5, 5))

    def read(time_: str) -> tuple[list[str], str]:
        assert run("--for", time_, *at) == 0
        lines = capsys.readouterr().out.splitlines()
        return [line.split()[1] for line in lines if " is whole: " in line], "\n".join(lines)

    found, said = read("0")
    assert found == [] and "left for the next `images verify --for`: 3 image(s)" in said
    with pytest.MonkeyPatch.context() as patch:
        clock = iter(range(100))
        patch.setattr("time.monotonic", lambda: float(next(clock)))
        found, said = read("2s")  # a look at the clock is a second
        assert found == ["j-2-b"] and "the newest whole image" not in said
        assert "1 image(s), 1 whole" in said and "2 image(s)" in said.splitlines()[-1]
        assert read("2s")[0] == ["j-3-c"]
        assert read("2s")[0] == ["j-1-a"]
    found, said = read("10m")
    assert sorted(found) == ["j-1-a", "j-2-b", "j-3-c"] and "left for" not in said
    assert "job j: the newest whole image is j-3-c" in said
    assert run("--for", "0", "--json", *at) == 0
    [summary] = json.loads(capsys.readouterr().out)["stores"]
    assert sorted(summary["left"]) == ["j-1-a", "j-2-b", "j-3-c"] and summary["newest_whole"] == {}


def test_a_store_that_cannot_be_written(store: Store, root: Path, tmp_path: Path) -> None:
    """As a copy on a disk that is mounted for reading: without the folders that were empty."""
    flip(three(store, root)[2], 0)
    for folder in ("tmp", "gc", "uploads"):
        (root / folder).rmdir()
    command = (
        f'mount --bind {root} {root} && mount -o remount,ro,bind {root} && exec "$0" -m devproxy.cli.ctl'
        f" images verify --store {root}"
    )
    prefix = ["unshare", "-m"] if os.geteuid() == 0 else ["unshare", "-mr"]
    done = subprocess.run(
        [*prefix, "sh", "-c", command, sys.executable], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1, done.stderr
    assert "job j: the newest whole image is j-2-b" in done.stdout
    assert done.stderr == ""


def test_an_index_that_contradicts_its_pack(
    store: Store, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Signed and false: it says where a chunk lies, and another chunk lies there."""
    first = three(store, root)[0]
    index = packs.decode_index(first.stem, first.with_suffix(".idx").read_bytes(), store.key)
    one, two = sorted(index.entries)[:2]
    a, b = index.entries[one], index.entries[two]
    rows = [
        packs.Record(name, where.offset, where.stored_bytes, where.raw_bytes, where.codec)
        for name, where in (index.entries | {one: b, two: a}).items()
    ]
    first.with_suffix(".idx").write_bytes(
        packs.encode_index(first.stem, index.pack_bytes, rows, store.key)
    )
    assert run("--store", str(root)) == 1
    assert "image j-1-a is damaged" in capsys.readouterr().out
