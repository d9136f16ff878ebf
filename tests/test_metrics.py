from disagg.metrics import Metrics, RequestTimes


def test_times_of_a_request():
    times = RequestTimes(arrived=1.0, first_token=3.0, ended=7.0, tokens=5)
    assert (times.ttft_s, times.tpot_s, times.e2e_s) == (2.0, 1.0, 6.0)
    assert RequestTimes(arrived=1.0, first_token=3.0, ended=3.0, tokens=1).tpot_s == 0.0


def test_rendered_metrics_have_our_names_and_those_of_dashboards():
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
