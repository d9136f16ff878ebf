"""Which client may have one more of the waiting places."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.router.fair_share import may_wait

PLACES = 12
CLIENTS = "abcdefg"
# a client comes, or one of its requests leaves the queue
CHANGES = st.lists(st.tuples(st.sampled_from(CLIENTS), st.booleans()), max_size=120)


def after(changes: list[tuple[str, bool]]) -> Counter[str]:
    """By client, how many wait after these changes."""
    waiting = Counter[str]()
    for client, comes in changes:
        if comes and may_wait(waiting, client, PLACES):
            waiting[client] += 1
        elif not comes and waiting[client]:
            waiting[client] -= 1
        waiting = +waiting
    return waiting


@given(CHANGES)
def test_few_clients_have_more_than_a_share(changes):
    """Of the clients that have most, the i-th has at most a share of places for i clients."""
    most_first = sorted(after(changes).values(), reverse=True)

    for number, count in enumerate(most_first, 1):
        assert count <= PLACES // number


@given(CHANGES, st.sampled_from(CLIENTS))
def test_below_its_share_a_client_is_never_refused(changes, client):
    waiting = after(changes)
    num_clients = len(waiting.keys() | {client})

    if waiting[client] < PLACES // num_clients:
        assert may_wait(waiting, client, PLACES)


@given(CHANGES, st.sampled_from(CLIENTS))
def test_while_places_are_free_every_client_gets_one(changes, client):
    waiting = after(changes)

    if waiting.total() < PLACES:
        assert may_wait(waiting, client, PLACES)


@pytest.mark.parametrize("waiting", [11, 12])
def test_one_client_has_all_places_and_no_more(waiting):
    assert may_wait({"": waiting}, "", PLACES) == (waiting < PLACES)
