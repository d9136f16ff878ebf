"""The service as an application of Ray Serve: for `serve deploy`, and RayService on Kubernetes.

    applications:
      - name: disagg
        import_path: disagg.serve_app:build_app
        args: {prefill: 1, decode: 1, cluster: {pools: true, gpus: 1}}

One replica is the front end; its workers are the actors that `disagg serve` would have. What comes
to Ray Serve is passed on to the front end, and its answer goes back as it is, piece by piece.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import httpx
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import StreamingResponse

from disagg.config import Config, replace_keys
from disagg.errors import ConfigError, PeerLostError
from disagg.server.service import Service

if TYPE_CHECKING:
    from ray.serve import Application

MAX_REQUESTS = 1000  # at once; more wait in Ray Serve
HOP = (
    "connection",
    "transfer-encoding",
)  # headers of one connection, not of the answer


class FrontEnd:
    """A service with its workers, on the Ray that this process is a part of."""

    def __init__(self, config: Config):
        self._stack = ExitStack()
        self._service = self._stack.enter_context(Service(config))
        self._client = httpx.AsyncClient(
            base_url=self._service.url,
            timeout=None,
            limits=httpx.Limits(
                max_connections=None
            ),  # the service has limits of its own
            trust_env=False,  # it is on this host, behind no proxy
        )

    async def __call__(self, request: Request) -> StreamingResponse:
        """What the service answers."""
        path = request.url.path.removeprefix(request.scope.get("root_path", ""))
        asked = self._client.build_request(
            request.method,
            httpx.URL(path=path, query=request.url.query.encode()),
            headers=request.headers.raw,
            content=request.stream(),
        )
        answer = await self._client.send(asked, stream=True)
        headers = {
            name: value for name, value in answer.headers.items() if name not in HOP
        }
        closing = BackgroundTask(answer.aclose)
        return StreamingResponse(
            answer.aiter_raw(), answer.status_code, headers, background=closing
        )

    def check_health(self) -> None:
        """Asked by Ray Serve, which starts another replica after an error."""
        if self._service.stopped.is_set():
            raise PeerLostError("the service has ended")

    def __del__(self) -> None:
        self._stack.close()


def build_app(args: Mapping[str, Any]) -> "Application":
    """The application, of `config_of` these settings.

    ConfigError for what cannot be, and where Ray Serve is not installed.
    """
    config = config_of(args)
    try:
        from ray import serve
    except ImportError as error:
        raise ConfigError(
            "Ray Serve is missing; pip install 'disagg[serve]'"
        ) from error
    options = {"num_cpus": 0}  # its workers compute
    front = serve.deployment(
        FrontEnd,
        name="disagg",
        max_ongoing_requests=MAX_REQUESTS,
        ray_actor_options=options,
    )
    return front.bind(config)


def config_of(args: Mapping[str, Any]) -> Config:
    """Settings as in a config file; beside them "prefill" and "decode", how many workers."""
    roles = {name: args[name] for name in ("prefill", "decode") if name in args}
    joined = replace_keys(Config(), {"cluster": {"address": "auto", **roles}})
    settings = {name: value for name, value in args.items() if name not in roles}
    behind = {"host": "127.0.0.1", "port": 0, "tls_certificate": None, "tls_key": None}
    return replace_keys(replace_keys(joined, settings), {"server": behind})
