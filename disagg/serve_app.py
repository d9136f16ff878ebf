"""The service as an application of Ray Serve: for `serve deploy`, and RayService on Kubernetes.

    applications:
      - name: disagg
        import_path: disagg.serve_app:build_app
        args: {prefill: 1, decode: 1, cluster: {pools: true, gpus: 1}}

One replica is the front end; its workers are the actors that `disagg serve` would start. A request
to Ray Serve is passed on to the front end, and the answer is streamed back unchanged.
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
# headers of one connection, not of the answer
HOP_HEADERS = ("connection", "transfer-encoding")


class FrontEnd:
    """A service with its workers, on the Ray that this process is a part of."""

    def __init__(self, config: Config):
        self._stack = ExitStack()
        self._service = self._stack.enter_context(Service(config))
        self._client = httpx.AsyncClient(
            base_url=self._service.url,
            timeout=None,
            # the service has limits of its own
            limits=httpx.Limits(max_connections=None),
            # it is on this host, behind no proxy
            trust_env=False,
        )

    async def __call__(self, request: Request) -> StreamingResponse:
        """What the service answers."""
        path = request.url.path.removeprefix(request.scope.get("root_path", ""))
        forwarded = self._client.build_request(
            request.method,
            httpx.URL(path=path, query=request.url.query.encode()),
            headers=request.headers.raw,
            content=request.stream(),
        )
        answer = await self._client.send(forwarded, stream=True)
        headers = {
            name: value
            for name, value in answer.headers.items()
            if name not in HOP_HEADERS
        }
        return StreamingResponse(
            answer.aiter_raw(),
            answer.status_code,
            headers,
            background=BackgroundTask(answer.aclose),
        )

    def check_health(self) -> None:
        """Called by Ray Serve, which starts another replica after an error."""
        if self._service.stopped.is_set():
            raise PeerLostError("the service has ended")

    def __del__(self) -> None:
        self._stack.close()


def build_app(args: Mapping[str, Any]) -> "Application":
    """The application, with the settings of `config_of`.

    ConfigError for invalid settings, and if Ray Serve is not installed.
    """
    config = config_of(args)
    try:
        from ray import serve
    except ImportError as error:
        raise ConfigError(
            "Ray Serve is missing; pip install 'disagg[serve]'"
        ) from error
    front = serve.deployment(
        FrontEnd,
        name="disagg",
        max_ongoing_requests=MAX_REQUESTS,
        ray_actor_options={"num_cpus": 0},  # its workers compute
    )
    return front.bind(config)


def config_of(args: Mapping[str, Any]) -> Config:
    """Settings as in a config file; beside them "prefill" and "decode", how many workers."""
    roles = {name: args[name] for name in ("prefill", "decode") if name in args}
    settings = {name: value for name, value in args.items() if name not in roles}
    # the front end is reached through Ray Serve alone
    server = {"host": "127.0.0.1", "port": 0, "tls_certificate": None, "tls_key": None}
    config = replace_keys(Config(), {"cluster": {"address": "auto", **roles}})
    config = replace_keys(config, settings)
    return replace_keys(config, {"server": server})
