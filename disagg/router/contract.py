"""What the server needs of a router, in the same process or in another. Knows neither."""

import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol, Self

from disagg.router.actions import TokenOutput

ANY_WORKERS = ("", "")


@dataclass(frozen=True)
class Submission:
    """A request for a router.

    params:   what the engine samples by, the seed included
    at:       the prefill and the decode worker it has to use while they take part; "": any
    emitted:  tokens that its client already has
    waited_s: since it arrived
    resumed:  an earlier router had accepted it, so no limit of the queue refuses it
    client:   a name that stands for its client's API key; "": it has none
    prediction: tokens that its answer may repeat
    request_id: the X-Request-Id of its client; several requests may have the same
    """

    prompt: Sequence[int]
    params: Mapping[str, Any]
    codec: str
    at: tuple[str, str] = ANY_WORKERS
    emitted: tuple[int, ...] = ()
    waited_s: float = 0.0
    resumed: bool = False
    client: str = ""
    prediction: Sequence[int] = ()
    request_id: str = ""


@dataclass(frozen=True)
class RouterReport:
    """A router and its workers at one moment.

    summary: see `Router.summary`
    workers: each with its name, role and address, and what it says of itself, or its "error"
    running: the oldest requests that have not ended, see `RequestState.describe`
    """

    summary: Mapping[str, int]
    workers: Sequence[Mapping[str, Any]]
    running: Sequence[Mapping[str, Any]] = ()

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        return cls(**json.loads(text))


class RequestRouter(Protocol):
    """Answers requests token by token: a `Router`, or a `RouterClient` of one elsewhere."""

    @property
    def ready(self) -> bool:
        """Whether there is a worker for each side of a hand-off, and requests get to them."""

    @property
    def running(self) -> int:
        """Requests that are not done."""

    @property
    def waiting(self) -> int:
        """Number of queued requests."""

    def lacks(self, expected: Mapping[str, int]) -> str:
        """What `ready` waits for, in words; expected: number of workers by role."""

    def generate(
        self,
        prompt: tuple[int, ...],
        params: Mapping[str, Any],
        codec: str,
        at: tuple[str, str] = ANY_WORKERS,
        client: str = "",
        prediction: Sequence[int] = (),
        request_id: str = "",
    ) -> AsyncGenerator[TokenOutput]:
        """The tokens of one request, then its end. Leaving the iteration cancels the request.

        at, client, prediction, request_id: as in `Submission`
        """

    async def report(self) -> RouterReport:
        """The state of the router and of every worker."""

    async def close(self, grace_s: float = 0.0) -> None:
        """Take nothing new, let requests end within the grace; then end them: StoppingError."""
