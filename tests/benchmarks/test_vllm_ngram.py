"""What drafts bring to vLLM and to this project, from what a client measured."""

from pathlib import Path

import httpx
import pytest

from benchmarks import vllm_ngram
from benchmarks.servers import Server
from benchmarks.vllm_ngram import Answer, NgramOptions
from disagg.bench.serving import RequestTimes

NO_DRAFTS = {"drafted": 0, "accepted": 0}
METRICS = """\
# HELP vllm:spec_decode_num_draft_tokens_total Number of draft tokens.
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 40.0
vllm:spec_decode_num_draft_tokens_total{engine="1",model_name="m"} 2.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 1.2e+01
vllm:spec_decode_num_accepted_tokens_per_pos_total{position="0"} 9.0
"""


def answer(token_ms: float, steps: int, text: str = "a") -> Answer:
    return Answer(text, 97, steps, token_ms, drafted=70, accepted=64, load=0.5)


def test_ratios_are_of_medians_of_rounds():
    plain = [answer(ms, 96) for ms in (30.0, 90.0, 40.0)]
    drafted = [answer(ms, 32) for ms in (20.0, 10.0, 60.0)]

    row = vllm_ngram.compare("edit", "vllm", plain, drafted)

    assert (row["plain_ms"], row["ms"], row["ratio"]) == (40.0, 20.0, 2.0)


def test_events_that_the_client_read_together_make_no_steps_larger():
    drafted = [answer(20.0, steps) for steps in (29, 32, 30)]

    row = vllm_ngram.compare("edit", "vllm", drafted, drafted)

    assert row["per_step"] == 96 / 32


def test_a_text_that_drafts_changed_is_not_equal():
    plain = [answer(9.0, 96)]
    drafted = [answer(9.0, 96, "b")]

    row = vllm_ngram.compare("edit", "vllm", plain, drafted)

    assert not row["equal"]


def test_counts_of_drafts_are_summed_over_engines(monkeypatch):
    response = httpx.Response(200, text=METRICS)
    monkeypatch.setattr(httpx, "get", lambda _: response)

    counts = vllm_ngram.draft_counts(Server("vllm", "http://"))

    assert counts == {"drafted": 42, "accepted": 12}


def test_a_token_and_the_end_behind_it_are_of_one_step(monkeypatch):
    times = RequestTimes(1, gaps_s=[0.02, 0.03, 1e-5], tokens=3, text="a")
    monkeypatch.setattr(vllm_ngram, "stream", lambda *_: times)
    monkeypatch.setattr(vllm_ngram, "draft_counts", lambda _: dict(NO_DRAFTS))

    options = NgramOptions(Path("/env"))
    answer = vllm_ngram.answer_of(options, Server("disagg", "http://"), "chat", [1])

    assert answer.steps == 2


def test_each_project_has_a_server_with_drafts_and_one_without(tmp_path):
    commands = vllm_ngram.commands(NgramOptions(Path("/env")), Path("/m"), tmp_path)

    names = [command.name for command in commands]

    assert names == ["vllm without drafts", "vllm", "disagg without drafts", "disagg"]


def test_an_answer_that_failed_ends_the_benchmark(monkeypatch):
    closed = Server("vllm", "http://127.0.0.1:9")
    monkeypatch.setattr(vllm_ngram, "draft_counts", lambda _: dict(NO_DRAFTS))

    with pytest.raises(vllm_ngram.PeerLostError, match="vllm answers edit"):
        vllm_ngram.answer_of(NgramOptions(Path("/env")), closed, "edit", [1])
