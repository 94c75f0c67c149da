"""Addresses that people write: what is none is said in one line."""

import pytest

from rsup.supervisor.leading import check_address, leading
from rsup.supervisor.places import split_endpoint
from rsup.supervisor.wire import UsageError


@pytest.mark.parametrize(
    "text",
    [
        "http://[::1",
        "http://[zz]:8",
        "http://h:x",
        "http://h:0",
        "http://a b:1",
        "http://",
        "h:1",
        "ftp://h:1",
        "http://h:99999",
    ],
)
def test_what_is_no_supervisors_address(text: str) -> None:
    for ask in (lambda: check_address(text), lambda: leading([text, "http://h:1"])):
        with pytest.raises(UsageError, match=r"is no address of a supervisor; write http://host:port"):
            ask()


@pytest.mark.parametrize("text", ["http://h", "https://h:1/", "http://[::1]:8650", "http://10.0.0.1:1"])
def test_what_is_one(text: str) -> None:
    assert check_address(text) == text


@pytest.mark.parametrize(
    "text", ["[::1", "[::1:1", "::1]:1", "[h]:1", "h:", "h:x", "h:99999", ":1", "", "a b:1", "h:\N{SUPERSCRIPT TWO}"]
)
def test_what_is_no_endpoint(text: str) -> None:
    with pytest.raises(UsageError, match="is no host:port"):
        split_endpoint(text)


def test_endpoints() -> None:
    assert [split_endpoint(text) for text in ("h:1", " h:1 ", "[::1]:1", "*:0")] == [("h", 1), ("h", 1), ("::1", 1), ("*", 0)]
    assert [split_endpoint(text, 5) for text in ("h", "[::1]", "h:7")] == [("h", 5), ("::1", 5), ("h", 7)]
