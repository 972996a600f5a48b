"""cuda.h "Memory Management", host side: pinned memory lives in the window that both processes map at one address."""

from codegen.spec import Api, Capture

CHECKED = "2026-11 toolkit 13.0"

cuMemAllocHost_v2 = Api(
    client_sa="hostmem",
    nonnull=("pp",),
    ops=("HOST_ALLOC",),
    capture=Capture.UNSAFE,
    checked=CHECKED,
)
cuMemFreeHost = Api(client_sa="hostmem", ops=("HOST_FREE",), capture=Capture.HOOK, checked=CHECKED)
cuMemHostAlloc = Api(
    client_sa="hostmem",
    nonnull=("pp",),
    ops=("HOST_ALLOC",),
    capture=Capture.UNSAFE,
    checked=CHECKED,
)
cuMemHostGetDevicePointer_v2 = Api(
    client_sa="hostmem",
    nonnull=("pdptr",),
    ops=("HOST_DEVICE_ADDRESS",),
    capture=Capture.FREE,
    checked=CHECKED,
)
cuMemHostGetFlags = Api(client_sa="hostmem", nonnull=("pFlags",), checked=CHECKED)
# Memory outside the window is only noted: its copies are staged, so the server never learns of it.
cuMemHostRegister_v2 = Api(client_sa="hostmem", nonnull=("p",), checked=CHECKED)
cuMemHostUnregister = Api(client_sa="hostmem", nonnull=("p",), checked=CHECKED)
