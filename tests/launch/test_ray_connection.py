"""Whether a Ray listens."""

import socket
from types import SimpleNamespace

import pytest

from disagg.errors import PeerLostError
from disagg.launch.ray_connection import (
    LAST_CHARS,
    RayConnection,
    knock,
    lost_ray_is_an_error,
)


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


@pytest.mark.parametrize(
    "error",
    [
        Exception("The current node timed out during startup."),
        RuntimeError("no raylet"),
        ConnectionError("no GCS"),
    ],
)
def test_a_ray_that_does_not_start_is_a_lost_peer(error):
    with (
        pytest.raises(PeerLostError, match="Ray does not start or answer: "),
        lost_ray_is_an_error(),
    ):
        raise error


def test_a_bug_is_not_taken_for_a_lost_ray():
    with pytest.raises(KeyError), lost_ray_is_an_error():
        raise KeyError("node")


@pytest.fixture
def log_of(tmp_path):
    """Writes the log of a worker as Ray does, and returns what is read of it."""
    folder = tmp_path / "r" / "session_1" / "logs"
    folder.mkdir(parents=True)
    connection = RayConnection("local", SimpleNamespace(folder=tmp_path))

    def last_words(text: str, pid: str = "7") -> str:
        (folder / "worker-af03-01000000-7.err").write_text(text)
        return connection.last_words(pid)

    return last_words


def test_the_last_words_of_a_worker_are_its_stderr(log_of):
    marks = ":job_id:01000000\n:actor_name:DecodeWorker\n"

    assert log_of(f"{marks}a\nb\n") == "a\nb"
    assert log_of(marks) == ""


def test_of_long_last_words_the_end_is_told(log_of):
    assert log_of("x" * LAST_CHARS + "end") == "x" * (LAST_CHARS - 3) + "end"


def test_another_process_has_no_last_words(log_of):
    assert log_of("a", pid="17") == ""
    assert log_of("a", pid="") == ""


def test_logs_of_a_cluster_are_not_read(tmp_path):
    assert RayConnection("10.0.0.1:6379").last_words("7") == ""
