"""Ports of workers, where foreign routers use vLLM's `kv_transfer_params`. Knows no HTTP.

    do_remote_decode at the port of P    ──► P computes the prompt, the response has a handle
    do_remote_prefill at the port of D   ──► the handle is consumed: hand-off from P to D, answer

P caches the exact pages of this prompt like those of any other, so a handle only names their
worker: the hand-off takes place once D is known, and pages that P had no room for are computed
again. The prompt is the one that comes with the handle, whatever the handle says.
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

MAX_HANDLES = 1 << 12  # that are remembered, including consumed and expired ones
ANY_WORKERS = ("", "")


@dataclass(frozen=True)
class Handle:
    """A prompt that one process of a worker has computed.

    epoch:  of that process
    prompt: a hash of the token ids
    until:  when the handle expires, on the clock of `PdPorts`
    """

    params: TransferParams
    worker: str
    epoch: int
    prompt: int
    until: float
    consumed: bool = False


class PdPorts:
    """Which worker is behind each port, and the handles that were issued there.

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
        self._router = router
        self._ports = ports
        self._lease_s = lease_s
        self._clock = clock
        self._handles: OrderedDict[str, Handle] = OrderedDict()  # by id, oldest first

    def enter(
        self, port: int, request: GenerationRequest, prompts: Sequence[tuple[int, ...]]
    ) -> tuple[str, str]:
        """The prefill and the decode worker of a request that came in at a port; "": any.

        RequestError for what this port does not do, HandleError for an unusable handle.
        """
        params = request.kv_transfer_params
        if port not in self._ports:
            if params.do_remote_decode or params.do_remote_prefill:
                raise RequestError(
                    "kv_transfer_params are only accepted at a worker's port; see --pd-ports",
                    "kv_transfer_params",
                )
            return ANY_WORKERS
        worker = self._worker_at(port)
        if params.do_remote_decode:
            return self._enter_prefill(worker, request, prompts)
        if params.do_remote_prefill:
            return self._enter_decode(worker, params, prompts)
        role = worker.info.role
        prefill = worker.name if role.prefills else ""
        decode = worker.name if role.decodes else ""
        return prefill, decode

    def _enter_prefill(
        self,
        worker: WorkerConnection,
        request: GenerationRequest,
        prompts: Sequence[tuple[int, ...]],
    ) -> tuple[str, str]:
        name = worker.name
        _check(
            not request.kv_transfer_params.do_remote_prefill,
            "do_remote_prefill is true too; expected false",
        )
        _check(
            worker.info.role.prefills,
            f"do_remote_decode at {name}; expected a worker that prefills",
        )
        _check(
            len(prompts) == 1,
            f"do_remote_decode of {len(prompts)} prompts; expected one",
        )
        _check(
            request.max_answer_tokens == 1,
            f"do_remote_decode: max_tokens is {request.max_answer_tokens}; expected 1",
        )
        _check(not request.stream, "do_remote_decode: stream is true; expected false")
        return name, name

    def _enter_decode(
        self,
        worker: WorkerConnection,
        params: TransferParams,
        prompts: Sequence[tuple[int, ...]],
    ) -> tuple[str, str]:
        name = worker.name
        _check(
            worker.info.role.decodes,
            f"do_remote_prefill at {name}; expected a worker that decodes",
        )
        _check(
            len(prompts) == 1,
            f"do_remote_prefill of {len(prompts)} prompts; expected one",
        )
        return self._consume(params, prompts[0]), name

    def park(self, host: str, port: int, prompt: tuple[int, ...]) -> dict[str, Any]:
        """A handle for a prompt that the worker at this port has computed."""
        worker = self._worker_at(port)
        handle_id = uuid.uuid4().hex
        num_blocks = -(-len(prompt) // UNIT_TOKENS)
        params = TransferParams(
            do_remote_prefill=True,
            remote_engine_id=self._engine_id(worker.name),
            remote_block_ids=list(range(num_blocks)),
            remote_host=host,
            remote_port=port,
            remote_request_id=handle_id,
        )
        self._handles[handle_id] = Handle(
            params,
            worker=worker.name,
            epoch=worker.info.epoch,
            prompt=hash(prompt),
            until=self._clock() + self._lease_s,
        )
        if len(self._handles) > MAX_HANDLES:
            self._handles.popitem(last=False)
        return params.model_dump()

    def _consume(self, params: TransferParams, prompt: tuple[int, ...]) -> str:
        """The worker of a handle, which can be used once."""
        engine_id = params.remote_engine_id or ""
        handle_id = params.remote_request_id or ""
        if not engine_id.startswith(self._engine_id("")):
            raise HandleError(
                f"the handle is foreign: {engine_id!r} is not an engine of this service"
            )
        handle = self._handles.get(handle_id)
        if handle is None:
            raise HandleError(
                f"the handle is unknown: {handle_id!r} was not issued here, or is too old"
            )
        if params != handle.params or hash(prompt) != handle.prompt:
            raise HandleError(
                f"the handle is foreign: {handle_id!r} was issued for another prompt"
            )
        if handle.consumed:
            raise HandleError(f"the handle is consumed: {handle_id!r} was used before")
        if self._clock() >= handle.until:
            raise HandleError(
                f"the handle is expired: {handle_id!r} was valid for {self._lease_s:g} s"
            )
        worker = self._router.peers.get(handle.worker)
        if worker is None or worker.info.epoch != handle.epoch:
            raise HandleError(
                f"the handle is stale: {handle.worker} has restarted since"
            )
        self._handles[handle_id] = replace(handle, consumed=True)
        return handle.worker

    def _engine_id(self, worker: str) -> str:
        return f"{self._router.id}.{worker}"

    def _worker_at(self, port: int) -> WorkerConnection:
        """The newest worker behind a port; PeerLostError while there is none."""
        first_name = self._ports[port]
        workers = [
            worker
            for name, worker in self._router.peers.items()
            if name.partition(".")[0] == first_name
        ]
        if not workers:
            raise PeerLostError(f"{first_name} is restarting")
        return workers[-1]


def _check(holds: bool, message: str) -> None:
    if not holds:
        raise RequestError(message, "kv_transfer_params")
