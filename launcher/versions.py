"""What is installed here that must be alike on all nodes of a job, read without importing any of it."""

import platform
from importlib import metadata

_NCCL_PACKAGES = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")


def installed_versions() -> dict[str, str]:
    """Versions by name: `python` (two numbers), `torch` (with its build), `nccl` where a package of it is installed."""
    found = {"python": ".".join(platform.python_version_tuple()[:2]), "torch": _version("torch")}
    found["nccl"] = next((version for name in _NCCL_PACKAGES if (version := _version(name))), "")
    return {name: version for name, version in found.items() if version}


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
