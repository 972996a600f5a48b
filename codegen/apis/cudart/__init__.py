# SPDX-License-Identifier: Apache-2.0
"""The CUDA runtime API, majors 12 and 13, by chapter of cuda_runtime_api.h; an entry may exist in one major only."""

from codegen.apis.cudart import (
    device,
    entrypoint,
    error,
    event,
    execution,
    graph,
    library,
    memory,
    occupancy,
    peer,
    pool,
    private,
    profiler,
    stream,
    texture,
    unified,
    version,
)
from codegen.apis.cudart.refused import FAMILIES
from codegen.spec import Runtime

CHAPTERS = (
    device,
    error,
    stream,
    event,
    execution,
    occupancy,
    memory,
    pool,
    graph,
    unified,
    peer,
    texture,
    version,
    entrypoint,
    library,
    profiler,
    private,
)

MAJORS = {
    f"cudart-{major}": Runtime(
        soname=f"libcudart.so.{major}",
        header="cuda_runtime_api.h",
        result="cudaError_t",
        refused=801,  # cudaErrorNotSupported
        invalid=1,  # cudaErrorInvalidValue
        names="cudaError",
        declared=declared,
        also=also,
    )
    for major, declared, also in (
        (12, private.DECLARED | private.DECLARED_12, private.ALSO),
        (13, private.DECLARED, (*private.ALSO, *private.ALSO_13)),
    )
}

__all__ = ["CHAPTERS", "FAMILIES", "MAJORS"]
