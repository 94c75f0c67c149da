"""One connection of an NVRx client to the node's server: frames in, answers out, neither of them ever waited for."""

import socket

from rsup.launcher.nvrx_pickle import LENGTH_BYTES, MAX_FRAME_BYTES
from rsup.launcher.nvrx_rank import Client

MAX_UNSENT_BYTES = 64 * 1024
"""A client that lets so many answers lie gets no more of them; it is read as before."""


class Connection:
    """`received` is what has come and is no whole frame yet."""

    def __init__(self, sock: socket.socket, local_rank: int, pid: int) -> None:
        self.sock = sock
        self.local_rank = local_rank
        self.client = Client(pid)
        self.received = bytearray()
        self.to_skip = 0
        self.unsent = bytearray()
        self.is_deaf = False
        self.has_complained = False

    def next_frame(self) -> bytes | None:
        """The next whole frame; empty for one that was too long and has been skipped, None if none is complete."""
        received = self.received
        if self.to_skip:
            num_here = min(self.to_skip, len(received))
            del received[:num_here]
            self.to_skip -= num_here
            return None if self.to_skip else b""
        if len(received) < LENGTH_BYTES:
            return None
        length = int.from_bytes(received[:LENGTH_BYTES], "big")
        if length > MAX_FRAME_BYTES:
            del received[:LENGTH_BYTES]
            self.to_skip = length
            return self.next_frame()
        end = LENGTH_BYTES + length
        if len(received) < end:
            return None
        frame = bytes(received[LENGTH_BYTES:end])
        del received[:end]
        return frame

    def send(self, answer: bytes) -> bool:
        """Send what can be sent now, never waiting; True while something waits."""
        if self.is_deaf:
            return False
        self.unsent += answer
        try:
            num_sent = self.sock.send(self.unsent, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL) if self.unsent else 0
        except BlockingIOError:
            num_sent = 0
        except OSError:
            num_sent = len(self.unsent)  # its end is gone; reading will show that
        del self.unsent[:num_sent]
        self.is_deaf = len(self.unsent) > MAX_UNSENT_BYTES
        return bool(self.unsent) and not self.is_deaf
