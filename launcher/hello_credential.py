"""Who an agent says it is when it dials a supervisor over TCP: the token of `RSUP_TOKEN_FILE`, else a MUNGE credential.

Over ipc the kernel says it, and nothing is sent. A token goes out over links with a key only, which nobody overhears; a MUNGE
credential is good for one `Hello` to one supervisor. `munged` may take its time: credentials are made on a thread.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable

from rsup.supervisor import munge, places
from rsup.supervisor.munge import MungeError

FRESH_FOR_S = 30.0
"""Half the life of a credential: clocks differ."""
AGAIN_AFTER_S = 2.0


class HelloCredentials:
    """For one agent; `wake` is called from another thread when a credential has been made. Raise `PlaceError` for a token file
    that cannot be used."""

    def __init__(self, agent_id: str, wake: Callable[[], None]) -> None:
        self._agent_id = agent_id
        self._wake = wake
        token_file = os.environ.get("RSUP_TOKEN_FILE", "")
        self._token = places.read_key_file(token_file, "token file").decode("ascii", "replace") if token_file else ""
        self._socket = munge.default_socket()
        self._lock = threading.Lock()
        self._closed = False
        self._making = False
        self._made: tuple[str, str, float] = ("", "", 0.0)
        self._failed_s: float | None = None
        self._has_worked = False

    def take(self, address: str, *, keyed: bool) -> str | None:
        """The `credential` of the next `Hello` to `address`; None: not made yet, ask again when woken."""
        if not address.startswith("tcp:"):
            return ""
        if self._token and keyed:
            return f"bearer {self._token}"
        if not munge.is_here(self._socket):
            return ""
        with self._lock:
            whose, credential, made_s = self._made
            if whose == address and time.monotonic() - made_s < FRESH_FOR_S:
                self._made = ("", "", 0.0)
                return f"munge {credential}"
            failed = self._failed_s is not None and time.monotonic() - self._failed_s < AGAIN_AFTER_S
            if failed or self._making:
                return "" if failed and not self._has_worked else None
            self._making = True
        threading.Thread(target=self._make, args=(address,), name="rsup-munge", daemon=True).start()
        return None

    def close(self) -> None:
        """Call nobody any more."""
        with self._lock:
            self._closed = True

    def _make(self, address: str) -> None:
        credential = ""
        with contextlib.suppress(MungeError):  # who named itself before waits for munged; another goes without, and hears more
            credential = munge.encode(munge.rpc_payload(address, self._agent_id), self._socket)
        with self._lock:
            self._making = False
            now_s = time.monotonic()
            if credential:
                self._made, self._failed_s, self._has_worked = (address, credential, now_s), None, True
            else:
                self._failed_s = now_s
            if not self._closed:
                self._wake()
