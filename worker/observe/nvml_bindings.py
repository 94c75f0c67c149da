"""NVML's Python bindings, where they load. No torch."""

import importlib
import warnings
from typing import Any


def load_nvml() -> Any:
    """The module `pynvml` (of nvidia-ml-py); None where it is missing or broken."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a package of that name only forwards, and says so
            return importlib.import_module("pynvml")
    except (ImportError, OSError, AttributeError):
        return None
