# SPDX-License-Identifier: Apache-2.0
"""First on the job's PYTHONPATH: prepares `import torch` for devproxy's GPU, then runs the sitecustomize it shadows."""

import os
import sys


def _chain() -> None:
    """Runs the next sitecustomize.py on the path, the one that would have run without us."""
    here = os.path.dirname(os.path.abspath(__file__))
    for folder in sys.path:
        path = os.path.join(folder or ".", "sitecustomize.py")
        if os.path.abspath(folder or ".") == here or not os.path.isfile(path):
            continue
        with open(path, "rb") as file:
            code = compile(file.read(), path, "exec")
        exec(code, {"__name__": "sitecustomize", "__file__": path})
        return


if os.environ.get("DEVPROXY_DEVICE") in ("soft", "cuda"):
    from devproxy_torch import boot

    boot.install()
_chain()
