"""Whether a client may add a request to the queue.

While places are free, any client may take any number of them. Once all are taken, a client with
less than its share still gets one more. The share is the number of places divided by the number of
clients that wait. Waiting requests are never dropped, so more may wait than there are places.

For every i, at most i - 1 clients have more than places / i. So with n clients, at most
places * (1 + 1/2 + ... + 1/n) requests wait, and with one client no more than there are places.
"""

from collections.abc import Mapping


def may_wait(
    waiting: Mapping[str, int],
    client: str,
    places: int,
) -> bool:
    """Whether another request of a client may wait.

    waiting: number of waiting requests by client
    """
    num_waiting = sum(waiting.values())
    if num_waiting < places:
        return True
    clients = waiting.keys() | {client}
    share = places // len(clients)
    return waiting.get(client, 0) < share
