# SPDX-License-Identifier: Apache-2.0
"""Everything that can be refused before anything is started: device, memory, files, versions."""

from __future__ import annotations

import os

from devproxy import config, layout, machine
from devproxy.errors import Refused
from devproxy.proxy import server_set

DRIVER_SHIM = "libcuda.so.1"
SHIMS = (DRIVER_SHIM, "libnvidia-ml.so.1", "libnccl.so.2")
# Behind the driver, which they call; the newest first, since a program that asks for a name without a version gets the
# first. Not on the software GPU: the CUDA wheel's own runtime is loaded there and never called (docs/design.md).
RUNTIME_SHIMS = ("libcudart.so.13", "libcudart.so.12")
# NVIDIA's libraries that the CUDA wheel of a major version links, and that refuse every call by name until devproxy
# carries them (codegen/apis/mathlibs); in <lib>/refused/. For jobs whose kernels are NVIDIA's.
REFUSED = {
    "13": (
        "libcublas.so.13", "libcublasLt.so.13", "libcudnn.so.9", "libcufft.so.12", "libcurand.so.10", "libcusolver.so.12",
        "libcusparse.so.12", "libcusparseLt.so.0", "libcufile.so.0", "libcupti.so.13", "libnvshmem_host.so.3",
    ),
}  # fmt: skip
PLUGIN = "libdevproxy_torch.so"  # in <lib>/torch-<major.minor>[-cuda]/
# Torch versions that the plugin's sources are known to compile with.
OLDEST_TORCH, NEWEST_TORCH = (2, 11), (2, 15)
RECORD_NOTE = (
    "--device record executes no kernel, so every result is meaningless:"
    " it is for finding out what a program asks of a GPU (DEVPROXY_RECORD=FILE)"
)


def shims(device: str) -> tuple[str, ...]:
    """The vendor's libraries that a job on this kind of device finds replaced, in the order of their preloading."""
    if device == "soft":
        return SHIMS
    return (DRIVER_SHIM, *RUNTIME_SHIMS, *SHIMS[1:])


class Plan:
    """What devproxy-run is going to do. note: lines for the user, or nothing."""

    def __init__(
        self,
        device: str,
        gpu_memory_bytes: int,
        server: str,
        lib: str,
        abi: str,
        note: str,
        start_timeout_s: float,
    ) -> None:
        self.device = device
        self.gpu_memory_bytes = gpu_memory_bytes
        self.server = server
        self.lib = lib
        self.abi = abi
        self.note = note
        self.start_timeout_s = start_timeout_s


def check(
    device: str, on: list[int], gpu_memory_bytes: int | None, program: str, command: list[str]
) -> Plan:
    """on: the machine's GPUs that the job is to have, one server each.

    Raises Refused with the first thing that is in the way. Starts nothing but `devproxy-server --print-abi`.
    """
    gpus = len(on)
    machine.check_descriptors(gpus)
    device, note = choose_device(device, on)
    lib, server = config.lib_dir(), config.server_path()
    check_outputs(lib, server)
    if device == "cuda":
        memory = gpu_memory_bytes or 0  # 0: what the GPU has; none of it is the host's
    else:
        memory = machine.gpu_memory_bytes(
            gpu_memory_bytes, gpus, machine.available_memory_bytes(config.sysroot())
        )
    machine.check_shm(config.shm_dir(), gpus * layout.SEGMENT_BYTES)
    timeout_s = config.start_timeout_s()
    abi = server_set.check_same_abi(server, os.path.join(lib, DRIVER_SHIM))
    # A recording device runs no operators.
    warning = "" if device == "record" else check_torch(program, command, config.plugin_dir())
    note = "\n".join(filter(None, (note, warning)))
    return Plan(device, memory, server, lib, abi, note, timeout_s)


def choose_device(wanted: str, on: list[int]) -> tuple[str, str]:
    """(device, line for the user). Raises Refused where an NVIDIA device is there that we cannot use."""
    if wanted == "soft":
        return "soft", ""
    if wanted == "record":
        return "record", RECORD_NOTE
    nvidia = machine.find_nvidia(config.sysroot())
    if wanted == "cuda":
        return "cuda", check_cuda(nvidia, on)
    if nvidia:
        raise Refused(
            f"an NVIDIA device is there ({nvidia}), and devproxy has been seen on H100 and H200 alone, for minutes",
            "choose the software GPU: --device soft; or try the real one, experimental: --device cuda",
        )
    return "soft", "no NVIDIA device here: the GPU is simulated by software (--device soft)"


def check_cuda(nvidia: str | None, on: list[int]) -> str:
    """The line for the user who asked for the real GPU. Raises Refused without a device, or without NVIDIA's driver, or
    where the driver's management library knows that no job can be served by the GPU.

    The server opens the driver itself, and refuses devproxy's own libcuda.so.1 wherever it finds it.
    """
    if not nvidia:
        raise Refused("--device cuda: no NVIDIA device is here", "use --device soft")
    driver = machine.find_cuda_driver(config.cuda_driver(), config.sysroot())
    if not driver:
        raise Refused(
            f"--device cuda: {nvidia} is there, but {config.cuda_driver() or 'the NVIDIA driver library libcuda.so.1'} is not",
            f"install the driver, give the container its libraries, or name the file by {config.CUDA_DRIVER}",
        )
    check_health(driver, on)
    return (
        f"--device cuda is experimental: it has been seen on H100 and H200, for minutes"
        f" (docs/gpu-results.md); the driver is {driver}"
    )


def check_health(driver: str, on: list[int]) -> None:
    """Raises Refused for a GPU of the job that is lost, partitioned or prohibited.

    Where the management library does not answer, or its numbers are not CUDA's, nothing is known: then the server hears
    from the driver what is wrong.
    """
    from devproxy.hal import nvml  # for this device only: it is added to a job's start

    try:
        gpus = nvml.read(driver).gpus
    except Refused:
        return
    seen = nvml.seen_by_cuda(gpus, os.environ)
    for number in on:
        asked = seen[number : number + 1] if seen is not None else gpus
        reasons = [(gpu, nvml.unusable(gpu)) for gpu in asked]
        for gpu, why in reasons[:1]:
            if why and all(reason for _, reason in reasons):
                raise Refused(
                    f"--device cuda: GPU {number} ({gpu.name or 'no name'}, {gpu.bus or 'bus unknown'})"
                    f" cannot be used: {why[0]}",
                    f"{why[1]}, or choose another GPU: --gpu",
                )


def check_there(device: str, on: list[int]) -> None:
    """Raises Refused for a GPU that this machine has not. Where NVIDIA's library does not say, the server hears it from
    the driver."""
    most = machine.MOST_GPUS
    if device == "cuda":
        from devproxy.hal import nvml  # for this device only

        try:
            driver = machine.find_cuda_driver(config.cuda_driver(), config.sysroot())
            gpus = nvml.read(driver).gpus if driver else []
        except Refused:
            gpus = []
        seen = nvml.seen_by_cuda(gpus, os.environ)
        most = len(seen if seen is not None else gpus) or most
    if absent := [gpu for gpu in on if gpu >= most]:
        raise Refused(
            f"this machine has no GPU {', '.join(map(str, absent))}",
            f"its GPUs are numbered from 0 to {most - 1}",
        )


def check_outputs(lib: str, server: str) -> None:
    for path in (server, os.path.join(lib, DRIVER_SHIM)):
        if not os.path.isfile(path):
            raise Refused(f"{path} is not there", "build devproxy: make build")
    if not os.access(server, os.X_OK):
        raise Refused(f"{server} is not executable", "build devproxy again: make build")
    if ":" in lib or any(c.isspace() for c in lib):
        raise Refused(
            f"{lib!r} has a space or colon, which LD_PRELOAD cannot carry",
            "move devproxy to another folder",
        )


def check_torch(program: str, command: list[str], plugins: str) -> str:
    """plugins: their folder. For a command that is a Python: is its torch one that can run on the software GPU? Returns a warning, or nothing.

    Looks at files only. A Python without torch, or whose torch is somewhere unusual, is let through: then torch's own
    import, or the plugin's, says what is missing.
    """
    if not os.path.basename(command[0]).startswith("python"):
        return ""
    torch = find_torch(program)
    if torch is None:
        return ""
    if not os.path.exists(os.path.join(torch, "lib", "libtorch_cpu.so")):
        raise Refused(
            f"{torch} has no lib/libtorch_cpu.so",
            f"install torch again: {program} -m pip install --force-reinstall torch",
        )
    version = torch_version(torch)
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if not OLDEST_TORCH <= numbers <= NEWEST_TORCH:
        raise Refused(
            f"torch {version} of {program} is not supported",
            f"install torch {'.'.join(map(str, OLDEST_TORCH))} to {'.'.join(map(str, NEWEST_TORCH))}",
        )
    minor = ".".join(map(str, numbers))
    if os.path.exists(os.path.join(torch, "lib", "libtorch_cuda.so")):
        minor += "-cuda"  # the CUDA wheel needs a build of its own
    if not os.path.exists(os.path.join(plugins, f"torch-{minor}", PLUGIN)):
        # Not a refusal: a Python program that does not use torch needs no plugin.
        return (
            f"devproxy's plugin for torch {version} is not built, so `import torch` will fail:"
            f" devproxy build-torch --python {program}"
        )
    return ""


def cuda_wheel(device: str, program: str) -> tuple[list[str], str]:
    """For a job whose Python has torch as a CUDA wheel, on a device of NVIDIA's kind: (what to preload besides the shims,
    relative to the library folder; the folder of NVIDIA's compiler libraries). Else nothing. Looks at files only.

    Elsewhere a library of REFUSED is the user's own, whose first call asks the driver shim for what it has not, and is
    told so by name (interceptors/entrypoint); and a process pays for each that is preloaded.
    """
    if device not in ("cuda", "record"):
        return [], ""
    torch = find_torch(program)
    if torch is None and not os.path.basename(program).startswith("python"):
        torch = find_torch(python_on_path())  # a shell script, env, time, ...
    major = torch_cuda(torch).partition(".")[0] if torch else ""
    if torch is None or major not in REFUSED:
        return [], ""
    # libnvrtc opens libnvrtc-builtins by its name. Natively torch has loaded it by its path (see state.KEPT_AS).
    compiler = os.path.join(os.path.dirname(torch), "nvidia", f"cu{major}", "lib")
    return [os.path.join("refused", name) for name in REFUSED[major]], compiler


def python_on_path() -> str:
    """The Python that a script would start."""
    for folder in os.environ.get("PATH", "").split(":"):
        for name in ("python", "python3"):
            if os.access(path := os.path.join(folder, name), os.X_OK):
                return path
    return ""


def find_torch(program: str) -> str | None:
    """The torch folder of that Python, as its installation scheme has it."""
    places = [os.path.dirname(os.path.dirname(os.path.abspath(program)))]
    places.append(os.path.dirname(os.path.dirname(os.path.realpath(program))))
    if "/usr" in places:
        places.append("/usr/local")  # where Debian's Python puts what pip installs
    for prefix in places:
        lib = os.path.join(prefix, "lib")
        try:
            versions = [n for n in os.listdir(lib) if n.startswith("python3")]
        except OSError:
            continue
        for name in versions:
            for packages in ("site-packages", "dist-packages"):
                torch = os.path.join(lib, name, packages, "torch")
                if os.path.isfile(os.path.join(torch, "version.py")):
                    return torch
    return None


def torch_version(torch: str) -> str:
    """ "2.13.0+cpu", out of torch/version.py; "unknown" where it does not say."""
    with open(os.path.join(torch, "version.py"), encoding="utf-8") as file:
        for line in file:
            if line.startswith("__version__"):
                return line.split("=", 1)[1].strip().strip("'\"")
    return "unknown"


def torch_cuda(torch: str) -> str:
    """ "13.0" of a CUDA wheel, out of torch/version.py; "" for others."""
    with open(os.path.join(torch, "version.py"), encoding="utf-8") as file:
        for line in file:
            name, equals, value = line.partition("=")
            if equals and name.partition(":")[0].strip() == "cuda":
                return value.strip().strip("'\"").replace("None", "")
    return ""
