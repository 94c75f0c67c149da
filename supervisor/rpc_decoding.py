"""Reading what agents of other releases send: a newer one's new facts, and the `Hello` of one too far away to understand.

The strict decoder of `wire` comes first. Only what it refuses is read here, field by field: a fact of a kind that this
release does not know becomes a `Note`, so that its sequence number is used up and the facts behind it get through. The same
becomes of a fact with a number that no column holds; beats with one are left out, and a `Hello` with one is no message.
"""

import re

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

LARGEST_INTEGER = 2**62 - 1
"""Of any message, and its negative the smallest. Columns hold up to 2**63 - 1; attempts and epochs are counted on from it."""
_MAY_BE_LARGER = re.compile(rb"\xcf[\x40-\xff]|\xd3[\x40-\xbf]")
"""How msgpack begins an integer beyond that (uint 64, int 64); texts may hold the same bytes."""


def decode(data: bytes) -> ToSupervisor:
    """The message in `data`. Raise `MessageError` for what is none of any release."""
    try:
        message = wire.decode_to_supervisor(data)
    except MessageError:
        if len(data) > wire.MAX_MESSAGE_BYTES:
            raise
        other = _decode_of_other_release(data)
        if other is None:
            raise
        message = other
    return message if _MAY_BE_LARGER.search(data) is None else _storable(message)


def version_problem(hello: Hello) -> str:
    """Why this agent and this supervisor cannot talk, in one line; empty if they can."""
    if wire.common_version(hello.speaks) is not None:
        return ""
    ours_is_newer = hello.speaks[1] < wire.WIRE_VERSION
    remedy = "upgrade rsup there" if ours_is_newer else "upgrade the supervisor, or let it end and launch again"
    node = hello.agent.node or "the node"
    return f"rsup {hello.release} on {node} is too far from the supervisor's rsup {wire.RELEASE} to talk to it: {remedy}"


def _storable(message: ToSupervisor) -> ToSupervisor:
    """`message` without what no database holds: one agent's numbers must not keep the store from taking what others say."""
    if isinstance(message, Report):
        facts = [fact if _is_storable(fact) else _unstorable(fact) for fact in message.facts]
        beats = [beat for beat in message.beats if _is_storable(beat)]
        message = msgspec.structs.replace(message, facts=facts, beats=beats)
    if not _is_storable(message):
        raise MessageError(f"a {type(message).__name__} with a number beyond {LARGEST_INTEGER}")
    return message


def parts_of(report: Report, why: str) -> list[Report]:
    """Smaller reports that say the same, of one that the store refuses; of a single fact a `Note` is left. Empty: it has no
    parts."""
    facts, first = report.facts, report.first_sequence
    if len(facts) > 1:
        half = len(facts) // 2
        one = msgspec.structs.replace(report, facts=facts[:half], beats=[])
        return [one, msgspec.structs.replace(report, facts=facts[half:], first_sequence=first + half)]
    if facts and report.beats:
        return [msgspec.structs.replace(report, beats=[])]
    if facts and not isinstance(facts[0], wire.Note):
        note = wire.Note(facts[0].at_us, "warning", f"a {type(facts[0]).__name__} is left out: {why}")
        return [msgspec.structs.replace(report, facts=[note])]
    return []


def _is_storable(value: object) -> bool:
    if isinstance(value, Struct):
        return all(_is_storable(getattr(value, name)) for name in value.__struct_fields__)
    if isinstance(value, dict):
        return all(_is_storable(part) for item in value.items() for part in item)
    if isinstance(value, (list, tuple)):
        return all(_is_storable(part) for part in value)
    return not isinstance(value, int) or -LARGEST_INTEGER <= value <= LARGEST_INTEGER


def _unstorable(fact: AnyFact) -> AnyFact:
    at_us = fact.at_us if _is_storable(fact.at_us) else wire.now_us()
    return wire.Note(at_us, "warning", f"a {type(fact).__name__} with a number beyond {LARGEST_INTEGER} is left out")


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
