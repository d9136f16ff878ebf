"""Which client may have one more of the waiting places.

While places are free, every client may have any number of them. Once all are taken, a client that
has less than its share still gets one more: its share is all places divided by the number of
clients that wait. Nothing that waits is given up for it, so more may wait than there are places.

For every i, at most i - 1 clients ever have more than places / i. So with n clients at most
places * (1 + 1/2 + ... + 1/n) requests wait, and with one client no more than there are places.
"""

from collections.abc import Mapping


def may_wait(
    waiting: Mapping[str, int],
    client: str,
    places: int,
) -> bool:
    """Whether another request of a client may wait.

    waiting: by client, how many of its requests wait
    """
    num_waiting = sum(waiting.values())
    if num_waiting < places:
        return True
    clients = waiting.keys() | {client}
    share = places // len(clients)
    return waiting.get(client, 0) < share
