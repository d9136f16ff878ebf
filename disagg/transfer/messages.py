"""What senders and receivers tell each other, and what the ledger tells its worker. Plain data.

`convert.py` turns them into protobuf messages and back; nothing here knows gRPC.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from disagg.errors import DisaggError
from disagg.state import GroupState
from disagg.wire import Buffer, Commit, Item


class State(StrEnum):
    """Where a hand-off is in its life; the drawing above has the arrows."""

    HELD = "held"
    ATTACHED = "attached"
    BROKEN = "broken"
    ADMITTED = "admitted"
    FINISHED = "finished"
    EXPIRED = "expired"
    ABORTED = "aborted"
    SUPERSEDED = "superseded"

    @property
    def live(self) -> bool:
        """Still waiting for its pages."""
        return self in (State.HELD, State.ATTACHED, State.BROKEN)

    @property
    def admitted(self) -> bool:
        """Its pages are the engine's."""
        return self in (State.ADMITTED, State.FINISHED)


@dataclass(frozen=True)
class Request:
    """What a prefill worker asks room for.

    rid, attempt:  the router's name of the request, and how often it was started
    epoch:         the incarnation of the decode worker that the router chose
    tokens:        length of the prompt
    model, plan:   fingerprints; both sides must have the same
    wait_s:        how long the caller waits for room
    spec:          codec spec or plan of the request; empty: the one of the worker
    keys:          content keys of the units of the prompt, in order, for dedup; may be empty
    """

    rid: str
    attempt: int
    epoch: int
    tokens: int
    model: str
    plan: str
    wait_s: float = 0.0
    spec: str = ""
    keys: tuple[bytes, ...] = ()

    def same_work(self, other: "Request") -> bool:
        """Whether the bytes of another request would fit the same records."""
        return (self.tokens, self.model, self.plan, self.keys) == (
            other.tokens,
            other.model,
            other.plan,
            other.keys,
        )


@dataclass(frozen=True)
class Grant:
    """A reservation as its sender knows it.

    lease_s: it ends this long after the last sign of life
    offered: items that are here already; the sender skips those whose digest it has too
    cached:  for each layer group, how many leading units were found by their keys; the sender
             takes what is offered of them for its own, unless they are final with the prompt only
    """

    nonce: int
    epoch: int
    lease_s: float
    offered: Mapping[Item, int] = field(default_factory=dict)
    cached: tuple[int, ...] = ()


@dataclass(frozen=True)
class Attached:
    """The answer to attach: what arrived, verified; or that the hand-off ended meanwhile.

    state: ATTACHED, or ADMITTED (commit again to hear the answer), or EXPIRED (reserve again)
    push_port: where the stream goes to, on the host that answers
    """

    state: State
    have: Mapping[Item, int] = field(default_factory=dict)
    lease_s: float = 0.0
    push_port: int = 0


@dataclass(frozen=True)
class Ack:
    """The hand-off is complete and the engine has it. Milliseconds as the receiver measured."""

    verify_ms: float = 0.0
    admit_ms: float = 0.0


@dataclass(frozen=True)
class Nack:
    """The commit names items that are not here."""

    missing: tuple[Item, ...]


@dataclass(frozen=True)
class Admission:
    """A complete and verified prompt: from now on the records belong to the engine.

    groups:     one state per layer group, to be released by the engine
    commit:     first token, extras and timings from prefill
    wire_bytes: all bytes of this hand-off's messages, both ways, the acknowledgement included
    verify_ms:  time spent on digests and copies
    """

    rid: str
    attempt: int
    tokens: int
    groups: tuple[GroupState, ...]
    commit: Commit
    wire_bytes: int = 0
    verify_ms: float = 0.0


class Placement(NamedTuple):
    """Bytes and where they go: a byte offset in the arena."""

    start: int
    data: Buffer


@dataclass(frozen=True)
class Write:
    """An open write: the items of a frame that are new, and where their bytes go.

    An item has one open write at most, and is neither admitted nor freed while that lasts.
    """

    nonce: int
    items: Mapping[Item, int]
    placements: tuple[Placement, ...]


@dataclass(eq=False)
class Waiter:
    """A request in the queue for room; settled when it has a grant or an error."""

    request: Request
    deadline: float
    callers: int = 1
    grant: Grant | None = None
    error: DisaggError | None = None

    @property
    def settled(self) -> bool:
        return self.grant is not None or self.error is not None


@dataclass(frozen=True)
class Settled:
    """Action: tell whoever waits for this request."""

    waiter: Waiter


@dataclass(frozen=True)
class Admit:
    """Action: hand a complete prompt to the engine; only then is the commit acknowledged."""

    nonce: int
    admission: Admission


@dataclass(frozen=True)
class Drop:
    """Action: the engine forgets a sequence that it was given, and frees it."""

    rid: str
    attempt: int
    reason: str


Action = Settled | Admit | Drop
