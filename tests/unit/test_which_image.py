# SPDX-License-Identifier: Apache-2.0
"""Which image a word means: through real stores, whatever their clocks say."""

from __future__ import annotations

from pathlib import Path

import pytest

from devproxy import api
from devproxy.checkpoint.store import Store
from devproxy.control import stores as stores_
from devproxy.control.stores import find_image
from devproxy.errors import Refused
from tests.unit.test_store import noise, save

HOUR = 3600.0
DATA = noise(0, 1000)

pytestmark = pytest.mark.usefixtures("own_key")


def put(store: Store, image: str, job_id: str, epoch: int, sequence: int, created: float) -> None:
    save(store, image, DATA, job=job_id, epoch=epoch, sequence=sequence, created=created)


def meant(stores: list[Store], text: str) -> str:
    return find_image(stores, text)[1].id


@pytest.fixture
def other(store: Store, tmp_path: Path) -> Store:
    return Store.open(str(tmp_path / "other"))


@pytest.mark.parametrize("text", ["j", "latest"])
def test_a_clock_that_was_set_back(store: Store, text: str) -> None:
    """Also behind a restore, which begins a new epoch and counts anew."""
    put(store, "first", "ab", 1, 1, 9 * HOUR)
    put(store, "second", "ab", 1, 2, 8 * HOUR)
    assert meant([store], text) == "second"
    put(store, "third", "ab", 2, 1, 7 * HOUR)
    assert meant([store], text) == "third"


def test_jobs_of_one_name_go_by_their_clocks(store: Store) -> None:
    """Nothing else is common to them. Each one's own images keep their order."""
    put(store, "old-1", "cd", 3, 8, 5 * HOUR)
    put(store, "new-1", "ab", 1, 1, 9 * HOUR)
    put(store, "new-2", "ab", 1, 2, 8 * HOUR)
    assert meant([store], "j") == meant([store], "latest") == "new-2"
    put(store, "old-2", "cd", 3, 9, 10 * HOUR)
    assert meant([store], "j") == meant([store], "latest") == "old-2"


def test_each_store_counts_epochs_of_its_own(store: Store, other: Store) -> None:
    """A job was restored from a copy of its store, and given up there; the first one went on for longer."""
    for place in (store, other):
        put(place, "one", "ab", 1, 1, 1 * HOUR)
    put(other, "aside", "ab", 2, 1, 2 * HOUR)
    put(store, "two", "ab", 1, 2, 9 * HOUR)
    put(store, "three", "ab", 1, 3, 8 * HOUR)
    for stores in ([store, other], [other, store]):
        place, image = find_image(stores, "j")
        assert (place.url, image.id) == (store.url, "three")
        assert meant(stores, "latest") == "three"


def test_of_two_stores_with_clocks_alike_the_later_epoch_counts(store: Store, other: Store) -> None:
    """The clock was set back before the job went on from a copy of its store."""
    for place in (store, other):
        put(place, "one", "ab", 1, 1, 9 * HOUR)
    put(other, "two", "ab", 2, 1, 8 * HOUR)
    for stores in ([store, other], [other, store]):
        assert meant(stores, "j") == meant(stores, "latest") == "two"


def test_the_list_of_a_program_has_the_same_order(
    store: Store, other: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, "first", "ab", 1, 1, 9 * HOUR)
    put(store, "second", "ab", 1, 2, 8 * HOUR)
    put(other, "of-another", "cd", 1, 1, 5 * HOUR)
    monkeypatch.setattr(stores_, "open_stores", lambda given: [store, other])
    listed = [image.id for image in api.Client().images()]
    assert listed == ["of-another", "first", "second"]


@pytest.mark.parametrize("text", ["j", "latest", "one"])
def test_an_image_of_another_key_is_not_called_absent(
    store: Store, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, "one", "ab", 1, 1, 1 * HOUR)
    other = tmp_path / "other.key"
    other.write_bytes(bytes(32))
    other.chmod(0o600)
    monkeypatch.setenv("DEVPROXY_KEY_FILE", str(other))
    with pytest.raises(
        Refused, match=r"not signed with|signed with the key in .*other\.key; 1 "
    ) as refused:
        find_image([Store.open(store.url)], text)
    assert "DEVPROXY_KEY_FILE" in refused.value.remedy
