# SPDX-License-Identifier: Apache-2.0
"""What is known of the files that a job has touched; `<state>/jobs/<job>.files.json` outlives everything but the disk."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass

from devproxy.checkpoint.files.look import State
from devproxy.errors import Refused

STATE_VERSION = 1


@dataclass(slots=True)
class Track:
    """One file. first: C, W or ?, as in FileEntry."""

    first: str
    mapped: bool = False
    noted: bool = False  # `state` has been looked at
    state: State = None
    tick: int = 0  # when it was last mentioned
    outsider_ns: int = 0  # somebody else closed it after writing
    unsure_ns: int = 0  # somebody who was gone when we looked did
    marked: bool = False  # the library knows that no undo copy is wanted


class Known:
    """What the job has touched, and how each file looked when note_state() ran last.

    journal_ino, journal_offset: how far the journal has been read. renames: of directories, in their order. tick: counts
    note_state(). alive_ns: when the job was seen last. Used under the tracker's lock.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.tracks: dict[str, Track] = {}
        self.renames: list[tuple[str, str]] = []
        self.journal_ino = 0
        self.journal_offset = 0
        self.tick = 0
        self.alive_ns = 0
        self.ended = False
        self._written = ""
        self._load()

    def _load(self) -> None:
        try:
            with open(self.path, encoding="utf-8") as file:
                data = json.load(file)
        except FileNotFoundError:
            return
        except ValueError:
            # A power cut in the middle; the image's own list and the journal remain.
            return
        if data.get("version") != STATE_VERSION:
            raise Refused(
                f"{self.path} is of version {data.get('version')}, this devproxy reads {STATE_VERSION}",
                "use the devproxy that wrote it, or remove the file: the image's own list is used then",
            )
        self.journal_ino, self.journal_offset = data["journal"]
        self.tick, self.ended = data["tick"], data["ended"]
        self.renames = [(a, b) for a, b in data["renames"]]
        self.alive_ns = os.stat(self.path).st_mtime_ns
        for path, (first, mapped, noted, state, outsider, unsure) in data["files"].items():
            self.tracks[path] = Track(first, mapped, noted, state, self.tick, outsider, unsure)

    def save(self, alive_ns: int, durable: bool = False) -> None:
        """The time of the file is `alive_ns`: an unchanged state costs one utime."""
        text = json.dumps(
            {
                "version": STATE_VERSION,
                "journal": [self.journal_ino, self.journal_offset],
                "tick": 0,
                "ended": self.ended,
                "renames": self.renames,
                "files": {
                    p: [t.first, t.mapped, t.noted, t.state, t.outsider_ns, t.unsure_ns]
                    for p, t in self.tracks.items()
                },
            },
            separators=(",", ":"),
        )
        if text != self._written or durable:
            temporary = f"{self.path}.new"
            with open(temporary, "w", encoding="utf-8") as file:
                os.fchmod(file.fileno(), 0o600)
                file.write(text)
                if durable:
                    file.flush()
                    os.fsync(file.fileno())
            os.replace(temporary, self.path)
            self._written = text
        os.utime(self.path, ns=(alive_ns, alive_ns))
        self.alive_ns = alive_ns

    def add(self, path: str, first: str) -> Track:
        """The file's track, made where there is none."""
        track = self.tracks.get(path)
        if track is None:
            track = self.tracks[path] = Track(first)
        elif track.first == "?" and first == "C":
            track.first = first
        track.tick = self.tick
        return track

    def directory_renamed(self, old: str, new: str) -> None:
        """Every file below has another name now, those too that the job never opened."""
        self.renames.append((old, new))
        self.add(old, "W")
        self.add(new, "C")
        for path in [p for p in self.tracks if p.startswith(old + "/")]:
            moved = self.add(new + path[len(old) :], "C")
            moved.mapped |= self.tracks[path].mapped
        for folder, folders, names in os.walk(new):
            for name in folders + names:
                path = os.path.join(folder, name)
                self.add(path, "C")
                self.add(old + path[len(new) :], "W")

    def remove(self) -> None:
        """The file; what is known stays in memory."""
        for path in (self.path, f"{self.path}.new"):
            try:
                os.unlink(path)
            except FileNotFoundError:
                pass
