"""What a router owes to whoever waits for the tokens of a request."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from disagg.errors import DisaggError


@dataclass(frozen=True)
class Output:
    """Something a client gets: a token, or the end. `kv`: figures of the hand-off, once known."""

    token: int | None = None
    finish_reason: str | None = None
    kv: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Client:
    """Whoever waits. `receipt` is set when the figures of the hand-off, `kv`, have come."""

    inbox: asyncio.Queue[Output | DisaggError] = field(default_factory=asyncio.Queue)
    kv: Mapping[str, Any] = field(default_factory=dict)
    receipt: asyncio.Event = field(default_factory=asyncio.Event)
