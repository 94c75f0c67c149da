"""What is installed here that must be alike on all nodes of a job, read without importing any of it."""

import platform
from importlib import metadata

from rsup.supervisor import wire

_NCCL_PACKAGES = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")


def installed_versions() -> dict[str, str]:
    """Versions by name: `rsup`, `python` (two numbers), `torch` (with its build), `nccl` where a package of it is installed."""
    found = {"rsup": rsup_version(), "python": ".".join(platform.python_version_tuple()[:2]), "torch": _version("torch")}
    found["nccl"] = next((version for name in _NCCL_PACKAGES if (version := _version(name))), "")
    return {name: version for name, version in found.items() if version}


def rsup_version() -> str:
    """Of the installed distribution; where rsup runs without one (from a checkout, say), what it tells other nodes."""
    return _version("rsup") or wire.RELEASE


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
