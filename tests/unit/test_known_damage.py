# SPDX-License-Identifier: Apache-2.0
"""Damage that somebody has found is known to whoever looks next: which image is offered, shown as whole, and kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from devproxy.checkpoint import store as stores
from devproxy.checkpoint.chunker import KIB, digest
from devproxy.checkpoint.errors import DamagedChunk
from devproxy.checkpoint.store import Store
from devproxy.cli import ctl
from devproxy.control.stores import find_image
from devproxy.errors import Refused
from tests.unit.test_distrust import notes, rot
from tests.unit.test_store import files, load, noise, save

CHUNK = 64 * KIB  # of kind host, as save() has it

pytestmark = pytest.mark.usefixtures("own_key")


def images(root: Path, store: Store, *shares: tuple[int, ...]) -> list[Path]:
    """Images i1, i2, ... of these chunks, and the pack that each has added."""
    made: list[Path] = []
    for number, share in enumerate(shares, 1):
        data = b"".join(noise(seed, CHUNK) for seed in share)
        save(store, f"i{number}", data, created=float(number), epoch=1, sequence=number)
        made += set(files(root, "packs", ".pack")) - set(made)
    return made


def shown(store: Store) -> dict[str, bool]:
    """As somebody sees it who has just opened the store."""
    return {image.id: image.whole for image in Store.open(store.url).images()}


def name(seed: int) -> str:
    return digest(noise(seed, CHUNK)).hex()


def test_an_image_with_the_same_damage_is_not_offered(store: Store, root: Path) -> None:
    [shared, _] = images(root, store, (1, 2), (1, 2, 3))
    rot(shared)
    fresh = Store.open(store.url)
    with pytest.raises(DamagedChunk):
        load(fresh, "i2")
    assert fresh.older_whole("i2") is None
    assert shown(store) == {"i1": False, "i2": False}
    [first, _] = Store.open(store.url).images()
    assert first.noted
    assert first.problem == (
        f"chunk {name(1)[:16]} of data:the data is damaged in pack {shared.stem},"
        " as was found before (devproxy images verify looks again)"
    )


def test_what_is_offered_was_read(
    store: Store, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The image between has damage of its own, which nobody has met."""
    monkeypatch.setattr(stores, "SAID_BYTES", 1)  # as if reading them took long
    [_, middle, new] = images(root, store, (1,), (1, 2), (1, 3))
    rot(middle)
    rot(new)
    fresh = Store.open(store.url)
    said: list[str] = []
    assert fresh.older_whole("i3", said.append) == "i1"
    assert said == [f"reading image {i}, which is older: is it whole?" for i in ("i2", "i1")]
    assert shown(store) == {"i1": True, "i2": False, "i3": True}, "nobody has read the last one"


def test_a_pack_may_be_good_for_others(store: Store, root: Path) -> None:
    """Of the pack one chunk is damaged, and another one is not."""
    [pack, _] = images(root, store, (1, 2), (2, 3))
    rot(pack, 5)
    assert not Store.open(store.url).verify("i1", full=True).whole
    assert notes(root) == [pack.stem]
    assert shown(store) == {"i1": False, "i2": True}


def test_all_damage_of_a_pack_is_noted(store: Store, root: Path) -> None:
    """Also what is met behind the pack's first, now or by another process."""
    [pack, _, _] = images(root, store, (1, 2, 4), (2, 3), (4, 5))
    rot(pack, 5)
    with pytest.raises(DamagedChunk):
        load(Store.open(store.url), "i1")
    rot(pack, CHUNK + 5)
    assert shown(store) == {"i1": False, "i2": True, "i3": True}
    assert not Store.open(store.url).verify("i2", full=True).whole
    assert shown(store) == {"i1": False, "i2": False, "i3": True}
    note = json.loads((root / "distrusted" / pack.stem).read_text())
    assert {note["chunk"], *note["more"]} == {name(1), name(2)}


def test_damage_that_is_mended_is_forgotten(store: Store, root: Path) -> None:
    """Somebody has put the pack back from elsewhere. Who looks at one of two chunks knows nothing of the other."""
    [pack, _] = images(root, store, (1, 2), (2, 3))
    good = pack.read_bytes()
    rot(pack, 5)
    rot(pack, CHUNK + 5)
    assert not Store.open(store.url).verify("i1", full=True).whole
    assert shown(store) == {"i1": False, "i2": False}
    same = Store.open(store.url)
    same.verify("i1", full=True)
    pack.write_bytes(good)
    assert shown(store) == {"i1": False, "i2": False}, "nobody has looked"
    assert Store.open(store.url).verify("i2", full=True).whole
    assert shown(store) == {"i1": False, "i2": True}
    assert notes(root) == [pack.stem]
    assert same.verify("i1", full=True).whole
    assert {image.id: image.whole for image in same.images()} == {"i1": True, "i2": True}
    assert notes(root) == []


def test_a_note_of_any_kind(store: Store, root: Path) -> None:
    """It says that the pack is damaged, and not where."""
    [pack, _] = images(root, store, (1,), (1, 2))
    (root / "distrusted").mkdir()
    for text in ("", "{}", "[1]", '{"chunk": 5}', '{"chunk": "xy"}', "[" * 100_000):
        (root / "distrusted" / pack.stem).write_text(text)
        assert shown(store) == {"i1": True, "i2": True}, text[:20]
        assert Store.open(store.url).verify("i1", full=True).whole
    (root / "distrusted" / pack.stem).write_text(json.dumps({"chunk": name(1)}))  # as it was first
    assert shown(store) == {"i1": False, "i2": False}
    assert Store.open(store.url).verify("i1", full=True).whole
    assert shown(store) == {"i1": True, "i2": True}
    rot(pack)
    assert not Store.open(store.url).verify("i1", full=True).whole
    assert shown(store) == {"i1": False, "i2": False}


def test_what_is_stored_anew_makes_an_image_whole(store: Store, root: Path) -> None:
    [pack] = images(root, store, (1, 2))
    rot(pack)
    assert not Store.open(store.url).verify("i1", full=True).whole
    save(Store.open(store.url), "i2", noise(1, CHUNK) + noise(2, CHUNK), epoch=1, sequence=2)
    assert shown(store) == {"i1": True, "i2": True}
    assert load(Store.open(store.url), "i1") == noise(1, CHUNK) + noise(2, CHUNK)


def test_prune_keeps_the_last_whole_one(store: Store, root: Path) -> None:
    made = images(root, store, (1,), (2,), (3,))
    rot(made[1])
    rot(made[2])
    for image in ("i2", "i3"):
        Store.open(store.url).verify(image, full=True)
    assert Store.open(store.url).prune("job", 1) == []
    assert shown(store) == {"i1": True, "i2": False, "i3": False}


def test_prune_removes_known_damage_when_its_time_comes(store: Store, root: Path) -> None:
    """Not at once, as it does with what can never be whole: a note may be of a disk that reads again."""
    made = images(root, store, (1,), (2,), (3,), (4,))
    rot(made[1])
    Store.open(store.url).verify("i2", full=True)
    assert Store.open(store.url).prune("job", 3) == []
    assert Store.open(store.url).prune("job", 2) == ["i1", "i2"]
    assert shown(store) == {"i3": True, "i4": True}


def test_which_image_is_meant(store: Store, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A job's newest whole one, and that it is not the newest is said; the damaged one is refused by its name."""
    made = images(root, store, (1,), (2,))
    rot(made[1])
    Store.open(store.url).verify("i2", full=True)
    fresh = Store.open(store.url)
    capsys.readouterr()
    for text in ("j", "latest"):
        assert find_image([fresh], text)[1].id == "i1"
        assert (
            f"image i2 is newer than i1, and not whole: chunk {name(2)[:16]} of data:the data is damaged"
            in capsys.readouterr().err
        )
    assert find_image([fresh], "i1")[1].id == "i1"
    assert "newer" not in capsys.readouterr().err
    with pytest.raises(Refused, match="image i2 is not whole: .* devproxy restore i1$"):
        find_image([fresh], "i2")


def test_no_image_of_a_job_is_whole(store: Store, root: Path) -> None:
    [pack, _] = images(root, store, (1,), (1, 2))
    rot(pack)
    store.verify("i1", full=True)
    for text in ("j", "latest", "i"):
        with pytest.raises(
            Refused, match=f"no whole image '{text}' .*: image i2 is not whole: chunk"
        ):
            find_image([store], text)


def test_a_whole_copy_in_another_store_counts(store: Store, root: Path, tmp_path: Path) -> None:
    other = Store.open(str(tmp_path / "other"))
    [pack] = images(root, store, (1,))
    images(tmp_path / "other", other, (1,))
    rot(pack)
    store.verify("i1", full=True)
    place, image = find_image([store, other], "i1")
    assert (place.url, image.whole) == (other.url, True)


def test_it_is_shown(store: Store, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    [shared, _] = images(root, store, (1,), (1, 2))
    rot(shared)
    Store.open(store.url).verify("i1", full=True)
    assert ctl._main(["images", "--store", str(root), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["images"]
    assert [(i["whole"], i["noted"]) for i in found] == [(False, True)] * 2
    assert f"damaged in pack {shared.stem}, as was found before" in found[0]["problem"]
