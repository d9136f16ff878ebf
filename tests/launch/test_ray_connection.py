"""Whether a Ray listens."""

import socket

from disagg.launch.ray_connection import knock


def test_a_ray_that_listens_answers_a_knock():
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert knock(*server.getsockname())


def test_a_busy_ray_counts_as_listening(monkeypatch):
    def time_out(*arguments: object, **options: object) -> None:
        raise TimeoutError

    monkeypatch.setattr(socket, "create_connection", time_out)

    assert knock("127.0.0.1", 1)


def test_a_ray_that_has_ended_does_not_answer():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()

    assert not knock(*address)
