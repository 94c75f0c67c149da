"""Keeps passwords in addresses out of what is written for others to read."""

import re

_WITH_USER = re.compile(r"(?<=://)[^\s/@'\"]*(?:@[^\s/@'\"]*)*@")


def without_credentials(text: str) -> str:
    """`text`, the user and password of each address in it left out: `https://user:secret@host` is `https://host`."""
    return _WITH_USER.sub("", text)
