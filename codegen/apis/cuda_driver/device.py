# SPDX-License-Identifier: Apache-2.0
"""cuda.h "Device Management": answered from the facts that came with the attach (DeviceProps)."""

from codegen.spec import Api

cuDeviceGet = Api(client_sa="context", nonnull=("device",))
cuDeviceGetCount = Api(client_sa="context", nonnull=("count",))
cuDeviceGetName = Api(client_sa="context", nonnull=("name",))
cuDeviceGetUuid = Api(client_sa="context", nonnull=("uuid",))
cuDeviceGetUuid_v2 = Api(client_sa="context", nonnull=("uuid",))
cuDeviceTotalMem_v2 = Api(client_sa="context", nonnull=("bytes",))
cuDeviceGetAttribute = Api(client_sa="context", nonnull=("pi",))
# The stream-ordered allocator is the same bidirectional allocator; a pool is a name for it.
cuDeviceSetMemPool = Api(client_sa="memory")
cuDeviceGetMemPool = Api(client_sa="memory", nonnull=("pool",))
cuDeviceGetDefaultMemPool = Api(client_sa="memory", nonnull=("pool_out",))
cuDeviceGetProperties = Api(client_sa="context", nonnull=("prop",))
cuDeviceComputeCapability = Api(client_sa="context", nonnull=("major", "minor"))
cuDeviceGetByPCIBusId = Api(client_sa="context", nonnull=("dev", "pciBusId"))
cuDeviceGetPCIBusId = Api(client_sa="context", nonnull=("pciBusId",))
cuDeviceCanAccessPeer = Api(client_sa="context", nonnull=("canAccessPeer",))
cuDeviceGetP2PAttribute = Api(client_sa="context", nonnull=("value",))
cuDeviceGetHostAtomicCapabilities = Api(client_sa="context", nonnull=("capabilities", "operations"))
cuDeviceGetP2PAtomicCapabilities = Api(client_sa="context", nonnull=("capabilities", "operations"))
