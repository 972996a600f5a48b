# SPDX-License-Identifier: Apache-2.0
"""cuda.h "Memory Management", host side: pinned memory lives in the window that both processes map at one address."""

from codegen.spec import Api, Capture

cuMemAllocHost_v2 = Api(
    client_sa="hostmem", nonnull=("pp",), ops=("HOST_ALLOC",), capture=Capture.UNSAFE
)
cuMemFreeHost = Api(client_sa="hostmem", ops=("HOST_FREE",), capture=Capture.HOOK)
cuMemHostAlloc = Api(
    client_sa="hostmem", nonnull=("pp",), ops=("HOST_ALLOC",), capture=Capture.UNSAFE
)
cuMemHostGetDevicePointer_v2 = Api(
    client_sa="hostmem", nonnull=("pdptr",), ops=("HOST_DEVICE_ADDRESS",), capture=Capture.FREE
)
cuMemHostGetFlags = Api(client_sa="hostmem", nonnull=("pFlags",))
# Memory outside the window is only noted: its copies are staged, so the server never learns of it.
cuMemHostRegister_v2 = Api(client_sa="hostmem", nonnull=("p",))
cuMemHostUnregister = Api(client_sa="hostmem", nonnull=("p",))
