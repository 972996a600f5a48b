# SPDX-License-Identifier: Apache-2.0
"""gRPC as a guest in devproxy-run: no fork handlers (others fork beside our threads), no lines on the job's stderr.

gRPC reads both settings when it is imported, so everybody here imports it from this module. They are taken back at once:
what devproxy-run starts later must not inherit them.
"""

from __future__ import annotations

import os

_SETTINGS = {"GRPC_ENABLE_FORK_SUPPORT": "0", "GRPC_VERBOSITY": "NONE"}
_before = {name: os.environ.get(name) for name in _SETTINGS}
os.environ.update(_SETTINGS)
import grpc  # noqa: E402

for _name, _value in _before.items():
    if _value is None:
        del os.environ[_name]
    else:
        os.environ[_name] = _value

__all__ = ["grpc"]
