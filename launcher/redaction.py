"""Secrets out of a command line before it is stored or shown. What is stored is for people to read, never executed.

A value counts as secret when the name in front of it says so (`--token X`, `--api-key=X`, `HF_TOKEN=X`), when it is the
password of a URL, or when it has the shape of a well-known access token.
"""

import re
from collections.abc import Sequence

REDACTED = "***"

_SECRET_WORDS = re.compile(
    r"token|secrets?|passphrase|passwd|pwd|credentials?|apikey|auth|authorization|bearer|pat|.*password.*", re.IGNORECASE
)
_COUNTED_TOKENS = re.compile(r"max|min|num|per|eos|bos|pad|unk|sep|cls|mask|special|new|image", re.IGNORECASE)
_SCHEME = r"([a-z][a-z0-9+.\-]{0,30}://)"  # bounded, as what follows it: an argument may be 128 KiB of one letter
_URL_PASSWORD = re.compile(_SCHEME + r"([^/\s:@]{0,300}):([^/\s]{0,4000})@", re.IGNORECASE)
_URL_TOKEN = re.compile(_SCHEME + r"([^/\s:@]{16,4000})@", re.IGNORECASE)
_URL_QUERY = re.compile(r"([?&](?:[\w\-]*(?:token|secret|password|key|signature|sig))=)[^&\s]+", re.IGNORECASE)
_KNOWN_TOKEN = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|sk-[A-Za-z0-9_\-]{20,}|AKIA[A-Z0-9]{16}"
    r"|xox[abprs]-[A-Za-z0-9\-]{10,}|glpat-[A-Za-z0-9_\-]{16,})"
)
_BEARER = re.compile(r"\b(bearer|basic)\s+\S+", re.IGNORECASE)


def is_secret_name(name: str) -> bool:
    """Whether an option or variable of that name holds a secret: `hf-token` does, `max_tokens` and `tokenizer` do not."""
    words = re.split(r"[_\-.]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "-", name.lstrip("-+")).lower())
    if any(_COUNTED_TOKENS.fullmatch(word) for word in words):
        return False
    return words[-1] in ("key", "keys") or any(_SECRET_WORDS.fullmatch(word) for word in words)


def redact_text(text: str) -> str:
    """`text` with URL passwords, bearer credentials and well-known access tokens replaced by `***`."""
    text = _URL_PASSWORD.sub(rf"\1\2:{REDACTED}@", text)
    text = _URL_TOKEN.sub(rf"\1{REDACTED}@", text)
    text = _URL_QUERY.sub(rf"\1{REDACTED}", text)
    text = _BEARER.sub(rf"\1 {REDACTED}", text)
    return _KNOWN_TOKEN.sub(REDACTED, text)


def redact_command(command: Sequence[str]) -> list[str]:
    """The command with each secret replaced by `***`; every other word verbatim, the number of words unchanged."""
    shown: list[str] = []
    value_is_secret = False
    for word in command:
        name, equals, value = word.partition("=")
        if value_is_secret and not (word.startswith("-") and is_option_like(word)):
            shown.append(REDACTED)
            value_is_secret = False
            continue
        value_is_secret = False
        if equals and is_secret_name(name):
            shown.append(f"{name}={REDACTED}" if value else word)
        else:
            value_is_secret = not equals and word.startswith("-") and is_secret_name(word)
            shown.append(redact_text(word))
    return shown


def is_option_like(word: str) -> bool:
    """Whether a word beginning with `-` is another option rather than a value that happens to begin so."""
    return re.fullmatch(r"-[A-Za-z]|--[A-Za-z][\w\-.]*(=.*)?", word, re.DOTALL) is not None
