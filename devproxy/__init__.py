"""devproxy: unmodified training jobs behind a device proxy."""

__version__ = "0.1.0"
