"""Which of several supervisors on one database leads, as their REST says: `/readyz` of one that stands by is 503."""

import json
from collections.abc import Sequence
from http.client import HTTPException
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import ProxyHandler, build_opener

from rsup.supervisor.wire import UsageError

ANSWER_WITHIN_S = 3.0


def split_addresses(text: str) -> list[str]:
    """The addresses in a list with commas."""
    return list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def check_address(address: str) -> str:
    """That address. Raise `UsageError` for what is no `http://host:port`."""
    try:
        parts = urlsplit(address)
        is_one = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # brackets that do not fit, a port that is none
        is_one = False
    if not is_one or any(one.isspace() for one in address):
        raise UsageError(f"{address!r} is no address of a supervisor; write http://host:port")
    return address


def leading(addresses: Sequence[str]) -> str:
    """The address of the one that leads; if none does, of the first that answers, else the first. Raise `UsageError` for what
    is no `http://host:port`."""
    for address in addresses:
        check_address(address)
    opener = build_opener(ProxyHandler({}))
    answering = []
    for address in addresses:
        try:
            with opener.open(f"{address.rstrip('/')}/readyz", timeout=ANSWER_WITHIN_S):
                return address
        except HTTPError as error:
            with error:
                answering += [address] if not _stands_by(error) else []
        except (URLError, HTTPException, OSError, ValueError):
            continue
    return (answering or list(addresses))[0]


def _stands_by(error: HTTPError) -> bool:
    try:
        return bool(json.load(error).get("standby"))
    except (OSError, ValueError, AttributeError):
        return False
