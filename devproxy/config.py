"""Every DEVPROXY_* variable of the Python side, typed, in one place.

| variable | who sets it | meaning |
|---|---|---|
| DEVPROXY_JOB_DIR | devproxy-run, for the job | folder of the job: sockets and segments |
| DEVPROXY_GPUS | devproxy-run, for the job | number of GPUs, 1 or more |
| DEVPROXY_DEVICE | devproxy-run, for the job | soft or cuda |
| DEVPROXY_LIB | user, then devproxy-run for the job | folder of the client libraries and the server |
| DEVPROXY_SERVER | user | another server program, instead of the one in DEVPROXY_LIB |
| DEVPROXY_SHM_DIR | user | a tmpfs to use instead of /dev/shm |
| DEVPROXY_START_TIMEOUT_S | user | seconds until a server that is not ready counts as failed (30) |
| DEVPROXY_SYSROOT | tests | folder that stands in for / when the machine's devices are looked for |

DEVPROXY_LOG and DEVPROXY_STRICT are read by the client library and the server.
"""

from __future__ import annotations

import os

from devproxy.errors import Refused

JOB_DIR = "DEVPROXY_JOB_DIR"
GPUS = "DEVPROXY_GPUS"
DEVICE = "DEVPROXY_DEVICE"
LIB = "DEVPROXY_LIB"
# What a nested devproxy-run, and a server, must not inherit from the job around it.
OF_THE_JOB = (JOB_DIR, GPUS, DEVICE)

PACKAGE_DIR = os.path.dirname(os.path.abspath(__file__))


def lib_dir() -> str:
    """Folder of libcuda.so.1 and devproxy-server: DEVPROXY_LIB, the wheel's, or the checkout's build/lib."""
    if given := os.environ.get(LIB):
        return os.path.abspath(given)
    packaged = os.path.join(PACKAGE_DIR, "lib")
    if os.path.exists(os.path.join(packaged, "devproxy-server")):
        return packaged
    return os.path.join(os.path.dirname(PACKAGE_DIR), "build", "lib")


def server_path() -> str:
    return os.environ.get("DEVPROXY_SERVER") or os.path.join(lib_dir(), "devproxy-server")


def shm_dir() -> str:
    return os.environ.get("DEVPROXY_SHM_DIR") or "/dev/shm"


def sysroot() -> str:
    return os.environ.get("DEVPROXY_SYSROOT") or "/"


def start_timeout_s() -> float:
    """Raises Refused when the variable is not a positive number."""
    text = os.environ.get("DEVPROXY_START_TIMEOUT_S") or "30"
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 86400:
        raise Refused(
            f"DEVPROXY_START_TIMEOUT_S={text!r} is not a number of seconds",
            "set it to a number above 0, or unset it",
        )
    return value
