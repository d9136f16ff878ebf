"""What the overlap benchmark says of its runs; the runs themselves are no test."""

from disagg.bench.overlap import LINK_MBPS, PROMPT_TOKENS, Times, prompt_of, summarise


def runs(first_ms: float, decoded_ms: float, wire_bytes: int) -> list[Times]:
    return [Times(first_ms, decoded_ms + i, wire_bytes) for i in (-1, 0, 1)]


def test_the_bound_is_the_slower_of_computing_and_sending() -> None:
    nbytes = int(LINK_MBPS * 1e6 / 8)  # one second of the link
    slow_link = summarise("raw", runs(300, 1100, nbytes), runs(300, 1400, nbytes))
    assert (slow_link.wire_ms, slow_link.bound_ms) == (1000, 1000)
    assert (slow_link.overlapped_ratio, slow_link.after_ratio) == (1.1, 1.4)
    slow_model = summarise("kivi", runs(300, 330, nbytes // 10), runs(300, 450, nbytes // 10))
    assert (slow_model.bound_ms, slow_model.overlapped_ratio) == (300, 1.1)


def test_prompts_have_the_length_they_say_and_share_no_begin() -> None:
    first, second = (prompt_of(PROMPT_TOKENS, number) for number in (1, 2))
    assert len(first) == len(second) == PROMPT_TOKENS
    assert first[0] != second[0]
