"""Ports of workers, where foreign routers speak vLLM's `kv_transfer_params`. Knows no HTTP.

    do_remote_decode at the port of P    ──► P computes the prompt, the answer carries a handle
    do_remote_prefill at the port of D   ──► the handle is consumed: hand-off from P to D, answer

P keeps the exact pages of a prompt as those of any, so a handle only says whose they are: the
hand-off is done when D is known, and what P had no room to keep is computed again. The prompt is
the one that comes with the handle, whatever the handle says.
"""

import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from disagg.errors import HandleError, PeerLostError, RequestError
from disagg.router.prefix_index import UNIT_TOKENS
from disagg.router.router import Router, WorkerConnection
from disagg.server.schema import GenerationRequest, TransferParams

MOST_HANDLES = 1 << 12  # remembered, consumed and expired ones too
ANYWHERE = ("", "")


@dataclass(frozen=True)
class Handle:
    """A prompt that the worker `started` as `epoch` computed; `prompt`: a hash of its tokens."""

    params: TransferParams
    worker: str
    epoch: int
    prompt: int
    until: float
    consumed: bool = False


class PdPorts:
    """Who is behind each port, and the handles that were given out there.

    ports:   number -> name of a worker, without the number of its replacement
    lease_s: how long a handle can be used
    """

    def __init__(
        self,
        router: Router,
        ports: Mapping[int, str],
        lease_s: float,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._router, self._ports = router, ports
        self._lease_s, self._clock = lease_s, clock
        self._handles: OrderedDict[str, Handle] = OrderedDict()  # by id, oldest first

    def enter(
        self, port: int, request: GenerationRequest, prompts: Sequence[tuple[int, ...]]
    ) -> tuple[str, str]:
        """The prefill and the decode worker of a request that came by a port; "": any.

        RequestError for what this port does not do, HandleError for a handle that is not good.
        """
        params = request.kv_transfer_params
        if port not in self._ports:
            if params.do_remote_decode or params.do_remote_prefill:
                told = "kv_transfer_params: ports of workers take them; --pd-ports opens some"
                raise RequestError(told, "kv_transfer_params")
            return ANYWHERE
        peer = self._behind(port)
        name, role = peer.name, peer.info.role
        if params.do_remote_decode:
            _require(
                not params.do_remote_prefill, "do_remote_prefill is true too; false is"
            )
            _require(
                role.prefills, f"do_remote_decode at {name}: a worker that prefills is"
            )
            _require(
                len(prompts) == 1, f"do_remote_decode of {len(prompts)} prompts: one is"
            )
            _require(
                request.wanted == 1,
                f"do_remote_decode: max_tokens is {request.wanted}; 1 is",
            )
            _require(not request.stream, "do_remote_decode: stream is true; false is")
            return name, name
        if params.do_remote_prefill:
            _require(
                role.decodes, f"do_remote_prefill at {name}: a worker that decodes is"
            )
            _require(
                len(prompts) == 1,
                f"do_remote_prefill of {len(prompts)} prompts: one is",
            )
            return self._consume(params, prompts[0]), name
        return name if role.prefills else "", name if role.decodes else ""

    def park(self, host: str, port: int, prompt: tuple[int, ...]) -> dict[str, Any]:
        """A handle for a prompt that the worker at this port has computed."""
        peer = self._behind(port)
        params = TransferParams(
            do_remote_prefill=True,
            remote_engine_id=self._engine(peer.name),
            remote_block_ids=list(range(-(-len(prompt) // UNIT_TOKENS))),
            remote_host=host,
            remote_port=port,
            remote_request_id=uuid.uuid4().hex,
        )
        until = self._clock() + self._lease_s
        handle = Handle(params, peer.name, peer.info.epoch, hash(prompt), until)
        self._handles[params.remote_request_id or ""] = handle
        if len(self._handles) > MOST_HANDLES:
            self._handles.popitem(last=False)
        return params.model_dump()

    def _consume(self, params: TransferParams, prompt: tuple[int, ...]) -> str:
        """The worker of a handle, which is good for this once."""
        engine, name = params.remote_engine_id or "", params.remote_request_id or ""
        if not engine.startswith(self._engine("")):
            raise HandleError(
                f"the handle is foreign: {engine!r} is no engine of this service"
            )
        if (handle := self._handles.get(name)) is None:
            raise HandleError(
                f"the handle is unknown: {name!r} was not given out, or is forgotten"
            )
        peer = self._router.peers.get(handle.worker)
        if params != handle.params or hash(prompt) != handle.prompt:
            raise HandleError(
                f"the handle is foreign: {name!r} was given out for another prompt"
            )
        if handle.consumed:
            raise HandleError(f"the handle is consumed: {name!r} was used before")
        if self._clock() >= handle.until:
            raise HandleError(
                f"the handle is expired: {name!r} was good for {self._lease_s:g} s"
            )
        if peer is None or peer.info.epoch != handle.epoch:
            raise HandleError(
                f"the handle is stale: {handle.worker} was started anew since"
            )
        self._handles[name] = replace(handle, consumed=True)
        return handle.worker

    def _engine(self, worker: str) -> str:
        return f"{self._router.id}.{worker}"

    def _behind(self, port: int) -> WorkerConnection:
        """The worker of now behind a port; PeerLostError while there is none."""
        slot = self._ports[port]
        found = [
            x
            for name, x in self._router.peers.items()
            if name.partition(".")[0] == slot
        ]
        if not found:
            raise PeerLostError(f"{slot} does not run now; it is started anew")
        return found[-1]


def _require(holds: bool, told: str) -> None:
    if not holds:
        raise RequestError(f"{told} wanted", "kv_transfer_params")
