"""The limit of open descriptors: as high as it may be for the launcher and its helpers, as it was for the ranks.

An agent holds three descriptors a rank, and its keeper a connection of every rank of the job; a soft limit of 1024, which is
usual, would do for some 300. Ranks get what the launcher was started with: a program that uses select(2) needs a low one.
"""

import resource

MOST = 65536
_inherited: list[tuple[int, int]] = []


def raise_limit() -> None:
    """Raise this process's soft limit to the hard one, but not above `MOST`. May be repeated."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
    if soft == resource.RLIM_INFINITY or soft >= most:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    except (OSError, ValueError):
        return
    if not _inherited:
        _inherited.append((soft, hard))


def inherited_limit() -> tuple[int, int] | None:
    """What ranks get: the limit before it was raised; None if it was not."""
    return _inherited[0] if _inherited else None
