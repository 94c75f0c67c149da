"""Outputs of the core: what the loop must do with a decision.

A `Record` is written in the transaction that also keeps the new state; everything else is done after its commit and may be
done twice (after a crash the outbox of each agent is sent again). Commands to agents are no actions: they stand in the
agent's outbox in the state, with their reasons, until the agent acknowledges them; `SendOrder` says that there are new ones.
"""

from msgspec import Struct

from rsup.supervisor import records
from rsup.supervisor.evidence import Evidence


class Record(Struct, frozen=True):
    """Write this in the same transaction as the state."""

    record: records.Record


class SendWelcome(Struct, frozen=True):
    """Tell the agent that it belongs to the job."""

    agent_id: str


class SendRefusal(Struct, frozen=True):
    """Tell the agent to exit with `exit_code`; `message` is one line that says why and what to do."""

    agent_id: str
    exit_code: int
    message: str


class SendOrder(Struct, frozen=True):
    """Send the agent what is new in its outbox."""

    agent_id: str


class SendNotice(Struct, frozen=True):
    """Say a sentence on the agent's terminal, if it can be reached now."""

    agent_id: str
    text: str


class FoundEvidence(Struct, frozen=True):
    """Something that speaks about a device or node. The loop hands it to the hardware's history, which alone knows its state,
    and commits what follows in the same transaction."""

    evidence: Evidence


class AnswerOperator(Struct, frozen=True):
    """Answer an `OperatorAsked`: taken up (`done`), or not, with a sentence that says why."""

    request_id: str
    done: bool
    message: str


Action = Record | SendWelcome | SendRefusal | SendOrder | SendNotice | FoundEvidence | AnswerOperator
