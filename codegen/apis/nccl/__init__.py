"""nccl.h: version and texts; every collective is refused until the communication interceptors exist."""

from codegen.spec import Api, Library

LIBRARY = Library(
    prefix="nccl",
    soname="libnccl.so.2",
    status="ncclInvalidUsage",
    refused=5,
    invalid=4,  # ncclInvalidArgument
    reason="collectives come with the communication interceptors; run with one rank until then",
    # Imported by torch 2.11, declared in a header of NCCL's device API.
    also=(
        "ncclDevCommCreate",
        "ncclDevCommDestroy",
        "ncclGetLsaMultimemDevicePointer",
        "ncclGetPeerDevicePointer",
    ),
)

ncclGetVersion = Api(client_sa="nccl", nonnull=("version",), needs_init=False)
ncclGetErrorString = Api(client_sa="nccl", needs_init=False)
ncclGetLastError = Api(client_sa="nccl", needs_init=False)
