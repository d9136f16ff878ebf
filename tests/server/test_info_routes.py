"""What the service tells of itself, and who may stop it."""

import asyncio
import re
from contextlib import aclosing
from types import SimpleNamespace

import pytest

from disagg import __version__
from disagg.errors import ConfigError, PeerLostError
from disagg.server.app import create_app
from disagg.server.metrics import MAX_CLIENT_CODECS, AnswerTimes, ServerMetrics
from disagg.server.output_text import TextDelta
from disagg.server.schema import CompletionRequest
from tests.server.conftest import KV, completions_of, said
from tests.server.visits import (
    ask,
    assert_counted,
    events,
    figures_of,
    get,
    post,
    refused,
    send,
)


@pytest.mark.parametrize("path", ["/health", "/ready", "/v1/models", "/metrics"])
def test_a_load_balancer_may_ask_for_heads_alone(path, app):
    """The server leaves the body out."""
    whole, head = get(app, path), send(app, "HEAD", path)
    assert (head.status_code, head.headers["content-type"]) == (
        200,
        whole.headers["content-type"],
    )


def test_ready_follows_the_workers_and_health_does_not(app, router):
    assert get(app, "/ready").status_code == 200
    router.ready = False
    response = get(app, "/ready")
    expected = {"status": "starting", "lacks": "decode 0 of 1; for 3 s"}
    assert (response.status_code, response.json()) == (503, expected)
    assert get(app, "/health").status_code == 200


def test_a_service_that_ends_is_not_ready_but_healthy(completions):
    app = create_app(completions, is_stopping=lambda: True)

    response = get(app, "/ready")
    assert (response.status_code, response.json()) == (503, {"status": "stopping"})
    assert get(app, "/health").status_code == 200


def test_models_and_status_tell_what_is_served(app, router):
    (model,) = get(app, "/v1/models").json()["data"]
    assert (
        get(app, "/v1/models/tiny").json()
        == model
        == get(app, "/v1/models//models/tiny").json()
    )
    assert refused(get(app, "/v1/models/gpt-4"), 404, "model", "model")
    assert get(app, "/version").json() == {"version": __version__}
    shown = model["id"], model["root"], model["max_model_len"]
    assert shown == ("tiny", "/models/tiny", 20)
    router.says["d"] = PeerLostError("gone")
    status = get(app, "/status").json()
    assert (status["model"], status["codec"], status["requests"]) == ("tiny", "raw", 0)
    assert [worker["name"] for worker in status["workers"]] == ["p", "d"]
    assert status["workers"][0]["gauges"] == {"jobs": 0.0}
    assert status["workers"][1]["error"] == "gone"


@pytest.mark.parametrize("stream", [False, True])
def test_every_answer_is_counted_streamed_or_not(stream, app, router):
    for kv in (
        KV,
        KV,
        KV | {"wire_bytes": 0},
    ):  # the last one is served whole: no hand-off
        router.kv = kv
        post(app, stream=stream)
    expected = {
        "vllm:request_success_total{finished_reason=length}": 3,
        "vllm:prompt_tokens_total": 9,
        "vllm:generation_tokens_total": 12,
        "vllm:time_to_first_token_seconds_count": 3,
        "vllm:request_queue_time_seconds_sum": 1.5,
        "vllm:e2e_request_latency_seconds_count": 3,
        "vllm:inter_token_latency_seconds_count": 9,
        "vllm:request_prompt_tokens_sum": 9,
        "vllm:request_generation_tokens_sum": 12,
        "disagg_kv_transfer_bytes_total{codec=raw,kind=wire}": 20,
        "disagg_kv_transfer_seconds_count{phase=encode}": 2,
    }
    figures = assert_counted(app, expected)
    assert not any(name.startswith("disagg_request_failures_total") for name in figures)


@pytest.mark.parametrize("stream", [False, True])
def test_the_token_that_a_prompt_is_scored_with_neither_ends_it_nor_counts(stream, app):
    answer = post(app, echo=True, max_tokens=0, stop="a", stream=stream)
    last = events(answer.text)[-1] if stream else answer.json()
    assert last["choices"][0]["finish_reason"] == "length"
    figures = assert_counted(
        app, {"vllm:request_success_total{finished_reason=length}": 1}
    )
    assert figures.get("vllm:generation_tokens_total", 0) == 0


@pytest.mark.parametrize(
    ("times", "sums"), [([1, 3, 4, 5, 7], (2, 6, 4 / 3)), ([1, 3], (2, 2, 0))]
)
def test_the_times_of_a_request_are_to_its_first_token_its_last_and_between(
    times, sums, router
):
    metrics = ServerMetrics("tiny")
    arrived, *token_times = times
    answer = AnswerTimes(arrived)
    for time in token_times:
        answer.add_token(time)
    metrics.finished(answer, TextDelta("", len(token_times), "stop"), 3)
    figures = figures_of(metrics.scrape([], router).decode())
    series = (
        "time_to_first_token",
        "e2e_request_latency",
        "request_time_per_output_token",
    )
    assert tuple(figures.get(f"vllm:{name}_seconds_sum", 0) for name in series) == sums


async def test_the_time_between_tokens_is_counted_while_they_come(completions, router):
    """A long answer would else be missing for as long as it takes, and hold the loop at its end."""
    router.pause_at = 3

    request = CompletionRequest(**ask(max_tokens=9))
    generation = await completions.prepare(request)
    async with aclosing(completions.generate(generation)) as deltas:
        text = ""
        while text != "abc":
            _, delta = await anext(deltas)
            text += delta.text
        figures = figures_of((await completions.scrape()).decode())

    assert figures["vllm:inter_token_latency_seconds_count"] == 2


def test_a_role_that_nobody_has_any_more_has_no_gauges(router):
    gauges = {"engine_running": 5, "arena_bytes": 10, "used_bytes": 5}
    metrics, leaving = (
        ServerMetrics("tiny"),
        {"name": "d", "role": "none", "gauges": gauges, "pid": 1},
    )
    for workers, has_gauges in (([leaving], True), ([], False)):
        figures = figures_of(metrics.scrape(workers, router).decode())
        assert ("vllm:num_requests_running{role=none}" in figures) == has_gauges


@pytest.mark.parametrize("stream", [False, True])
def test_what_workers_refuse_or_break_is_counted_once_by_its_reason(
    stream, app, router
):
    router.refuses = ConfigError("unknown codec")
    post(app, stream=stream)
    router.refuses, router.breaks, router.pause_at = None, PeerLostError("gone"), 1
    router.go.set()
    post(app, stream=stream)
    failed = "disagg_request_failures_total{{reason={}}}".format
    figures = assert_counted(app, {failed("config"): 1, failed("peer_lost"): 1})
    assert not any(name.startswith("vllm:request_success_total") for name in figures)


@pytest.mark.parametrize("stream", [False, True])
def test_answers_that_end_because_another_one_failed_are_counted_with_it(
    stream, app, router
):
    router.breaks, router.pause_at = PeerLostError("gone"), 1
    router.go = SimpleNamespace(wait=asyncio.Semaphore(1).acquire)  # of one answer
    post(app, stream=stream, n=3)
    figures = assert_counted(
        app, {"disagg_request_failures_total{reason=peer_lost}": 3}
    )
    assert not any("reason=cancelled" in name for name in figures)


def codec_labels(app) -> set[str]:
    """The codecs whose bytes are counted."""
    text = get(app, "/metrics").text
    return set(re.findall(r'disagg_kv_transfer_bytes_total{codec="([^"]*)"', text))


def test_bytes_are_counted_by_full_spec(app, router):
    for codec in ("banded:bits=2", "banded:bits=3"):
        router.kv = KV | {"codec": codec}
        post(app, codec=codec)

    assert codec_labels(app) == {"banded:bits=2", "banded:bits=3"}


def test_clients_cannot_create_labels_without_end(app, router):
    specs = [f"kivi:bits=2,group={group}" for group in range(MAX_CLIENT_CODECS)]
    more = [f"kivi:bits=4,group={group}" for group in range(20)]
    plans = [f"0-{last}:kivi;{last + 1}-:raw" for last in range(20)]
    for codec in (*specs, *more, *plans, *specs):
        router.kv = KV | {"codec": codec}
        post(app, codec=codec)
    router.kv = KV | {"codec": "raw:dtype=fp16"}
    post(app)

    assert codec_labels(app) == {*specs, "kivi", "plan", "raw:dtype=fp16"}


def test_a_long_plan_of_a_client_is_counted_as_plan(app, router):
    plan = ";".join(f"{layer}:kivi:bits=2" for layer in range(100))
    router.kv = KV | {"codec": plan}
    post(app, codec=plan)

    assert codec_labels(app) == {"plan"}


def test_what_workers_and_the_router_say_of_themselves_is_scraped_once(app, router):
    dispatch, router.waiting = router.table, 5
    errors = {"fp8": [{"0": 0.0625, "9": 0.1875}]}
    dispatch.codec_policy.learn({"attention_error": errors}, ("p", "d"))
    dispatch.codec_policy.chosen["fp8", "deadline"] = 3
    dispatch.routed["prefill", "knows_most"] = 2
    doing = {"engine_running": 3, "engine_waiting": 2, "engine_held": 1}
    held = {"used_bytes": 30, "arena_bytes": 120}
    counts = {"expired": 2, "damaged": 1, "preempted": 4}
    counts |= {"drafts": 3, "draft_tokens": 21, "accepted_tokens": 9}
    counts |= {"received_tokens": 40, "shared_tokens": 2}
    router.says["p"] = said(
        {"jobs": 7}, counts={"computed_tokens": 30, "cached_tokens": 12}
    )
    router.says["d"] = said(doing | held, counts=counts, failures={"peer_lost": 3})
    expected = {
        "disagg_queue_requests": 5,
        "disagg_attention_error{codec=fp8}": 0.125,
        "disagg_attention_error_worst_layer{codec=fp8}": 0.1875,
        "disagg_codec_choices_total{codec=fp8,reason=deadline}": 3,
        "disagg_routed_total{reason=knows_most,role=prefill}": 2,
        "disagg_worker{role=prefill,what=jobs,worker=p}": 7,
        "vllm:num_requests_running{role=decode}": 3,
        "vllm:num_requests_waiting{role=decode}": 2,
        "disagg_held_sequences{role=decode}": 1,
        "vllm:kv_cache_usage_perc{role=decode}": 0.25,
        "vllm:num_preemptions_total{role=decode}": 4,
        "vllm:spec_decode_num_drafts_total{role=decode}": 3,
        "vllm:spec_decode_num_draft_tokens_total{role=decode}": 21,
        "vllm:spec_decode_num_accepted_tokens_total{role=decode}": 9,
        "vllm:prompt_tokens_by_source_total{role=prefill,source=local_compute}": 30,
        "vllm:prompt_tokens_by_source_total{role=prefill,source=local_cache_hit}": 12,
        "vllm:prompt_tokens_by_source_total{role=decode,source=external_kv_transfer}": 40,
        "vllm:prompt_tokens_by_source_total{role=decode,source=local_cache_hit}": 2,
        "vllm:prefix_cache_queries_total{role=prefill}": 42,
        "vllm:prefix_cache_hits_total{role=prefill}": 12,
        "disagg_kv_expired_total{role=decode}": 2,
        "disagg_kv_damaged_total{role=decode}": 1,
        "disagg_kv_transfer_failures_total{reason=peer_lost,role=decode}": 3,
    }
    for _ in range(2):
        assert_counted(app, expected)
    dispatch.routed["prefill", "knows_most"] += 1
    router.says["d"] = said(
        {}, epoch=2, counts=counts
    )  # fenced, and so still the same process
    rising = {"disagg_routed_total{reason=knows_most,role=prefill}": 3}
    assert_counted(app, rising | {"disagg_kv_expired_total{role=decode}": 2})
    router.says["d"] = said({}, pid=2, counts={"expired": 1})
    assert_counted(app, {"disagg_kv_expired_total{role=decode}": 3})
    for count in (5, 4, 5):  # the second one was asked first
        router.says["d"] = said({}, pid=2, counts={"expired": count})
        assert_counted(app, {"disagg_kv_expired_total{role=decode}": 7})


async def test_metrics_are_collected_once_a_second_for_all(router):
    """Each collection takes a call to every worker."""
    now = 100.0
    completions = completions_of(router, clock=lambda: now)
    calls = counted_calls(router)

    first, second = await asyncio.gather(completions.scrape(), completions.scrape())
    now = 100.9
    third = await completions.scrape()
    now = 101.0
    await completions.scrape()

    assert first == second == third
    assert len(calls) == 2


async def test_a_slow_collection_is_not_begun_twice(router):
    now = 100.0
    completions = completions_of(router, clock=lambda: now)
    calls = counted_calls(router, wait=router.go.wait)
    waiting = [asyncio.ensure_future(completions.scrape())]
    await asyncio.sleep(0)
    now = 200.0
    waiting.append(asyncio.ensure_future(completions.scrape()))
    await asyncio.sleep(0)

    waiting[0].cancel()  # its client leaves
    router.go.set()

    assert b"disagg_queue_requests" in await waiting[1]
    assert len(calls) == 1


def counted_calls(router, wait=None) -> list[int]:
    """One element for each time that the workers are asked for their status."""
    calls = []
    status = router.status

    async def call():
        calls.append(1)
        if wait is not None:
            await wait()
        return await status()

    router.status = call
    return calls


def test_the_prompt_tokens_that_were_not_computed_are_told(app, router):
    router.kv = KV | {"cached_tokens": 2}
    answer = post(app, prompt=["abc", "abcd"], n=2).json()
    assert answer["usage"]["prompt_tokens"] == 7
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}
