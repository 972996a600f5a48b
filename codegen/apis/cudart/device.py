"""cuda_runtime_api.h "Device Management", and of CUDA 12 "Thread Management [DEPRECATED]".

The device is the thread's, its context the driver's primary context; a context that the program made current by the
driver API counts as well.
"""

from codegen.spec import Api

CHECKED = "2026-11 toolkit 13.0 and 12.9"

cudaDeviceReset = Api(client_sa="cudart.device", enters="driver", waits=True, checked=CHECKED)
cudaDeviceSynchronize = Api(
    client_sa="cudart.device", enters="context", waits=True, checked=CHECKED
)
cudaDeviceSetLimit = Api(client_sa="cudart.device", enters="context", checked=CHECKED)
cudaDeviceGetLimit = Api(
    client_sa="cudart.device", enters="context", nonnull=("pValue",), checked=CHECKED
)
cudaDeviceGetCacheConfig = Api(
    client_sa="cudart.device", enters="context", nonnull=("pCacheConfig",), checked=CHECKED
)
# Either pointer may be null.
cudaDeviceGetStreamPriorityRange = Api(client_sa="cudart.device", enters="context", checked=CHECKED)
cudaDeviceSetCacheConfig = Api(client_sa="cudart.device", enters="context", checked=CHECKED)
cudaDeviceGetByPCIBusId = Api(
    client_sa="cudart.device", enters="driver", nonnull=("device", "pciBusId"), checked=CHECKED
)
cudaDeviceGetPCIBusId = Api(
    client_sa="cudart.device", enters="driver", nonnull=("pciBusId",), checked=CHECKED
)
# Shared memory banks have had one size since Volta: reading gives it, setting has no effect (the header says so).
cudaDeviceGetSharedMemConfig = Api(
    client_sa="cudart.device", enters="context", nonnull=("pConfig",), checked=CHECKED
)
cudaDeviceSetSharedMemConfig = Api(client_sa="cudart.device", enters="context", checked=CHECKED)
# No device is an answer, not a failure of the driver.
cudaGetDeviceCount = Api(client_sa="cudart.device", nonnull=("count",), checked=CHECKED)
cudaGetDeviceProperties = Api(
    client_sa="cudart.device", enters="driver", nonnull=("prop",), checked=CHECKED
)
cudaGetDeviceProperties_v2 = Api(
    client_sa="cudart.device", enters="driver", nonnull=("prop",), checked=CHECKED
)
cudaDeviceGetAttribute = Api(
    client_sa="cudart.device", enters="driver", nonnull=("value",), checked=CHECKED
)
cudaDeviceGetDefaultMemPool = Api(
    client_sa="cudart.pool", enters="driver", nonnull=("memPool",), checked=CHECKED
)
cudaDeviceSetMemPool = Api(client_sa="cudart.pool", enters="driver", checked=CHECKED)
cudaDeviceGetMemPool = Api(
    client_sa="cudart.pool", enters="driver", nonnull=("memPool",), checked=CHECKED
)
cudaDeviceGetP2PAttribute = Api(
    client_sa="cudart.device", enters="driver", nonnull=("value",), checked=CHECKED
)
cudaDeviceGetHostAtomicCapabilities = Api(
    client_sa="cudart.device",
    enters="driver",
    nonnull=("capabilities", "operations"),
    checked=CHECKED,
)
cudaDeviceGetP2PAtomicCapabilities = Api(
    client_sa="cudart.device",
    enters="driver",
    nonnull=("capabilities", "operations"),
    checked=CHECKED,
)
cudaChooseDevice = Api(
    client_sa="cudart.device", enters="driver", nonnull=("device", "prop"), checked=CHECKED
)
cudaInitDevice = Api(client_sa="cudart.device", enters="driver", checked=CHECKED)
# Since CUDA 12 it initialises the device at once.
cudaSetDevice = Api(client_sa="cudart.device", enters="driver", checked=CHECKED)
cudaGetDevice = Api(
    client_sa="cudart.device", enters="driver", nonnull=("device",), checked=CHECKED
)
cudaSetDeviceFlags = Api(client_sa="cudart.device", enters="driver", checked=CHECKED)
cudaGetDeviceFlags = Api(
    client_sa="cudart.device", enters="driver", nonnull=("flags",), checked=CHECKED
)
cudaThreadExit = Api(client_sa="cudart.device", enters="driver", waits=True, checked=CHECKED)
cudaThreadSynchronize = Api(
    client_sa="cudart.device", enters="context", waits=True, checked=CHECKED
)
cudaThreadSetLimit = Api(client_sa="cudart.device", enters="context", checked=CHECKED)
cudaThreadGetLimit = Api(
    client_sa="cudart.device", enters="context", nonnull=("pValue",), checked=CHECKED
)
cudaThreadGetCacheConfig = Api(
    client_sa="cudart.device", enters="context", nonnull=("pCacheConfig",), checked=CHECKED
)
cudaThreadSetCacheConfig = Api(client_sa="cudart.device", enters="context", checked=CHECKED)
