# SPDX-License-Identifier: Apache-2.0
"""cuda.h "Virtual Memory Management": on the client's own address range.

A reservation is a part of the device range, a handle is credit, a mapping that may be accessed is an announced
allocation. So the server and every device know only MEM_ALLOC and MEM_FREE.
"""

from codegen.spec import Api, Capture

# Contents that lie where something else is to be are copied to another address.
MOVES = ("MEM_ALLOC", "COPY", "MEM_FREE", "MEM_CREDIT", "MEM_INFO", "MEM_CREDIT_RETURN")

cuMemAddressReserve = Api(client_sa="vmm", nonnull=("ptr",))
cuMemAddressFree = Api(client_sa="vmm", ops=MOVES, waits=True, capture=Capture.FREE)
cuMemCreate = Api(
    client_sa="vmm",
    nonnull=("handle", "prop"),
    ops=("MEM_CREDIT", "MEM_INFO"),
    capture=Capture.FREE,
)
cuMemRelease = Api(client_sa="vmm", ops=("MEM_FREE", "MEM_CREDIT_RETURN"), capture=Capture.FREE)
cuMemMap = Api(client_sa="vmm")
# Contents that were unmapped from another address are copied to the new one.
cuMemSetAccess = Api(client_sa="vmm", nonnull=("desc",), ops=MOVES, capture=Capture.FREE)
cuMemUnmap = Api(client_sa="vmm", ops=("MEM_FREE",), waits=True, capture=Capture.FREE)
cuMemGetAccess = Api(client_sa="vmm", nonnull=("flags", "location"))
cuMemGetAllocationGranularity = Api(client_sa="vmm", nonnull=("granularity", "prop"))
cuMemGetAllocationPropertiesFromHandle = Api(client_sa="vmm", nonnull=("prop",))
cuMemRetainAllocationHandle = Api(client_sa="vmm", nonnull=("handle",))
