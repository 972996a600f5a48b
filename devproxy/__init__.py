# SPDX-License-Identifier: Apache-2.0
"""devproxy: unmodified training jobs behind a device proxy.

For programs: devproxy.Client and what it answers (devproxy/api.py, docs/scheduler.md).
"""

__version__ = "0.1.0"

_OF_API = ("Client", "ImageFacts", "Job", "Outcome", "Phase", "Progress", "StoredImage")
_OF_ERRORS = ("DevproxyError",)


def __getattr__(name: str) -> object:
    """Loaded when they are asked for: a job's start imports this package too, and waits for it."""
    import importlib  # by name: the modules import this package

    for module, names in (("devproxy.api", _OF_API), ("devproxy.errors", _OF_ERRORS)):
        if name in names:
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module 'devproxy' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *_OF_API, *_OF_ERRORS]
