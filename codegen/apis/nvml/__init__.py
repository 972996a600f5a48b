"""nvml.h: what torch.cuda.device_count() and monitoring tools ask about; facts come from the driver shim.

Without this library torch opens /dev/nvidia* in the job and keeps it open, on a machine that has a GPU.
"""

from codegen.spec import Api, Library

CHECKED = "2026-11 toolkit 13.0"

LIBRARY = Library(
    prefix="nvml",
    soname="libnvidia-ml.so.1",
    refused=3,  # NVML_ERROR_NOT_SUPPORTED
    invalid=2,  # NVML_ERROR_INVALID_ARGUMENT
    reason="health and topology belong to the host, not to the job",
)

# An old form with the same types (nvmlInit, nvmlDeviceGetCount, ...) is answered as the new one.
nvmlInit_v2 = Api(client_sa="nvml", needs_init=False, checked=CHECKED)
nvmlInitWithFlags = Api(client_sa="nvml", needs_init=False, checked=CHECKED)
nvmlShutdown = Api(client_sa="nvml", checked=CHECKED)
nvmlErrorString = Api(client_sa="nvml", needs_init=False, checked=CHECKED)
nvmlSystemGetDriverVersion = Api(client_sa="nvml", nonnull=("version",), checked=CHECKED)
nvmlSystemGetNVMLVersion = Api(client_sa="nvml", nonnull=("version",), checked=CHECKED)
nvmlSystemGetCudaDriverVersion = Api(
    client_sa="nvml", nonnull=("cudaDriverVersion",), checked=CHECKED
)
nvmlSystemGetCudaDriverVersion_v2 = Api(
    client_sa="nvml", nonnull=("cudaDriverVersion",), checked=CHECKED
)
nvmlDeviceGetCount_v2 = Api(client_sa="nvml", nonnull=("deviceCount",), checked=CHECKED)
nvmlDeviceGetHandleByIndex_v2 = Api(client_sa="nvml", nonnull=("device",), checked=CHECKED)
# torch's allocator asks for this one when memory is short, and for the processes; it aborts without an answer.
nvmlDeviceGetHandleByPciBusId_v2 = Api(
    client_sa="nvml", nonnull=("pciBusId", "device"), checked=CHECKED
)
# None is listed, as for a container whose processes the host's NVML cannot name to it.
nvmlDeviceGetComputeRunningProcesses = Api(
    client_sa="nvml", nonnull=("infoCount",), checked=CHECKED
)
nvmlDeviceGetComputeRunningProcesses_v2 = Api(
    client_sa="nvml", nonnull=("infoCount",), checked=CHECKED
)
nvmlDeviceGetComputeRunningProcesses_v3 = Api(
    client_sa="nvml", nonnull=("infoCount",), checked=CHECKED
)
nvmlDeviceGetHandleByUUID = Api(client_sa="nvml", nonnull=("uuid", "device"), checked=CHECKED)
nvmlDeviceGetPciInfo_v3 = Api(client_sa="nvml", nonnull=("pci",), checked=CHECKED)
nvmlDeviceGetName = Api(client_sa="nvml", nonnull=("name",), checked=CHECKED)
nvmlDeviceGetIndex = Api(client_sa="nvml", nonnull=("index",), checked=CHECKED)
nvmlDeviceGetUUID = Api(client_sa="nvml", nonnull=("uuid",), checked=CHECKED)
nvmlDeviceGetMemoryInfo = Api(client_sa="nvml", nonnull=("memory",), checked=CHECKED)
nvmlDeviceGetMemoryInfo_v2 = Api(client_sa="nvml", nonnull=("memory",), checked=CHECKED)
nvmlDeviceGetCudaComputeCapability = Api(
    client_sa="nvml", nonnull=("major", "minor"), checked=CHECKED
)
