"""Reading what agents of other releases send: a newer one's new facts, and the `Hello` of one too far away to understand.

The strict decoder of `wire` comes first. Only what it refuses is read here, field by field: a fact of a kind that this
release does not know becomes a `Note`, so that its sequence number is used up and the facts behind it get through.
"""

import msgspec
from msgspec import Raw, Struct

from rsup.supervisor import wire
from rsup.supervisor.wire import AgentInfo, AnyFact, Hello, JobSpec, MessageError, Report, ToSupervisor

_fact_decoder = msgspec.msgpack.Decoder(AnyFact)
_dict_decoder = msgspec.msgpack.Decoder(dict[str, object])


class _SomeAgent(Struct):
    agent_id: str
    node: str = ""


class _SomeHello(Struct, tag="Hello"):
    speaks: tuple[int, int]
    release: str
    agent: _SomeAgent


class _SomeReport(Struct, tag="Report"):
    agent_id: str
    epoch: int
    acked_command: int
    first_sequence: int = 0
    facts: list[Raw] = []


_some_decoder = msgspec.msgpack.Decoder(_SomeHello | _SomeReport)


def decode(data: bytes) -> ToSupervisor:
    """The message in `data`. Raise `MessageError` for what is none of any release."""
    try:
        return wire.decode_to_supervisor(data)
    except MessageError:
        if len(data) > wire.MAX_MESSAGE_BYTES:
            raise
        message = _decode_of_other_release(data)
        if message is None:
            raise
        return message


def version_problem(hello: Hello) -> str:
    """Why this agent and this supervisor cannot talk, in one line; empty if they can."""
    if wire.common_version(hello.speaks) is not None:
        return ""
    ours_is_newer = hello.speaks[1] < wire.WIRE_VERSION
    remedy = "upgrade rsup there" if ours_is_newer else "upgrade the supervisor, or let it end and launch again"
    node = hello.agent.node or "the node"
    return f"rsup {hello.release} on {node} is too far from the supervisor's rsup {wire.RELEASE} to talk to it: {remedy}"


def _decode_of_other_release(data: bytes) -> ToSupervisor | None:
    try:
        some = _some_decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if isinstance(some, _SomeReport):
        facts = [_fact(raw) for raw in some.facts]
        return Report(some.agent_id, some.epoch, some.acked_command, some.first_sequence, facts)
    if wire.common_version(some.speaks) is not None:
        return None
    agent = AgentInfo(some.agent.agent_id, some.agent.node, "", 0)
    return Hello(some.speaks, some.release, agent, JobSpec())


def _fact(raw: Raw) -> AnyFact:
    try:
        return _fact_decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass
    try:
        fields = _dict_decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        fields = {}
    at_us = fields.get("at_us")
    kind = str(fields.get("type", "?"))[:64]
    return wire.Note(at_us if isinstance(at_us, int) else wire.now_us(), "warning", f"a newer agent's {kind}, unknown here")
