import pytest

from disagg.metrics import ARROWS, Life, Metrics, RequestTimes, Status


def test_a_life_sums_the_time_in_each_state() -> None:
    life = Life(since=10.0)
    for status, now in (
        (Status.PREFILL, 11.0),
        (Status.DECODE, 14.0),
        (Status.QUEUED, 15.0),
        (Status.PREFILL, 20.0),
        (Status.DECODE, 21.0),
        (Status.DONE, 24.0),
    ):
        life.enter(status, now)
    assert life.spent == {Status.QUEUED: 6.0, Status.PREFILL: 4.0, Status.DECODE: 4.0}


def test_every_state_can_end_and_the_end_is_final() -> None:
    assert set(ARROWS) == set(Status)
    assert all(Status.DONE in after for before, after in ARROWS.items() if before != Status.DONE)
    assert ARROWS[Status.DONE] == ()
    life = Life(since=0.0, status=Status.DONE)
    with pytest.raises(AssertionError, match="done does not become decode"):
        life.enter(Status.DECODE, 1.0)


def test_times_of_a_request() -> None:
    times = RequestTimes(arrived=1.0, first_token=3.0, ended=7.0, tokens=5)
    assert (times.ttft_s, times.tpot_s, times.e2e_s) == (2.0, 1.0, 6.0)
    assert RequestTimes(arrived=1.0, first_token=3.0, ended=3.0, tokens=1).tpot_s == 0.0


def test_rendered_metrics_have_our_names_and_those_of_dashboards() -> None:
    metrics = Metrics("tiny", "decode")
    metrics.load("decode", running=2, waiting=3, held=1, usage=0.25)
    metrics.add(metrics.transfer_bytes, 100, kind="wire", codec="raw")
    metrics.observe(metrics.transfer_seconds, 0.5, phase="encode")
    metrics.finished(RequestTimes(0.0, 1.0, 2.0, 3), "stop")
    text = metrics.render().decode()
    for line in (
        'vllm:num_requests_running{model_name="tiny",role="decode"} 2.0',
        'vllm:num_requests_waiting{model_name="tiny",role="decode"} 3.0',
        'vllm:kv_cache_usage_perc{model_name="tiny",role="decode"} 0.25',
        'disagg_held_sequences{model_name="tiny",role="decode"} 1.0',
        'disagg_kv_transfer_bytes_total{codec="raw",kind="wire",model_name="tiny",role="decode"}'
        " 100.0",
        'vllm:request_success_total{finished_reason="stop",model_name="tiny",role="decode"} 1.0',
        'vllm:request_time_per_output_token_seconds_sum{model_name="tiny",role="decode"} 0.5',
        'vllm:time_to_first_token_seconds_sum{model_name="tiny",role="decode"} 1.0',
        'disagg_kv_transfer_seconds_count{model_name="tiny",phase="encode",role="decode"} 1.0',
    ):
        assert line in text
