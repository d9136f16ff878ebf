"""Who takes part: roles, and how a worker is known to others."""

from dataclasses import dataclass
from enum import StrEnum

from disagg.transfer.control import WorkerHandler


class Role(StrEnum):
    """What a worker admits."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"

    @property
    def prefills(self) -> bool:
        """Whether it computes prompts for others."""
        return self is not Role.DECODE

    @property
    def decodes(self) -> bool:
        """Whether it takes prompts of others."""
        return self is not Role.PREFILL


@dataclass(frozen=True)
class Started:
    """A worker that can be reached.

    address: "host:port" · epoch: its incarnation · model: fingerprint of config and weights
    """

    name: str
    role: Role
    address: str
    epoch: int
    model: str = ""


@dataclass(frozen=True)
class Peer:
    """A worker as a router sees it. `client`: a `WorkerClient`, or the worker itself."""

    started: Started
    client: WorkerHandler

    @property
    def name(self) -> str:
        return self.started.name
