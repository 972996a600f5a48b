"""cuda.h "Virtual Memory Management": on the client's own address range.

A reservation is a part of the device range, a handle is credit, a mapping that may be accessed is an announced
allocation. So the server and every device know only MEM_ALLOC and MEM_FREE.
"""

from codegen.spec import Api, Capture

CHECKED = "2026-11 toolkit 13.0"

cuMemAddressReserve = Api(client_sa="vmm", nonnull=("ptr",), checked=CHECKED)
cuMemAddressFree = Api(client_sa="vmm", checked=CHECKED)
cuMemCreate = Api(
    client_sa="vmm",
    nonnull=("handle", "prop"),
    ops=("MEM_CREDIT",),
    capture=Capture.FREE,
    checked=CHECKED,
)
cuMemRelease = Api(
    client_sa="vmm", ops=("MEM_FREE", "MEM_CREDIT_RETURN"), capture=Capture.FREE, checked=CHECKED
)
cuMemMap = Api(client_sa="vmm", checked=CHECKED)
# Contents that were unmapped from another address are copied to the new one.
cuMemSetAccess = Api(
    client_sa="vmm",
    nonnull=("desc",),
    ops=("MEM_ALLOC", "COPY"),
    capture=Capture.FREE,
    checked=CHECKED,
)
cuMemUnmap = Api(
    client_sa="vmm", ops=("MEM_FREE",), waits=True, capture=Capture.FREE, checked=CHECKED
)
cuMemGetAccess = Api(client_sa="vmm", nonnull=("flags", "location"), checked=CHECKED)
cuMemGetAllocationGranularity = Api(
    client_sa="vmm", nonnull=("granularity", "prop"), checked=CHECKED
)
cuMemGetAllocationPropertiesFromHandle = Api(client_sa="vmm", nonnull=("prop",), checked=CHECKED)
cuMemRetainAllocationHandle = Api(client_sa="vmm", nonnull=("handle",), checked=CHECKED)
