"""The start and the end of the ranks of a group, without processes of theirs."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Pipe
from subprocess import TimeoutExpired
from typing import Any
from unittest.mock import Mock, call

import pytest
import torch

from disagg import llm
from disagg.engine.orders import BeginOrder, pack_order
from disagg.errors import ConfigError, RanksLostError
from disagg.llm import LLM
from disagg.worker import child_ranks, ranks
from disagg.worker.child_ranks import ChildRank, ChildRanks
from disagg.worker.rank_start import RankPlace, RankStart
from disagg.worker.ranks import END, READY, RankProcesses, follow

PLACE = RankPlace("127.0.0.1", None, gpu=0)
KILLED, FROZEN = b"killed", b"frozen"
LOST = "rank 0 lost the other ranks of its group"


class FakeRank:
    """A follower whose end of the link is the test's."""

    def __init__(self) -> None:
        self.link, self.other = Pipe()
        self.pid = 4711
        self.was_killed = False

    def wait(self, timeout_s: float) -> str:
        return "process 4711, exit code -9" if self.other.closed else ""

    def kill(self) -> None:
        self.was_killed = True


class FakeRanks:
    """Starts followers that have answered already."""

    host = "127.0.0.1"
    ports = None

    def __init__(self, *answers: bytes):
        """answers: of each follower to its start, or KILLED, or FROZEN"""
        self.ranks = [FakeRank() for _ in answers]
        for rank, answer in zip(self.ranks, answers, strict=True):
            if answer == KILLED:
                rank.other.close()
            elif answer != FROZEN:
                rank.other.send_bytes(answer)

    def start(self, starts: Sequence[RankStart]) -> list[Any]:
        return [*self.ranks]


@pytest.fixture(autouse=True)
def no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """No sockets between ranks, and short waits."""
    monkeypatch.setattr(ranks, "listen", Mock())
    monkeypatch.setattr(ranks, "open_store", Mock(return_value=Mock(port=1)))
    monkeypatch.setattr(ranks, "RankGroup", Mock())
    monkeypatch.setattr(ranks, "START_S", 0.05)
    monkeypatch.setattr(ranks, "BROKEN_S", 0.05)


def started(*answers: bytes) -> tuple[RankProcesses, list[FakeRank]]:
    starter = FakeRanks(*answers)
    processes = RankProcesses(1 + len(answers), 1.0, threads=1, starter=starter)
    return processes, starter.ranks


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (FROZEN, "rank 2 has not started in 0.05 s"),
        (b"ModelError: no such file", "rank 2: ModelError: no such file"),
        (KILLED, "rank 2, process 4711, exit code -9"),
    ],
    ids=["frozen", "refuses", "killed"],
)
def test_a_rank_that_does_not_start_is_named_and_ends_the_others(answer, message):
    starter = FakeRanks(READY, answer)

    with pytest.raises(RanksLostError, match=message):
        RankProcesses(3, 1.0, threads=1, starter=starter)

    assert all(rank.was_killed or rank.other.closed for rank in starter.ranks)


def test_an_error_of_rank_0_ends_the_others():
    processes, (rank,) = started(READY)

    with pytest.raises(ConfigError, match="no such codec"), processes.loading():
        raise ConfigError("no such codec")

    assert rank.was_killed
    rank.other.recv_bytes()  # its start
    assert rank.other.recv_bytes() == END


def test_a_group_that_is_lost_while_it_loads_says_what_its_follower_said():
    """Rank 0 only sees that a socket was closed."""
    processes, (rank,) = started(READY)
    rank.other.send_bytes(b"ModelError: no such file")

    with (
        pytest.raises(RanksLostError, match="start: rank 1: ModelError: no such file"),
        processes.loading(),
    ):
        raise RanksLostError(LOST)

    assert rank.was_killed


def test_a_group_that_is_lost_without_an_ended_rank_keeps_its_error():
    processes, _ = started(READY)

    with pytest.raises(RanksLostError, match=LOST), processes.loading():
        raise RanksLostError(LOST)


def test_what_a_follower_said_is_known_to_all_who_ask():
    processes, (rank,) = started(READY)
    rank.other.send_bytes(b"OutOfMemoryError: 2 GiB")

    causes = [processes.cause() for _ in range(2)]

    assert causes == ["rank 1: OutOfMemoryError: 2 GiB"] * 2
    processes.close()


class Following:
    """A follower whose load raises an error; `link` is rank 0's end."""

    def __init__(self, error: Exception, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(ranks, "_load", Mock(side_effect=error))
        self.link, other = Pipe()
        self.link.send_bytes(pack_order(BeginOrder()))
        self._pool = ThreadPoolExecutor(1)
        self._call = self._pool.submit(follow, other, PLACE)
        assert self.link.recv_bytes() == READY

    def was_ended(self) -> bool:
        """As of `follow`; raises its error."""
        with self._pool:
            return self._call.result()


@pytest.mark.parametrize(
    "error", [RuntimeError("out of memory"), EOFError("out of memory")]
)
def test_a_follower_says_why_it_ends_whatever_the_error(monkeypatch, error):
    following = Following(error, monkeypatch)

    words = following.link.recv_bytes()

    assert words == f"{type(error).__name__}: out of memory".encode()
    with pytest.raises(type(error)):
        following.was_ended()


def test_the_error_of_a_follower_without_rank_0_is_none(monkeypatch):
    following = Following(RuntimeError("connection closed by peer"), monkeypatch)

    following.link.close()

    assert not following.was_ended()


def test_children_that_cannot_all_start_end(monkeypatch):
    process = Mock(pid=4711)
    spawns = Mock(side_effect=[process, OSError("no more processes")])
    monkeypatch.setattr(child_ranks, "_child", spawns)
    starts = [Mock(rank=rank, timeout_s=1.0) for rank in (1, 2)]

    with pytest.raises(RanksLostError, match="rank 2 did not start: no more processes"):
        ChildRanks().start(starts)

    process.kill.assert_called_once()


def test_a_child_that_cannot_be_killed_holds_nobody_up(monkeypatch):
    """A process that waits for a broken device ignores SIGKILL."""
    process = Mock(pid=4711)
    process.wait.side_effect = TimeoutExpired("rank", child_ranks.KILL_S)
    monkeypatch.setattr(child_ranks, "_child", lambda *_: process)

    ChildRank(Mock(timeout_s=1.0), PLACE).kill()

    process.wait.assert_called_once_with(child_ranks.KILL_S)


def test_an_llm_that_cannot_start_gives_its_threads_back(monkeypatch, tiny):
    """Else each LLM of several ranks would have fewer than the one before."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    set_threads = Mock()
    monkeypatch.setattr(torch, "set_num_threads", set_threads)
    monkeypatch.setattr(llm, "RankProcesses", Mock(side_effect=RanksLostError("gone")))

    with pytest.raises(RanksLostError):
        LLM(str(tiny), ranks=2)

    assert set_threads.call_args_list == [call(4), call(8)]
