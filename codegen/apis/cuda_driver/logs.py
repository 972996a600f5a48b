# SPDX-License-Identifier: Apache-2.0
"""cuda.h "Error Log Management Functions": the log stays empty, and whoever listens to it may."""

from codegen.spec import Api

cuLogsRegisterCallback = Api(client_sa="logs", nonnull=("callbackFunc",), needs_init=False)
cuLogsUnregisterCallback = Api(client_sa="logs", needs_init=False)
cuLogsCurrent = Api(client_sa="logs", nonnull=("iterator_out",), needs_init=False)
cuLogsDumpToMemory = Api(client_sa="logs", nonnull=("buffer", "size"), needs_init=False)
