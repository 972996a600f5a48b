"""cuda.h "Error Log Management Functions": the log stays empty, and whoever listens to it may."""

from codegen.spec import Api

CHECKED = "2026-11 toolkit 13.0"

cuLogsRegisterCallback = Api(
    client_sa="logs", nonnull=("callbackFunc",), needs_init=False, checked=CHECKED
)
cuLogsUnregisterCallback = Api(client_sa="logs", needs_init=False, checked=CHECKED)
cuLogsCurrent = Api(client_sa="logs", nonnull=("iterator_out",), needs_init=False, checked=CHECKED)
cuLogsDumpToMemory = Api(
    client_sa="logs", nonnull=("buffer", "size"), needs_init=False, checked=CHECKED
)
