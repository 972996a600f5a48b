# SPDX-License-Identifier: Apache-2.0
"""Every DEVPROXY_* variable of the Python side, typed, in one place.

| variable | who sets it | meaning |
|---|---|---|
| DEVPROXY_JOB_DIR | devproxy-run, for the job | folder of the job: sockets and segments |
| DEVPROXY_GPUS | devproxy-run, for the job | number of GPUs, 1 or more |
| DEVPROXY_DEVICE | devproxy-run, for the job | soft, record or cuda |
| DEVPROXY_LIB | user, then devproxy-run for the job | folder of the client libraries and the server |
| DEVPROXY_SERVER | user | another server program, instead of the one in DEVPROXY_LIB |
| DEVPROXY_SHM_DIR | user | a tmpfs to use instead of /dev/shm |
| DEVPROXY_START_TIMEOUT_S | user | seconds until a server that is not ready counts as failed (30) |
| DEVPROXY_STATE_DIR | user | what outlives jobs: builds, logs, the default store (/var/tmp/devproxy-<uid>) |
| DEVPROXY_KEY_FILE | user | the key that authenticates images (~/.config/devproxy/image.key) |
| DEVPROXY_TRUST_FOLDERS | user | folders (a:b) of other users, or that others may change, in which a restore puts files back all the same; it follows links there |
| DEVPROXY_JOB_ID | devproxy-run, for the job | names the job's processes, also those that leave its tree |
| DEVPROXY_CUDA_DRIVER | user | absolute path of NVIDIA's libcuda.so.1 for --device cuda, instead of the usual places |
| DEVPROXY_NCCL | user | absolute path of NVIDIA's libnccl.so.2 for --device cuda, instead of the one that PyTorch brings and the usual places |
| DEVPROXY_REDUCTION | user | order of reductions on --device cuda where each rank has a GPU of its own: nccl (the default) or tree, that of ranks that share one |
| DEVPROXY_CUDA_REGISTER_WINDOW | user | 1: --device cuda registers pinned memory with the driver, so that kernels see it and copies go straight; never seen on a GPU |
| DEVPROXY_TORCH | user, for the job | cudart: on a real GPU the CUDA wheel's own kernels run, over devproxy's CUDA runtime, and math libraries are refused; else operators run in the server |
| DEVPROXY_CUDA_TUNE | tests | NAME=NUMBER,...: other values of hal/cuda's CudaConfig (hal/cuda/cuda_device.h), for measurements |
| DEVPROXY_CUDA_EXECUTOR | tests | host: --device cuda runs PyTorch's operators on the host, over a driver that executes on host memory |
| DEVPROXY_TORCH_OPS | tests | cuda: the client takes operators apart as for a real GPU, whatever runs them |
| DEVPROXY_TORCH_GENERATORS | tests | kept: random generators live in the server, as on a real GPU |
| DEVPROXY_RECORD | user | with --device record: the file to which each server appends one JSON line per call; with several GPUs FILE.gpu0, FILE.gpu1 |
| DEVPROXY_DAEMON_IDLE_S | tests | seconds without job and call after which devproxyd leaves (10) |
| DEVPROXY_SYSROOT | tests | folder that stands in for / when the machine's devices are looked for |

DEVPROXY_LOG and DEVPROXY_STRICT are read by the client library and the server, DEVPROXY_CUDA_DRIVER, DEVPROXY_NCCL,
DEVPROXY_REDUCTION, DEVPROXY_CUDA_REGISTER_WINDOW and DEVPROXY_RECORD by the server too.
"""

from __future__ import annotations

import os

from devproxy.errors import Refused

JOB_DIR = "DEVPROXY_JOB_DIR"
GPUS = "DEVPROXY_GPUS"
DEVICE = "DEVPROXY_DEVICE"
LIB = "DEVPROXY_LIB"
# What a nested devproxy-run, and a server, must not inherit from the job around it.
OF_THE_JOB = (JOB_DIR, GPUS, DEVICE, "DEVPROXY_JOB_ID")
JOB_ID = "DEVPROXY_JOB_ID"
DAEMON_IDLE_S = "DEVPROXY_DAEMON_IDLE_S"
CUDA_DRIVER = "DEVPROXY_CUDA_DRIVER"  # the server reads it too (hal/devices.cc)
TRUST_FOLDERS = "DEVPROXY_TRUST_FOLDERS"
RECORD = "DEVPROXY_RECORD"  # each server gets its own (hal/devices.cc)

PACKAGE_DIR = os.path.dirname(os.path.abspath(__file__))
PACKAGED_LIB = os.path.join(PACKAGE_DIR, "lib")  # in a wheel


def lib_dir() -> str:
    """Folder of libcuda.so.1 and devproxy-server: DEVPROXY_LIB, the wheel's, or the checkout's build/lib."""
    if given := os.environ.get(LIB):
        return os.path.abspath(given)
    return PACKAGED_LIB if is_installed() else os.path.join(_checkout(), "build", "lib")


def is_installed() -> bool:
    """Does this devproxy run from a wheel, not from a checkout?"""
    return os.path.exists(os.path.join(PACKAGED_LIB, "devproxy-server"))


def _checkout() -> str:
    return os.path.dirname(PACKAGE_DIR)


def made_here_dir() -> str:
    """What devproxy makes for this machine after it was installed. pip removes only what it has installed itself, so of a
    wheel that is in the state folder: whoever runs or loads something out of it lets state.py look at that folder first."""
    return state_dir() if is_installed() else os.path.join(_checkout(), "build")


def plugin_dir() -> str:
    """Folder of the plugins for this machine's torches. Another devproxy has others, unless their sources are the same."""
    lib = lib_dir()
    try:
        with open(os.path.join(lib, "plugin-key"), encoding="ascii") as file:
            return os.path.join(state_dir(), "plugins", file.read().strip())
    except FileNotFoundError:
        return lib


def criu_dir() -> str:
    """Where scripts/install_criu.sh puts CRIU."""
    return os.path.join(made_here_dir(), "criu")


def script(name: str) -> str:
    """A script that installs what devproxy needs of the system."""
    return os.path.join(
        PACKAGED_LIB if is_installed() else os.path.join(_checkout(), "scripts"), name
    )


def server_path(lib: str = "") -> str:
    return os.environ.get("DEVPROXY_SERVER") or os.path.join(lib or lib_dir(), "devproxy-server")


def pylib_dir() -> str:
    """The Python part of the torch plugin, as installed."""
    return os.path.join(PACKAGE_DIR, "torch", "pylib")


def job_pylib_dir(build: str) -> str:
    """The same in a job's build."""
    return os.path.join(build, "pylib")


def shm_dir() -> str:
    return os.environ.get("DEVPROXY_SHM_DIR") or "/dev/shm"


def state_dir() -> str:
    """What outlives jobs and reboots: builds, logs, the default store."""
    return os.environ.get("DEVPROXY_STATE_DIR") or f"/var/tmp/devproxy-{os.getuid()}"


def trust_folders() -> list[str]:
    """Folders of which the user says that whoever may change them is to be trusted."""
    given = os.environ.get(TRUST_FOLDERS, "").split(":")
    return [os.path.realpath(folder) for folder in given if folder.startswith("/")]


def sudo_users() -> set[int]:
    """Who became root by sudo to call us: root by another name."""
    uid = os.environ.get("SUDO_UID", "")
    return {int(uid)} if os.geteuid() == 0 and uid.isascii() and uid.isdigit() else set()


def cuda_driver() -> str:
    """The driver library that the user named, or nothing."""
    return os.environ.get(CUDA_DRIVER) or ""


def record_path(gpus: int) -> str:
    """Where the servers of a job with that many GPUs write their records, or nothing. Absolute: a server has a folder of
    its own. To a path that ends with ".gpu" each appends its GPU's number (hal/devices.cc)."""
    path = os.environ.get(RECORD)
    if not path:
        return ""
    return os.path.abspath(path) + (".gpu" if gpus > 1 else "")


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
