# SPDX-License-Identifier: Apache-2.0
"""The environment of a job's command."""

from __future__ import annotations

import os

from devproxy import config
from devproxy.node.spec import JobSpec
from devproxy.proxy import preflight

HOST_LIBRARY = "libdevproxy_host.so"
JUPYTER = "JPY_PARENT_PID"
INIT = 1  # the command's parent, in a namespace of its own


def job_environment(spec: JobSpec, gpus: int, lib: str, pylib: str, job_dir: str) -> dict[str, str]:
    """What the command gets on top of our own environment. gpus: how many. job_dir: as the job sees its folder."""
    env = dict(os.environ)
    refused, compiler = preflight.cuda_wheel(spec.device, spec.program)
    names = (HOST_LIBRARY, *preflight.shims(spec.device), *refused)
    preload = [p for p in (os.path.join(lib, name) for name in names) if os.path.exists(p)]
    around = env.get("LD_PRELOAD", "").replace(" ", ":").split(":")
    env["LD_PRELOAD"] = ":".join(preload + [p for p in around if p and p not in preload])
    env[config.JOB_DIR] = job_dir
    env[config.JOB_ID] = spec.job_id
    env[config.GPUS] = str(gpus)
    env[config.DEVICE] = spec.device
    env[config.LIB] = lib
    if JUPYTER in env:
        # A kernel ends as soon as its parent is another one than this says, or is process 1 and this says something else.
        # Whoever started us is not its parent; we look after that one in its place (proxy/starter.py).
        env[JUPYTER] = str(os.getpid() if spec.plain else INIT)
    env["DEVPROXY_FILES_MAX"] = str(spec.files_max_bytes)
    # Triton links -l:libcuda.so.1 and a dropped LD_PRELOAD still finds ours.
    env["TRITON_LIBCUDA_PATH"] = lib
    if compiler:
        # Behind the user's own folders.
        given = env.get("LD_LIBRARY_PATH", "")
        env["LD_LIBRARY_PATH"] = ":".join(filter(None, (given, compiler)))
    _prepend(env, "LD_LIBRARY_PATH", lib)
    if spec.device in ("soft", "cuda"):  # a recording device runs no operators
        _prepend(env, "PYTHONPATH", pylib)
    return env


def _prepend(env: dict[str, str], variable: str, folder: str) -> None:
    rest = [p for p in env.get(variable, "").split(":") if p and p != folder]
    env[variable] = ":".join([folder, *rest])
