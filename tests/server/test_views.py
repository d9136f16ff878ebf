"""What the service tells of itself, and who may stop it."""

import asyncio
from types import SimpleNamespace

import pytest

from disagg import __version__
from disagg.errors import ConfigError, PeerLostError
from disagg.server.counts import Counts
from disagg.server.text import Piece
from tests.server.conftest import KV, said
from tests.server.visits import assert_counted, get, post, refused, send


@pytest.mark.parametrize("path", ["/health", "/ready", "/v1/models", "/metrics"])
def test_a_load_balancer_may_ask_for_heads_alone(path, app):
    """The server leaves the body out."""
    whole, head = get(app, path), send(app, "HEAD", path)
    assert (head.status_code, head.headers["content-type"]) == (200, whole.headers["content-type"])


def test_ready_follows_the_workers_and_health_does_not(app, router):
    assert get(app, "/ready").status_code == 200
    router.ready = False
    response = get(app, "/ready")
    told = {"status": "starting", "lacks": "decode 0 of 1; for 3 s"}
    assert (response.status_code, response.json()) == (503, told)
    assert get(app, "/health").status_code == 200


def test_models_and_status_tell_what_is_served(app, router):
    (model,) = get(app, "/v1/models").json()["data"]
    assert get(app, "/v1/models/tiny").json() == model == get(app, "/v1/models//models/tiny").json()
    assert refused(get(app, "/v1/models/gpt-4"), 404, "model", "model")
    assert get(app, "/version").json() == {"version": __version__}
    told = model["id"], model["root"], model["max_model_len"]
    assert told == ("tiny", "/models/tiny", 20)
    router.says["d"] = PeerLostError("gone")
    status = get(app, "/status").json()
    assert (status["model"], status["codec"], status["requests"]) == ("tiny", "raw", 0)
    assert [worker["name"] for worker in status["workers"]] == ["p", "d"]
    assert status["workers"][0]["gauges"] == {"jobs": 0.0}
    assert status["workers"][1]["error"] == "gone"


@pytest.mark.parametrize("stream", [False, True])
def test_every_answer_is_counted_streamed_or_not(stream, app):
    for _ in range(2):
        post(app, stream=stream)
    labels = 'model_name="tiny",role="router"'
    text = assert_counted(
        app,
        f'vllm:request_success_total{{finished_reason="length",{labels}}} 2.0',
        f"vllm:prompt_tokens_total{{{labels}}} 6.0",
        f"vllm:generation_tokens_total{{{labels}}} 8.0",
        f"vllm:time_to_first_token_seconds_count{{{labels}}} 2.0",
        f"vllm:request_queue_time_seconds_sum{{{labels}}} 1.0",
        f"vllm:e2e_request_latency_seconds_count{{{labels}}} 2.0",
        f"vllm:inter_token_latency_seconds_count{{{labels}}} 6.0",
        f"vllm:request_prompt_tokens_sum{{{labels}}} 6.0",
        f"vllm:request_generation_tokens_sum{{{labels}}} 8.0",
        f'disagg_kv_transfer_bytes_total{{codec="raw",kind="wire",{labels}}} 20.0',
        'disagg_kv_transfer_seconds_count{model_name="tiny",phase="encode",role="router"} 2.0',
    )
    assert "disagg_request_failures_total{" not in text


@pytest.mark.parametrize(("times", "sums"), [([1, 3, 4, 5, 7], (2, 6, 4 / 3)), ([1, 3], (2, 2, 0))])
def test_the_times_of_a_request_are_to_its_first_token_its_last_and_between(times, sums, router):
    counts = Counts("tiny")
    counts.finished(times, Piece("", len(times) - 1, "stop"), 3)
    text = counts.scrape([], router).decode()
    series = ("time_to_first_token", "e2e_request_latency", "request_time_per_output_token")
    for name, seconds in zip(series, sums, strict=True):
        line = f'vllm:{name}_seconds_sum{{model_name="tiny",role="router"}} {float(seconds)}'
        assert (line in text) == bool(seconds)


def test_what_was_served_whole_is_no_hand_off(app, router):
    router.kv = KV | {"wire_bytes": 0}
    post(app)
    assert "disagg_kv_transfer_seconds_count{" not in get(app, "/metrics").text


def test_a_role_that_nobody_has_any_more_has_no_gauges(router):
    gauges = {"engine_running": 5, "arena_bytes": 10, "used_bytes": 5}
    counts, leaving = Counts("tiny"), {"name": "d", "role": "none", "gauges": gauges, "pid": 1}
    running = b'vllm:num_requests_running{model_name="tiny",role="none"}'
    assert running in counts.scrape([leaving | {"counts": {}}], router)
    assert running not in counts.scrape([], router)


@pytest.mark.parametrize("stream", [False, True])
def test_what_workers_refuse_or_break_is_counted_once_by_its_reason(stream, app, router):
    router.refuses = ConfigError("unknown codec")
    post(app, stream=stream)
    router.refuses, router.breaks, router.pause_at = None, PeerLostError("gone"), 1
    router.go.set()
    post(app, stream=stream)
    line = 'disagg_request_failures_total{{model_name="tiny",reason="{}"}} 1.0'
    text = assert_counted(app, line.format("config"), line.format("peer_lost"))
    assert "vllm:request_success_total{" not in text


@pytest.mark.parametrize("stream", [False, True])
def test_answers_that_end_because_another_one_failed_are_counted_with_it(stream, app, router):
    router.breaks, router.pause_at = PeerLostError("gone"), 1
    router.go = SimpleNamespace(wait=asyncio.Semaphore(1).acquire)  # of one answer
    post(app, stream=stream, n=3)
    text = assert_counted(
        app, 'disagg_request_failures_total{model_name="tiny",reason="peer_lost"} 3.0'
    )
    assert 'reason="cancelled"' not in text


def test_clients_cannot_make_labels_without_end(app, router):
    for group in range(20):
        router.kv = KV | {"codec": f"kivi:bits=2,group={group}"}
        post(app, codec=f"kivi:bits=2,group={group}")
        router.kv = KV | {"codec": f"0-{group}:kivi;{group + 1}-:raw"}
        post(app, codec=f"0-{group}:kivi;{group + 1}-:raw")
    router.kv = KV | {"codec": "raw:dtype=fp16"}
    post(app)
    text = get(app, "/metrics").text
    wire = [line for line in text.splitlines() if 'kind="wire"' in line and "_bytes_total" in line]
    assert [line.split('"')[1] for line in wire] == ["kivi", "plan", "raw:dtype=fp16"]


def test_what_workers_count_is_scraped_once_and_goes_on_after_a_new_incarnation(app, router):
    counted = {"expired": 2, "damaged": 1}
    router.says["d"] = said({}, counts=counted, failures={"peer_lost": 3})
    for _ in range(2):
        assert_counted(
            app,
            'disagg_kv_expired_total{model_name="tiny",role="decode"} 2.0',
            'disagg_kv_damaged_total{model_name="tiny",role="decode"} 1.0',
            'disagg_kv_transfer_failures_total{model_name="tiny",reason="peer_lost",role="decode"}'
            " 3.0",
        )
    router.says["d"] = said({}, epoch=2, counts=counted)  # fenced, and so still the same process
    assert_counted(app, 'disagg_kv_expired_total{model_name="tiny",role="decode"} 2.0')
    router.says["d"] = said({}, pid=2, counts={"expired": 1})
    assert_counted(app, 'disagg_kv_expired_total{model_name="tiny",role="decode"} 3.0')


def test_prompts_are_counted_by_where_their_kv_is_from(app, router):
    router.waiting = 5
    router.says["p"] = said({}, counts={"computed_tokens": 30, "cached_tokens": 12})
    router.says["d"] = said({}, counts={"received_tokens": 40, "shared_tokens": 2})
    prefill, decode = ('model_name="tiny",role="prefill"', 'model_name="tiny",role="decode"')
    source = "vllm:prompt_tokens_by_source_total"
    assert_counted(
        app,
        f'{source}{{{prefill},source="local_compute"}} 30.0',
        f'{source}{{{prefill},source="local_cache_hit"}} 12.0',
        f'{source}{{{decode},source="external_kv_transfer"}} 40.0',
        f'{source}{{{decode},source="local_cache_hit"}} 2.0',
        f"vllm:prefix_cache_queries_total{{{prefill}}} 42.0",
        f"vllm:prefix_cache_hits_total{{{prefill}}} 12.0",
        'disagg_queue_requests{model_name="tiny",role="router"} 5.0',
    )


def test_why_workers_were_chosen_is_counted_as_it_rises(app, router):
    router.dispatch.routed["prefill", "knows_most"] = 2
    line = 'disagg_routed_total{{model_name="tiny",reason="knows_most",role="prefill"}} {}.0'
    for _ in range(2):
        assert_counted(app, line.format(2))
    router.dispatch.routed["prefill", "knows_most"] += 1
    assert_counted(app, line.format(3))


def test_what_codecs_cost_and_why_they_were_chosen_is_told(app, router):
    router.dispatch.choices.learn({"attention_error": {"fp8": [0.0625]}}, ("p", "d"))
    router.dispatch.choices.chosen["fp8", "deadline"] = 3
    assert_counted(
        app,
        'disagg_attention_error{codec="fp8",model_name="tiny",role="router"} 0.0625',
        'disagg_codec_choices_total{codec="fp8",model_name="tiny",reason="deadline",role="router"} '
        "3.0",
    )


def test_the_prompt_tokens_that_were_not_computed_are_told(app, router):
    router.kv = KV | {"cached_tokens": 2}
    answer = post(app, prompt=["abc", "abcd"], n=2).json()
    assert answer["usage"]["prompt_tokens"] == 7
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}


def test_what_engines_do_has_the_names_that_dashboards_know(app, router):
    doing = {"engine_running": 3, "engine_waiting": 2, "engine_held": 1}
    held = {"used_bytes": 30, "arena_bytes": 120}
    router.says["d"] = said(doing | held, counts={"preempted": 4})
    labels = '{model_name="tiny",role="decode"}'
    assert_counted(
        app,
        f"vllm:num_requests_running{labels} 3.0",
        f"vllm:num_requests_waiting{labels} 2.0",
        f"disagg_held_sequences{labels} 1.0",
        f"vllm:kv_cache_usage_perc{labels} 0.25",
        f"vllm:num_preemptions_total{labels} 4.0",
        'disagg_worker{role="prefill",what="jobs",worker="p"} 0.0',
    )
