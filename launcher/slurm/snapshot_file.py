"""The snapshot: what the supervisor says of a cluster's hardware, signed, in a file. Standard library, and `cryptography` where
a signature is checked.

    rsup-snapshot 1 KEY_ID SIGNATURE
    {"schema": 1, "cluster": "c", "serial": 7, "made_us": ..., "num_nodes": 40, "max_refused": 2, "guard_open": false,
     "nodes": {"n17": {"verdict": "refuse", "state": "quarantined", "id": "Q-17", "reason": "...", "until": null}},
     "devices": {"GPU-...": {..., "node": "n17", "serial": "1650..."}}}

KEY_ID: first 16 hex digits of SHA-256 of the 32 raw bytes of the public key. SIGNATURE: base64 of Ed25519 over all bytes after
the first line. Only what is not clear is listed.
"""

import base64
import binascii
import hashlib
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from rsup.launcher.slurm.node_settings import NodeProblem

MAGIC = b"rsup-snapshot"
FORMAT = b"1"
SCHEMA = 1
MAX_SNAPSHOT_BYTES = 16 << 20
REFUSE, AVOID = "refuse", "avoid"
PRIVATE_MARK = b"rsup-signing-key "
"""With it the supervisor's private key begins, which is no node's."""


class NotPublic(NodeProblem):
    """A file that should hold the supervisor's public key holds something else."""


class Listed(NamedTuple):
    """What stands against a node or a device."""

    verdict: str
    id: str = ""
    reason: str = ""
    state: str = ""
    until: str = ""
    """UTC, ISO 8601; empty: for good."""
    node: str = ""
    """Of a device: where the supervisor last saw it."""
    serial: str = ""


class Snapshot(NamedTuple):
    """A whole, verified snapshot. `devices` by UUID."""

    cluster: str
    serial: int
    made_us: int
    num_nodes: int
    max_refused: int
    guard_open: bool
    nodes: Mapping[str, Listed]
    devices: Mapping[str, Listed]

    @property
    def refused_nodes(self) -> frozenset[str]:
        """Nodes of which something is refused."""
        by_device = {one.node for one in self.devices.values() if one.verdict == REFUSE and one.node}
        return frozenset(by_device | {name for name, one in self.nodes.items() if one.verdict == REFUSE})


def public_key_of(text: bytes) -> bytes:
    """The 32 raw bytes of a public key file: one line of base64. Raise `NodeProblem`."""
    if text.lstrip().startswith(PRIVATE_MARK):
        raise NotPublic("this is a private signing key, which no node may have; copy signing-key.pub instead")
    try:
        raw = base64.b64decode(text.strip(), validate=True)
    except (binascii.Error, ValueError):
        raw = b""
    if len(raw) != 32:
        raise NotPublic(
            "this is not the public key of the supervisor, one line of base64 of 32 bytes; copy signing-key.pub again"
        )
    return raw


def key_id(public_key: bytes) -> str:
    """How a snapshot names the key that signed it."""
    return hashlib.sha256(public_key).hexdigest()[:16]


def read_snapshot(data: bytes, public_key: bytes) -> Snapshot:
    """The snapshot in `data`, its signature checked. Raise `NodeProblem`, one line that says what is wrong with it."""
    head, newline, body = data.partition(b"\n")
    words = head.split(b" ")
    if not newline or len(words) != 4 or words[0] != MAGIC:
        raise NodeProblem("the snapshot is no snapshot, or cut off in its first line")
    if words[1] != FORMAT:
        raise NodeProblem(f"the snapshot has format {_text(words[1], 20)}, this rsup reads format 1; upgrade rsup on this node")
    if words[2].decode("ascii", "replace") != key_id(public_key):
        raise NodeProblem(
            f"the snapshot was signed by key {_text(words[2], 16)}, not by {key_id(public_key)}, which this node trusts"
        )
    _check_signature(words[3], body, public_key)
    return snapshot_of(body)


def _text(word: bytes, max_chars: int) -> str:
    """Somebody else's bytes, for a line."""
    return "".join(letter if letter.isalnum() else "?" for letter in word[:max_chars].decode("ascii", "replace"))


def _check_signature(signature: bytes, body: bytes, public_key: bytes) -> None:
    try:
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    except ImportError as error:
        raise NodeProblem(f"the snapshot signature cannot be checked: {error}; install rsup on this node again") from None
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(base64.b64decode(signature, validate=True), body)
    except (InvalidSignature, binascii.Error, ValueError):
        raise NodeProblem("the snapshot signature is wrong: it is cut off, or was changed after it was signed") from None


def snapshot_of(body: bytes) -> Snapshot:
    """The content of a snapshot. Keys that are unknown to us are left out. Raise `NodeProblem`."""
    try:
        content: dict[str, Any] = json.loads(body)
        if content["schema"] != SCHEMA:
            raise NodeProblem(
                f"the snapshot has schema {content['schema']!r}, this rsup reads {SCHEMA}; upgrade rsup on this node"
            )
        return Snapshot(
            cluster=str(content.get("cluster", "")),
            serial=int(content["serial"]),
            made_us=int(content["made_us"]),
            num_nodes=int(content["num_nodes"]),
            max_refused=int(content["max_refused"]),
            guard_open=bool(content.get("guard_open", False)),
            nodes={name: _listed(one) for name, one in content["nodes"].items()},
            devices={uuid: _listed(one) for uuid, one in content["devices"].items()},
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise NodeProblem(f"the snapshot content cannot be read: {type(error).__name__}: {error}") from None


def _listed(one: Mapping[str, Any]) -> Listed:
    texts = {name: str(one.get(name) or "") for name in ("id", "reason", "state", "until", "node", "serial")}
    return Listed(verdict=str(one["verdict"]), **texts)
