# SPDX-License-Identifier: Apache-2.0
"""nvml.h: what torch.cuda.device_count() and monitoring tools ask about; facts come from the driver shim.

Without this library torch opens /dev/nvidia* in the job and keeps it open, on a machine that has a GPU.
"""

from codegen.spec import Api, Library

LIBRARY = Library(
    prefix="nvml",
    soname="libnvidia-ml.so.1",
    status="NVML_ERROR_NOT_SUPPORTED",
    refused=3,
    invalid=2,  # NVML_ERROR_INVALID_ARGUMENT
    reason="health and topology belong to the host, not to the job",
)

# An old form with the same types (nvmlInit, nvmlDeviceGetCount, ...) is answered as the new one.
nvmlInit_v2 = Api(client_sa="nvml", needs_init=False)
nvmlInitWithFlags = Api(client_sa="nvml", needs_init=False)
nvmlShutdown = Api(client_sa="nvml")
nvmlErrorString = Api(client_sa="nvml", needs_init=False)
nvmlSystemGetDriverVersion = Api(client_sa="nvml", nonnull=("version",))
nvmlSystemGetNVMLVersion = Api(client_sa="nvml", nonnull=("version",))
nvmlSystemGetCudaDriverVersion = Api(client_sa="nvml", nonnull=("cudaDriverVersion",))
nvmlSystemGetCudaDriverVersion_v2 = Api(client_sa="nvml", nonnull=("cudaDriverVersion",))
nvmlDeviceGetCount_v2 = Api(client_sa="nvml", nonnull=("deviceCount",))
nvmlDeviceGetHandleByIndex_v2 = Api(client_sa="nvml", nonnull=("device",))
# torch's allocator asks for this one when memory is short, and for the processes; it aborts without an answer.
nvmlDeviceGetHandleByPciBusId_v2 = Api(client_sa="nvml", nonnull=("pciBusId", "device"))
# None is listed, as for a container whose processes the host's NVML cannot name to it.
nvmlDeviceGetComputeRunningProcesses = Api(client_sa="nvml", nonnull=("infoCount",))
nvmlDeviceGetComputeRunningProcesses_v2 = Api(client_sa="nvml", nonnull=("infoCount",))
nvmlDeviceGetComputeRunningProcesses_v3 = Api(client_sa="nvml", nonnull=("infoCount",))
nvmlDeviceGetHandleByUUID = Api(client_sa="nvml", nonnull=("uuid", "device"))
nvmlDeviceGetPciInfo_v3 = Api(client_sa="nvml", nonnull=("pci",))
nvmlDeviceGetName = Api(client_sa="nvml", nonnull=("name",))
nvmlDeviceGetIndex = Api(client_sa="nvml", nonnull=("index",))
nvmlDeviceGetUUID = Api(client_sa="nvml", nonnull=("uuid",))
nvmlDeviceGetMemoryInfo = Api(client_sa="nvml", nonnull=("memory",))
nvmlDeviceGetMemoryInfo_v2 = Api(client_sa="nvml", nonnull=("memory",))
nvmlDeviceGetCudaComputeCapability = Api(client_sa="nvml", nonnull=("major", "minor"))
# Of the job's own work. A software GPU has no sensors, which show 0; those of a real one are the host's.
nvmlDeviceGetUtilizationRates = Api(client_sa="nvml", nonnull=("utilization",))
nvmlDeviceGetClockInfo = Api(client_sa="nvml", nonnull=("clock",))
nvmlDeviceGetTemperature = Api(client_sa="nvml", nonnull=("temp",))
nvmlDeviceGetPowerUsage = Api(client_sa="nvml", nonnull=("power",))
