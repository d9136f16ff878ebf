"""`disagg bench front`, at sizes that say nothing of speed."""

import time

import pytest

from disagg.bench.fake_workers import STAMP_S, load_stamps
from disagg.bench.front import (
    PARTS,
    FrontOptions,
    Relay,
    draw_front,
    measure_front,
)
from disagg.bench.raw_clients import StreamClient, Window
from disagg.bench.result import Row

SMALL = FrontOptions(
    relays=[Relay(4, 2, per_s=20.0)],
    doors=[2],
    window_s=0.5,
    burst=20,
    roles=2,
    streams=4,
    sleepy=10,
    ignored_bytes=300_000,
    choices=2,
    choice_tokens=3,
    patience_s=1.0,
)


def measure(part: str) -> list[Row]:
    """The rows of one part."""
    return PARTS[part](SMALL)


def test_relay_counts_tokens_and_what_they_cost():
    (row,) = measure("relay")

    assert row["streams"] == 4
    assert row["offered_per_s"] == 80
    assert row["tokens_per_s"] > 0
    assert row["token_us"] > 0
    assert 0 < row["token_p99_ms"] < 1e3 * STAMP_S * len(load_stamps().tokens)


def test_doors_share_streams_and_a_model_adds_more_of_them():
    measured, model = measure("doors")

    assert (measured["doors"], measured["streams"]) == (2, 4)
    assert measured["tokens_per_s"] > 0
    assert min(measured["door_us"], measured["router_us"]) > 0
    assert model["what"] == "model: 4 doors on 8 cores"
    assert model["tokens_per_s"] <= 1e6 / measured["router_us"]


def test_burst_arrives_waits_and_leaves():
    rows = measure("burst")

    assert [row["what"] for row in rows] == [
        "20 arrive at the router",
        "20 wait at the router",
        "20 leave at the router",
        "20 arrive and leave over HTTP",
    ]
    assert all(row["late_sum_s"] >= row["late_max_ms"] / 1e3 for row in rows)
    assert rows[-1]["longest_gap_ms"] > 0


def test_short_prompts_are_counted_alone_and_beside_long_ones():
    rows = measure("long-prompts")

    assert [row["workers"] for row in rows] == ["1 + 1", "4 + 4"]
    assert [row["long_prompts"] for row in rows] == [1, 4]
    assert all(row["short_per_s_alone"] >= 0 for row in rows)


def test_requests_of_a_hung_engine_are_counted():
    (row,) = measure("hung-engine")

    assert row["streams"] == 4
    assert (row["all_go_on_after_s"] is None) == (row["stalled"] > 0)


def test_sleepy_connections_stand_beside_streams():
    alone, beside = measure("sleepy")

    assert (alone["sleepy"], beside["sleepy"]) == (0, 10)
    assert beside["accepted"] == 10
    assert beside["health_answered"].endswith("of 10")
    assert beside["tokens_per_s"] > 0


def test_health_is_asked_while_bodies_arrive():
    (row,) = measure("ignored-fields")

    assert row["body_mb"] == 0.3
    assert row["health_max_ms"] > 0


def test_answers_with_log_probabilities_are_read():
    (row,) = measure("scores")

    assert row["status"] == 200
    assert row["answer_mb"] > 0


def test_bytes_of_a_link_are_more_than_its_payload():
    rows = measure("link-again")

    assert [row["use"] for row in rows] == [1, 2, 3]
    assert all(row["crossed_kb"] >= row["payload_kb"] > 0 for row in rows)


def test_an_unknown_part_is_refused_before_it_begins(disagg):
    output = disagg("bench front --part relays", code=2)

    assert "unknown part 'relays'; known: burst, doors, hung-engine" in output.err


def test_every_part_has_a_table():
    rows = [
        {"part": "relay", "streams": 4, "token_us": 80.0},
        {"part": "scores", "status": 400},
    ]

    text = draw_front({"rows": rows})

    assert text.splitlines() == [
        "relay",
        "streams  token us",
        "      4        80",
        "",
        "scores",
        "status",
        "   400",
    ]


def test_a_result_names_the_part_of_each_row(monkeypatch):
    monkeypatch.setitem(PARTS, "relay", lambda options: [{"streams": 1}])

    result = measure_front(FrontOptions(parts=["relay"]))

    assert result["rows"] == [{"part": "relay", "streams": 1}]
    (took,) = result["parts"]
    assert took["part"] == "relay"


@pytest.mark.parametrize("age_s", [0.0, 0.5, 4.0])
def test_the_text_of_a_token_tells_its_age(age_s):
    stamps = load_stamps()
    now = time.monotonic()

    word = stamps_word(now - age_s)

    measured_s = stamps.age_s(word, now)
    assert measured_s == pytest.approx(age_s, abs=2 * STAMP_S)


def stamps_word(at: float) -> str:
    """The text of the token that is made at this moment."""
    from disagg.model.tokenizer import Tokenizer

    return Tokenizer.load().spell(load_stamps().token(at)).strip()


def test_a_word_of_no_token_has_no_age():
    assert load_stamps().age_s("supercalifragilistic", 1.0) is None


def test_events_that_arrive_in_pieces_are_counted_once():
    window = Window()
    client = StreamClient(b"", window, load_stamps())
    word = stamps_word(time.monotonic())
    event = f'data: {{"choices": [{{"text": " {word}"}}]}}\n\n'.encode()

    for byte in b"HTTP/1.1 200 OK\r\n\r\n" + 2 * event + b"data: [DONE]\n\n":
        client.data_received(bytes([byte]))

    assert (client.status, client.num_tokens, client.ended) == (200, 2, True)
    assert window.read([client]).tokens == 2
