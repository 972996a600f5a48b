# SPDX-License-Identifier: Apache-2.0
"""Streams and events: torch._C._CudaStreamBase, _CudaEventBase, and which stream is current."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any


def names(C: Any, sc: Any) -> dict[str, object]:
    class _CudaStreamBase(C.Stream):  # type: ignore[misc]
        def __new__(
            cls,
            priority: int = 0,
            stream_id: int = 0,
            device_index: int = 0,
            device_type: int = 0,
            stream_ptr: int = 0,
        ) -> Any:
            if stream_ptr:
                stream_id, device_index, device_type = sc.external_stream(stream_ptr, -1)
            elif not (stream_id or device_index or device_type):
                device_index = sc.get_device()
                stream_id, device_type = sc.pool_stream(device_index, priority), 1
            return C.Stream.__new__(
                cls, stream_id=stream_id, device_index=device_index, device_type=device_type
            )

        @property
        def cuda_stream(self) -> int:
            return int(sc.raw_stream(self.device_index, self.stream_id))

        @property
        def priority(self) -> int:
            return int(sc.stream_priority(self.device_index, self.stream_id))

        @staticmethod
        def priority_range() -> tuple[int, int]:
            least, greatest = sc.stream_priority_range()
            return (least, greatest)

    class _CudaEventBase(C.Event):  # type: ignore[misc]
        def __new__(
            cls,
            enable_timing: bool = False,
            blocking: bool = False,
            interprocess: bool = False,
            external: bool = False,
        ) -> Any:
            if interprocess:
                raise RuntimeError(
                    "events shared between processes are not supported behind devproxy"
                )
            return C.Event.__new__(
                cls,
                "cuda",
                enable_timing=enable_timing,
                blocking=blocking,
                interprocess=interprocess,
            )

        @property
        def cuda_event(self) -> int:
            return int(self.event_id)

        def elapsed_time(self, end_event: Any) -> float:
            index = self.device.index if self.device is not None else None  # None: not recorded yet
            device = -1 if index is None else index
            return float(sc.elapsed_ms(self.cuda_event, end_event.cuda_event, device))

        @classmethod
        def from_ipc_handle(cls, device: object, handle: object) -> Any:
            raise RuntimeError("events shared between processes are not supported behind devproxy")

        def ipc_handle(self) -> bytes:
            raise RuntimeError("events shared between processes are not supported behind devproxy")

    def set_stream(stream_id: int, device_index: int, device_type: int) -> None:
        sc.set_stream(stream_id, device_index)

    def sync_debug_warns_once() -> Callable[[int], None]:
        warned: list[bool] = []

        def set_mode(mode: int) -> None:
            if not warned:  # in torch's own words
                warned.append(True)
                warnings.warn(
                    "Synchronization debug mode is a prototype feature and does not yet detect all synchronizing "
                    "operations",
                    stacklevel=3,
                )
            sc.set_sync_debug(mode)

        return set_mode

    return {
        "_CudaStreamBase": _CudaStreamBase,
        "_CudaEventBase": _CudaEventBase,
        "_cuda_getCurrentStream": lambda device: sc.current_stream(device),
        "_cuda_getDefaultStream": lambda device: sc.default_stream(device),
        "_cuda_getCurrentRawStream": lambda device: sc.raw_stream(
            device, sc.current_stream(device)[0]
        ),
        "_cuda_setStream": set_stream,
        "_cuda_getStreamFromExternal": lambda pointer, device: sc.external_stream(pointer, device),
        "_cuda_isCurrentStreamCapturing": lambda: sc.stream_is_capturing(),
        "_cuda_get_sync_debug_mode": lambda: sc.sync_debug(),
        "_cuda_set_sync_debug_mode": sync_debug_warns_once(),
    }
