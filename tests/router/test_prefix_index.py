"""Which prefixes the router remembers of a worker."""

import tracemalloc
from array import array

import pytest

from disagg.router import prefix_index
from disagg.router.prefix_index import (
    MAX_UNITS,
    UNIT_TOKENS,
    KnownPrefixes,
    KnownSnapshots,
    keys_of,
)


def keys(first: int, units: int) -> tuple[bytes, ...]:
    """Keys of a prompt that begins with a token of its own."""
    return keys_of(array("I", range(first, first + units * UNIT_TOKENS)))


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for 8 units."""
    monkeypatch.setattr(prefix_index, "MAX_UNITS", 8)


def test_the_longest_prefix_of_a_prompt_is_found():
    prefixes = KnownPrefixes()
    prefixes.add(keys(0, 3))

    assert prefixes.tokens(keys(0, 5)) == 3 * UNIT_TOKENS
    assert prefixes.tokens(keys(1, 5)) == 0


@pytest.mark.usefixtures("few")
def test_recent_prompts_are_remembered_and_old_ones_forgotten():
    prefixes = KnownPrefixes()
    for first in range(6):
        prefixes.add(keys(first, 2))

    remembered = [prefixes.tokens(keys(first, 2)) for first in range(6)]

    assert remembered == [0, 0] + [2 * UNIT_TOKENS] * 4


@pytest.mark.usefixtures("few")
def test_a_prompt_that_comes_again_is_not_forgotten():
    prefixes = KnownPrefixes()
    for first in range(1, 20):
        prefixes.add(keys(first, 1))
        prefixes.add(keys(0, 1))

    assert prefixes.tokens(keys(0, 1)) == UNIT_TOKENS


@pytest.mark.usefixtures("few")
def test_of_a_prompt_that_is_too_long_the_beginning_is_remembered():
    prefixes = KnownPrefixes()

    prefixes.add(keys(0, 20))

    assert prefixes.tokens(keys(0, 20)) == 8 * UNIT_TOKENS


def test_the_prefixes_of_a_worker_take_three_megabytes_at_most():
    """They took 4.4 MB, of each worker."""
    prompts = [keys(first, 512) for first in range(MAX_UNITS // 512)]
    tracemalloc.start()
    try:
        prefixes = KnownPrefixes()
        for prompt in prompts:
            prefixes.add(prompt)
        nbytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    key_bytes = 48 * MAX_UNITS
    assert nbytes + key_bytes < 3_000_000


# -- snapshots of states


def test_a_worker_resumes_the_next_turn_of_a_chat():
    snapshots = KnownSnapshots(8)
    chat = keys(0, 10)

    snapshots.add(chat[:5], tokens=5 * UNIT_TOKENS + 20, cached_tokens=0)

    assert snapshots.tokens(chat, cached_tokens=5 * UNIT_TOKENS) == 5 * UNIT_TOKENS


def test_a_worker_resumes_a_shared_prefix_when_it_has_seen_it_twice():
    snapshots = KnownSnapshots(8)
    shared = 4 * UNIT_TOKENS
    prompts = [keys(0, 4) + keys(number, 8)[4:] for number in (1, 2, 3)]
    resumed = []
    for number, prompt in enumerate(prompts):
        cached_tokens = shared if number else 0
        resumed.append(snapshots.tokens(prompt, cached_tokens))
        snapshots.add(prompt, tokens=8 * UNIT_TOKENS, cached_tokens=cached_tokens)

    assert resumed == [0, 0, shared]


def test_the_snapshot_used_last_is_expected_longest():
    snapshots = KnownSnapshots(2)
    chats = [keys(number, 4) for number in range(3)]
    tokens = 4 * UNIT_TOKENS + 20
    for chat in (chats[0], chats[1], chats[0], chats[2]):
        snapshots.add(chat, tokens, cached_tokens=snapshots.tokens(chat, tokens))

    resumed = [snapshots.tokens(chat, 4 * UNIT_TOKENS) for chat in chats]

    assert resumed == [4 * UNIT_TOKENS, 0, 4 * UNIT_TOKENS]
