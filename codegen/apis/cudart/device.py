# SPDX-License-Identifier: Apache-2.0
"""cuda_runtime_api.h "Device Management", and of CUDA 12 "Thread Management [DEPRECATED]".

The device is the thread's, its context the driver's primary context; a context that the program made current by the
driver API counts as well.
"""

from codegen.spec import Api

cudaDeviceReset = Api(client_sa="cudart.device", enters="driver", waits=True)
cudaDeviceSynchronize = Api(client_sa="cudart.device", enters="context", waits=True)
cudaDeviceSetLimit = Api(client_sa="cudart.device", enters="context")
cudaDeviceGetLimit = Api(client_sa="cudart.device", enters="context", nonnull=("pValue",))
cudaDeviceGetCacheConfig = Api(
    client_sa="cudart.device", enters="context", nonnull=("pCacheConfig",)
)
# Either pointer may be null.
cudaDeviceGetStreamPriorityRange = Api(client_sa="cudart.device", enters="context")
cudaDeviceSetCacheConfig = Api(client_sa="cudart.device", enters="context")
cudaDeviceGetByPCIBusId = Api(
    client_sa="cudart.device", enters="driver", nonnull=("device", "pciBusId")
)
cudaDeviceGetPCIBusId = Api(client_sa="cudart.device", enters="driver", nonnull=("pciBusId",))
# Shared memory banks have had one size since Volta: reading gives it, setting has no effect (the header says so).
cudaDeviceGetSharedMemConfig = Api(
    client_sa="cudart.device", enters="context", nonnull=("pConfig",)
)
cudaDeviceSetSharedMemConfig = Api(client_sa="cudart.device", enters="context")
# No device is an answer, not a failure of the driver.
cudaGetDeviceCount = Api(client_sa="cudart.device", nonnull=("count",))
cudaGetDeviceProperties = Api(client_sa="cudart.device", enters="driver", nonnull=("prop",))
cudaGetDeviceProperties_v2 = Api(client_sa="cudart.device", enters="driver", nonnull=("prop",))
cudaDeviceGetAttribute = Api(client_sa="cudart.device", enters="driver", nonnull=("value",))
cudaDeviceGetDefaultMemPool = Api(client_sa="cudart.pool", enters="driver", nonnull=("memPool",))
cudaDeviceSetMemPool = Api(client_sa="cudart.pool", enters="driver")
cudaDeviceGetMemPool = Api(client_sa="cudart.pool", enters="driver", nonnull=("memPool",))
cudaDeviceGetP2PAttribute = Api(client_sa="cudart.device", enters="driver", nonnull=("value",))
cudaDeviceGetHostAtomicCapabilities = Api(
    client_sa="cudart.device", enters="driver", nonnull=("capabilities", "operations")
)
cudaDeviceGetP2PAtomicCapabilities = Api(
    client_sa="cudart.device", enters="driver", nonnull=("capabilities", "operations")
)
cudaChooseDevice = Api(client_sa="cudart.device", enters="driver", nonnull=("device", "prop"))
cudaInitDevice = Api(client_sa="cudart.device", enters="driver")
# Since CUDA 12 it initialises the device at once.
cudaSetDevice = Api(client_sa="cudart.device", enters="driver")
cudaGetDevice = Api(client_sa="cudart.device", enters="driver", nonnull=("device",))
cudaSetDeviceFlags = Api(client_sa="cudart.device", enters="driver")
cudaGetDeviceFlags = Api(client_sa="cudart.device", enters="driver", nonnull=("flags",))
cudaThreadExit = Api(client_sa="cudart.device", enters="driver", waits=True)
cudaThreadSynchronize = Api(client_sa="cudart.device", enters="context", waits=True)
cudaThreadSetLimit = Api(client_sa="cudart.device", enters="context")
cudaThreadGetLimit = Api(client_sa="cudart.device", enters="context", nonnull=("pValue",))
cudaThreadGetCacheConfig = Api(
    client_sa="cudart.device", enters="context", nonnull=("pCacheConfig",)
)
cudaThreadSetCacheConfig = Api(client_sa="cudart.device", enters="context")
