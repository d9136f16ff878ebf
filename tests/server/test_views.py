"""What the service tells of itself, and who may stop it."""

import asyncio

import httpx
from fastapi import FastAPI

from disagg.server.app import create_app
from disagg.server.completions import Completions
from disagg.transfer.work import WorkerStatus
from tests.server.visits import ask, visit
from tests.workers.fakes import Network


def test_health_follows_the_workers(
    app: FastAPI, completions: Completions, network: Network
) -> None:
    async def scene(client: httpx.AsyncClient) -> None:
        assert (await client.get("/health")).status_code == 200
        completions.router.died("d")
        response = await client.get("/health")
        assert (response.status_code, response.json()) == (503, {"status": "starting"})

    visit(app, completions, network, scene)


def test_what_workers_count_is_scraped_once_and_goes_on_after_a_new_incarnation(
    app: FastAPI, completions: Completions, network: Network
) -> None:
    async def scene(client: httpx.AsyncClient) -> None:
        counted = {"counts": {"expired": 2, "damaged": 1}, "failures": {"peer_lost": 3}}
        epoch = 1

        async def status() -> WorkerStatus:
            return WorkerStatus(epoch, "model", "plan", {}, counted)

        network.workers["d"].status = status  # type: ignore[method-assign]
        for _ in range(2):
            text = (await client.get("/metrics")).text
            for line in (
                'disagg_kv_expired_total{model_name="tiny",role="decode"} 2.0',
                'disagg_kv_damaged_total{model_name="tiny",role="decode"} 1.0',
                'disagg_kv_transfer_failures_total{model_name="tiny",reason="peer_lost",'
                'role="decode"} 3.0',
            ):
                assert line in text
        counted, epoch = {"counts": {"expired": 1}}, 2
        text = (await client.get("/metrics")).text
        assert 'disagg_kv_expired_total{model_name="tiny",role="decode"} 3.0' in text

    visit(app, completions, network, scene)


def test_models_status_and_metrics_tell_what_is_served(
    app: FastAPI, completions: Completions, network: Network
) -> None:
    async def scene(client: httpx.AsyncClient) -> None:
        await client.post("/v1/completions", json=ask())
        (model,) = (await client.get("/v1/models")).json()["data"]
        assert (model["id"], model["max_model_len"]) == ("tiny", 20)
        status = (await client.get("/status")).json()
        assert [worker["name"] for worker in status["workers"]] == ["p", "d"]
        assert status["workers"][0]["gauges"] == {"jobs": 0.0}
        text = (await client.get("/metrics")).text
        assert 'disagg_worker{role="decode",what="jobs",worker="d"} 0.0' in text
        assert 'disagg_kv_transfer_bytes_total{codec="raw",kind="wire"' in text
        assert 'finished_reason="length"' in text

    visit(app, completions, network, scene)


def test_what_engines_do_has_the_names_that_dashboards_know(
    app: FastAPI, completions: Completions, network: Network
) -> None:
    async def status() -> WorkerStatus:
        doing = {"engine_running": 3, "engine_waiting": 2, "engine_held": 1}
        held = {"used_bytes": 30, "arena_bytes": 120}
        return WorkerStatus(1, "model", "plan", doing | held, {"counts": {"preempted": 4}})

    async def scene(client: httpx.AsyncClient) -> None:
        network.workers["d"].status = status  # type: ignore[method-assign]
        text = (await client.get("/metrics")).text
        labels = '{model_name="tiny",role="decode"}'
        for line in (
            f"vllm:num_requests_running{labels} 3.0",
            f"vllm:num_requests_waiting{labels} 2.0",
            f"disagg_held_sequences{labels} 1.0",
            f"vllm:kv_cache_usage_perc{labels} 0.25",
            f"vllm:num_preemptions_total{labels} 4.0",
        ):
            assert line in text

    visit(app, completions, network, scene)


def test_only_who_knows_the_secret_may_stop_the_service(completions: Completions) -> None:
    stopped: list[bool] = []
    app = create_app(completions, "secret", lambda: stopped.append(True))

    async def scene() -> None:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            for header in ("", "Bearer wrong", "Bearer "):
                response = await client.post("/stop", headers={"authorization": header})
                assert response.status_code == 401
            assert not stopped
            await client.post("/stop", headers={"authorization": "Bearer secret"})

    asyncio.run(scene())
    assert stopped == [True]
