# SPDX-License-Identifier: Apache-2.0
"""cuda.h "Driver Entry Point Access" and the private tables."""

from codegen.spec import Api

cuGetProcAddress = Api(client_sa="entrypoint", nonnull=("symbol", "pfn"), needs_init=False)
# symbolStatus may be null.
cuGetProcAddress_v2 = Api(client_sa="entrypoint", nonnull=("symbol", "pfn"), needs_init=False)
# Undocumented tables, by UUID. devproxy has none: NVIDIA's cudart, which asks for them, is replaced (design.md).
cuGetExportTable = Api(
    client_sa="entrypoint", nonnull=("ppExportTable", "pExportTableId"), needs_init=False
)

# Besides the vendor's typedefs: from 12.0 on the plain name means another function (a #define in cuda.h says so, but
# not since when).
ALSO_RESOLVES: dict[str, list[tuple[int, str, str]]] = {
    "cuGraphInstantiate": [(12000, "", "cuGraphInstantiateWithFlags")],
}
