"""Which prefixes the router remembers of a worker."""

import tracemalloc
from array import array

import pytest

from disagg.router import prefix_index
from disagg.router.prefix_index import MAX_UNITS, UNIT_TOKENS, KnownPrefixes, keys_of


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
