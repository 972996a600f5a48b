"""cuda.h "Device Management": answered from the facts that came with the attach (DeviceProps)."""

from codegen.spec import Api

CHECKED = "2026-11 toolkit 13.0"

cuDeviceGet = Api(client_sa="context", nonnull=("device",), checked=CHECKED)
cuDeviceGetCount = Api(client_sa="context", nonnull=("count",), checked=CHECKED)
cuDeviceGetName = Api(client_sa="context", nonnull=("name",), checked=CHECKED)
cuDeviceGetUuid = Api(client_sa="context", nonnull=("uuid",), checked=CHECKED)
cuDeviceGetUuid_v2 = Api(client_sa="context", nonnull=("uuid",), checked=CHECKED)
cuDeviceTotalMem_v2 = Api(client_sa="context", nonnull=("bytes",), checked=CHECKED)
cuDeviceGetAttribute = Api(client_sa="context", nonnull=("pi",), checked=CHECKED)
# The stream-ordered allocator is the same bidirectional allocator; a pool is a name for it.
cuDeviceSetMemPool = Api(client_sa="memory", checked=CHECKED)
cuDeviceGetMemPool = Api(client_sa="memory", nonnull=("pool",), checked=CHECKED)
cuDeviceGetDefaultMemPool = Api(client_sa="memory", nonnull=("pool_out",), checked=CHECKED)
cuDeviceGetProperties = Api(client_sa="context", nonnull=("prop",), checked=CHECKED)
cuDeviceComputeCapability = Api(client_sa="context", nonnull=("major", "minor"), checked=CHECKED)
cuDeviceGetByPCIBusId = Api(client_sa="context", nonnull=("dev", "pciBusId"), checked=CHECKED)
cuDeviceGetPCIBusId = Api(client_sa="context", nonnull=("pciBusId",), checked=CHECKED)
cuDeviceCanAccessPeer = Api(client_sa="context", nonnull=("canAccessPeer",), checked=CHECKED)
cuDeviceGetP2PAttribute = Api(client_sa="context", nonnull=("value",), checked=CHECKED)
cuDeviceGetHostAtomicCapabilities = Api(
    client_sa="context", nonnull=("capabilities", "operations"), checked=CHECKED
)
cuDeviceGetP2PAtomicCapabilities = Api(
    client_sa="context", nonnull=("capabilities", "operations"), checked=CHECKED
)
