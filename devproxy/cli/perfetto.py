# SPDX-License-Identifier: Apache-2.0
"""Writes a trace that https://ui.perfetto.dev opens: protobuf, with the field numbers of Perfetto's public trace format.

Only what is needed of that format is described here: packets with track descriptors and track events. Times are ns.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, BinaryIO

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_U64, _U32, _I32, _TEXT, _MESSAGE = 4, 13, 5, 9, 11  # FieldDescriptorProto.Type
_PACKAGE = "devproxy.perfetto"
# message: {field: (number, type, message's name, repeated)}
_FORMAT: dict[str, dict[str, tuple[int, int, str, bool]]] = {
    "ProcessDescriptor": {"pid": (1, _I32, "", False), "process_name": (6, _TEXT, "", False)},
    "TrackDescriptor": {
        "uuid": (1, _U64, "", False),
        "name": (2, _TEXT, "", False),
        "process": (3, _MESSAGE, "ProcessDescriptor", False),
        "parent_uuid": (5, _U64, "", False),
    },
    "DebugAnnotation": {
        "uint_value": (3, _U64, "", False),
        "string_value": (6, _TEXT, "", False),
        "name": (10, _TEXT, "", False),
    },
    "TrackEvent": {
        "debug_annotations": (4, _MESSAGE, "DebugAnnotation", True),
        "type": (9, _I32, "", False),
        "track_uuid": (11, _U64, "", False),
        "categories": (22, _TEXT, "", True),
        "name": (23, _TEXT, "", False),
    },
    "TracePacket": {
        "timestamp": (8, _U64, "", False),
        "trusted_packet_sequence_id": (10, _U32, "", False),
        "track_event": (11, _MESSAGE, "TrackEvent", False),
        "track_descriptor": (60, _MESSAGE, "TrackDescriptor", False),
    },
    "Trace": {"packet": (1, _MESSAGE, "TracePacket", True)},
}
_BEGIN, _END = 1, 2  # TrackEvent.Type
_SEQUENCE = 1


def _trace_class() -> Any:
    file = descriptor_pb2.FileDescriptorProto(
        name="devproxy/perfetto.proto", package=_PACKAGE, syntax="proto2"
    )
    for message, fields in _FORMAT.items():
        made = file.message_type.add(name=message)
        for name, (number, kind, of, repeated) in fields.items():
            field = made.field.add(name=name, number=number, label=3 if repeated else 1)
            field.type = kind  # type: ignore[assignment, unused-ignore]
            if of:
                field.type_name = f".{_PACKAGE}.{of}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.Trace"))


class Writer:
    """Tracks, and slices on them. Slices of one track must not overlap."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._class = _trace_class()
        self._part = self._class()
        self._tracks = 0

    def process(self, name: str, pid: int) -> int:
        """Returns its track, for track()."""
        self._tracks += 1
        about = self._part.packet.add(trusted_packet_sequence_id=_SEQUENCE).track_descriptor
        about.uuid = self._tracks
        about.process.pid = pid
        about.process.process_name = name
        return self._tracks

    def track(self, name: str, parent: int = 0) -> int:
        """Returns it, for slice()."""
        self._tracks += 1
        about = self._part.packet.add(trusted_packet_sequence_id=_SEQUENCE).track_descriptor
        about.uuid, about.name = self._tracks, name
        if parent:
            about.parent_uuid = parent
        return self._tracks

    def slice(
        self,
        track: int,
        category: str,
        name: str,
        begin_ns: int,
        end_ns: int,
        facts: Mapping[str, int] | None = None,
    ) -> None:
        packet = self._part.packet.add(timestamp=begin_ns, trusted_packet_sequence_id=_SEQUENCE)
        event = packet.track_event
        event.type, event.track_uuid, event.name = _BEGIN, track, name
        event.categories.append(category)
        for key, value in (facts or {}).items():
            event.debug_annotations.add(name=key, uint_value=value)
        packet = self._part.packet.add(timestamp=end_ns, trusted_packet_sequence_id=_SEQUENCE)
        packet.track_event.type, packet.track_event.track_uuid = _END, track
        if len(self._part.packet) > 10_000:
            self.flush()

    def flush(self) -> None:
        """Parts of a repeated field behind one another are that field."""
        self._file.write(self._part.SerializeToString())
        self._part = self._class()
