# SPDX-License-Identifier: Apache-2.0
"""Removing what no image needs, while uploads may run. Why it cannot take a chunk from under an upload:

An upload (writer.py, Shelf.known_chunks)          A gc
  U1 writes its marker                               G1 writes its tombstone, empty; a second gc sees it and leaves
  U2 reads the tombstones                            G2 lists packs, then markers, then reads the manifests; from that
  U3 lists the packs, without those in U2               it chooses its victims
  U4 pins them: they are what it may rely on         G3 writes the victims into its tombstone
  U5 writes packs <its id>.<n>                       G4 reads the markers; gives up if a live one has no pins yet;
  U6 checks marker and packs                            spares what live ones pinned or own
  U7 writes the manifest                             G5 reads the manifests again, spares what new ones need
  U8 checks marker and packs, else takes the         G6 removes the victims, index first
     manifest back                                   G7 removes the tombstone
  U9 removes its marker

- An upload that begins (U1) before G4 is seen there: without pins nothing is removed, with pins they are spared.
- One that begins after G4 reads (U2) a tombstone that was written before (G3 < G4 < U1 < U2) and is not yet removed, or
  it lists (U3) after the removal was done. Either way it does not rely on a victim.
- One that ended (U9) before G4 wrote its manifest before (U7 < U9 < G4 < G5): G5 sees what it needs.
- Packs of a running upload carry its id and are spared (G4); a pack without an index whose upload is gone at G4 is
  looked up once more after G4, so it cannot be one that was finished meanwhile.
- An upload taken for dead (no heartbeat for ABANDONED_S, or its process is gone) loses its marker between G4 and G5. If
  it wakes up all the same: its manifest is there before G5, and G5 sees it; or it is written after G5, so U8 comes after
  the marker's removal, sees that, and takes the manifest back. Its own heartbeat cannot make the marker good again
  (Marker.exists).
- A gc that dies leaves a tombstone: uploads do not rely on its victims, which is only a loss of deduplication; the next
  gc removes it. A gc that sleeps looks at its own tombstone before each removal and gives up when that is too old.

The orders above need a store that is consistent: an object that was written is seen by every list and read that begins
later. A local file system is; S3 is. Of the victims only those are removed without which every referenced chunk still
has a place, whatever happened before: that check is the last word.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from devproxy.checkpoint import manifest as manifests
from devproxy.checkpoint import markers
from devproxy.checkpoint.chunker import ZERO
from devproxy.checkpoint.errors import ImageError, NoSuchImage, StoreError
from devproxy.checkpoint.markers import ABANDONED_S, TOMBSTONES, UPLOADS, Marker
from devproxy.checkpoint.packs import PackIndex, index_name, owner, pack_name
from devproxy.checkpoint.shelf import Shelf
from devproxy.checkpoint.writer import Writer, begin

# A pack with less than this share of live bytes is written anew.
REPACK_BELOW = 0.5


@dataclass
class GcReport:
    """What a gc did. busy: why it left something, or everything, for the next one."""

    removed_packs: int = 0
    removed_bytes: int = 0
    repacked_packs: int = 0
    uploads_ended: int = 0
    busy: list[str] = field(default_factory=list)


@dataclass
class _View:
    packs: dict[str, PackIndex]
    sizes: dict[str, int]
    half: set[str]
    damaged: set[str]
    doubted: set[str]
    live: set[bytes]


def collect(shelf: Shelf, abandoned_s: float = ABANDONED_S, repack: bool = True) -> GcReport:
    """Removes packs that no image references, and what dead uploads left. Raises StoreError.

    abandoned_s below ABANDONED_S is for tests: an upload believes itself alive for half of that.
    """
    report = GcReport()
    backend = shelf.backend
    tombstone = Marker(backend, TOMBSTONES, {"victims": []})  # G1
    try:
        for other in markers.read_all(backend, TOMBSTONES, abandoned_s):
            if other.id == tombstone.id:
                continue
            if other.alive:
                report.busy.append("another gc is running")
                return report
            markers.remove(backend, TOMBSTONES, other.id)
        _collect(shelf, tombstone, report, abandoned_s, repack)
        markers.remove_pins_of_none(backend, UPLOADS)
        if noted := shelf.noted_packs():
            shelf.drop_notes(set(noted) - _list_packs(shelf).keys())
        if verified := shelf.verified():
            shelf.drop_whole(verified.keys() - set(shelf.image_ids()))
        if hasattr(backend, "sweep"):
            backend.sweep()
    finally:
        tombstone.end()  # G7
    return report


def _collect(
    shelf: Shelf, tombstone: Marker, report: GcReport, abandoned_s: float, repack: bool
) -> None:
    backend = shelf.backend
    packs = _list_packs(shelf)  # G2
    first = markers.read_all(backend, UPLOADS, abandoned_s)
    view = _look(shelf, packs, report)
    if view is None:
        return
    spared = _spared(first)
    unreferenced = {
        pack for pack, index in view.packs.items() if not view.live.intersection(index.entries)
    }
    sparse = _sparse(view, spared) if repack else set()
    writer: Writer | None = None
    try:
        if sparse:
            writer = begin(shelf, f"gc-{tombstone.id}")
            sparse = _repack(shelf, writer, view, sparse, report)
        victims = (unreferenced | sparse | view.doubted | view.half) - {
            p for p in view.sizes if owner(p) in spared.owners
        }
        if not victims and all(upload.alive for upload in first):
            return
        tombstone.update(victims=sorted(victims))  # G3
        mine = writer.upload_id if writer else ""
        seen = [
            upload
            for upload in markers.read_all(backend, UPLOADS, abandoned_s)
            if upload.id != mine
        ]  # G4
        if any(upload.alive and upload.pins is None for upload in seen):
            report.busy.append("an upload has just begun")
            return
        spared = _spared(seen)
        victims -= spared.pins
        victims -= {pack for pack in victims if owner(pack) in spared.owners}
        now = _list_packs(shelf)
        victims -= {pack for pack in view.half if now.get(pack, (0, False))[1]}
        for upload in seen:
            if not upload.alive:
                markers.remove(backend, UPLOADS, upload.id)
                report.uploads_ended += 1
        view = _look(shelf, now, report)  # G5
        if view is None:
            return
        victims = _without_loss(view, victims)
        for pack in sorted(victims):  # G6
            if not tombstone.exists():
                report.busy.append("this gc was taken for dead")
                return
            backend.remove(index_name(pack))
            backend.remove(pack_name(pack))
            shelf.drop_notes([pack])
            shelf.forget(pack)
            report.removed_packs += 1
            report.removed_bytes += view.sizes.get(pack, 0)
        report.repacked_packs = len(sparse & victims)
    finally:
        if writer is not None:
            writer.abort()


@dataclass(frozen=True)
class _Spared:
    owners: frozenset[str]
    pins: frozenset[str]


def _spared(seen: list[markers.Seen]) -> _Spared:
    alive = [upload for upload in seen if upload.alive]
    pins = frozenset(pack for upload in alive for pack in upload.pins or ())
    return _Spared(frozenset(upload.id for upload in alive), pins)


def _list_packs(shelf: Shelf) -> dict[str, tuple[int, bool]]:
    """Pack -> (bytes, whether it has an index)."""
    entries = {entry.name: entry.size for entry in shelf.backend.list("packs")}
    found: dict[str, tuple[int, bool]] = {}
    for name, size in entries.items():
        stem, _, suffix = name.rpartition(".")
        if suffix == "pack":
            found[stem] = (size, f"{stem}.idx" in entries)
        elif suffix == "idx" and f"{stem}.pack" not in entries:
            found[stem] = (0, False)  # its pack was removed by hand: nothing can be read through it
    return found


def _look(shelf: Shelf, packs: dict[str, tuple[int, bool]], report: GcReport) -> _View | None:
    """The manifests and the indices of `packs`. None when a manifest cannot be read: what it needs is unknown."""
    live: set[bytes] = set()
    for image_id in shelf.image_ids():
        try:
            body = shelf.read_unauthenticated(image_id)
            with manifests.understood(image_id):
                for _, refs in manifests.chunk_lists(body):
                    live.update(bytes.fromhex(name) for name, _ in refs if name != ZERO)
        except NoSuchImage:
            continue
        except ImageError as error:
            report.busy.append(
                f"nothing is removed while this is so: {error.what}; remove that image if it is of no use"
            )
            return None
    indices: dict[str, PackIndex] = {}
    damaged: set[str] = set()
    for pack, (_, indexed) in packs.items():
        if indexed:
            index = shelf.pack_index(pack)
            if index is None:
                damaged.add(pack)  # stays: somebody may want to look at it
            else:
                indices[pack] = index
    half = {pack for pack, (_, indexed) in packs.items() if not indexed}
    doubted = shelf.doubted_packs() & indices.keys()
    sizes = {pack: size for pack, (size, _) in packs.items()}
    return _View(indices, sizes, half, damaged, doubted, live)


def _sparse(view: _View, spared: _Spared) -> set[str]:
    found: set[str] = set()
    for pack, index in view.packs.items():
        if pack in spared.pins or owner(pack) in spared.owners:
            continue
        live_bytes = sum(
            where.stored_bytes for hashed, where in index.entries.items() if hashed in view.live
        )
        if 0 < live_bytes < REPACK_BELOW * view.sizes[pack]:
            found.add(pack)
    return found


def _repack(
    shelf: Shelf, writer: Writer, view: _View, sparse: set[str], report: GcReport
) -> set[str]:
    """Copies the live chunks of the sparse packs; the packs of which everything was copied."""
    done: set[str] = set()
    for pack in sorted(sparse):
        whole = True
        for hashed, where in view.packs[pack].entries.items():
            if hashed not in view.live:
                continue
            body = shelf.read_chunk(hashed, where)
            if body is None:
                if pack in shelf.damaged:
                    report.busy.append(f"pack {pack} is damaged and stays as it is")
                whole = False
                break
            writer.append_body(where, hashed, body)
        if whole:
            done.add(pack)
    writer.flush()
    return done


def _without_loss(view: _View, victims: set[str]) -> set[str]:
    """The victims without which every referenced chunk still has a place in a pack that stays, by an index of ours.

    A pack that is doubted is no such place.
    """
    kept: set[bytes] = set()
    for pack, index in view.packs.items():
        if pack not in victims and index.ours and pack not in view.doubted:
            kept.update(view.live.intersection(index.entries))
    safe: set[str] = set()
    for pack in sorted(victims):
        found = view.packs.get(pack)
        needed = view.live.intersection(found.entries) if found else set()
        if needed <= kept:
            safe.add(pack)
        elif pack not in view.doubted:
            kept |= needed
    return safe


def check_keep(keep: int) -> None:
    if keep < 1:
        raise StoreError("prune", f"keep {keep}", "at least one image is kept")
