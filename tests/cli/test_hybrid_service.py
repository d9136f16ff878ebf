"""A service of a model whose layers keep states, with the real command: kill -9 under 16 streams.

Says how long streams stood still (`-s`).
"""

import os
import signal

import pytest

from disagg.cli.state_file import RunningService
from tests.cli.conftest import wait_for
from tests.cli.test_private import PROMPT, home, idle, live_roles, workers
from tests.crowd import Crowd, crowd_of, longest_pause_s, pool
from tests.model.tiny import save_readable

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]

STREAMS = 16
BODY = {"max_tokens": 200, "ignore_eos": True}
SAMPLINGS = ({"temperature": 0}, {"temperature": 1.0, "top_p": 0.9, "seed": 7})
BODIES = [
    BODY | sampling | {"prompt": PROMPT * repeats}
    for repeats in (1, 9, 40, 100)  # up to 1,500 tokens
    for sampling in SAMPLINGS
]
__all__ = ["home", "pool"]


@pytest.mark.parametrize("kind", ["qwen3_next", "granitemoehybrid"])
def test_streams_of_a_hybrid_survive_their_workers(home, pool, tmp_path_factory, kind):
    """The delta rule and Mamba 2; greedy and seeded answers, all as undisturbed."""
    folder = save_readable(kind, tmp_path_factory.mktemp(kind))
    options = ("--model", str(folder), "--codec", "raw", "--decode", "2")
    process = home.start("serve", "--port", "0", *options)
    state = home.service()
    crowd = crowd_of(state, pool, STREAMS, BODIES)

    kill_a_decode_worker(state, crowd)
    wait_until_whole(state)
    kill_the_prefill_worker(state, crowd)
    wait_until_whole(state)

    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 0, error


def kill_a_decode_worker(state: RunningService, crowd: Crowd) -> None:
    """In the middle of all answers: those that it had continue at the other one."""
    crowd.begin()
    kill(state, "decode")

    check(crowd, "a decode worker killed")


def kill_the_prefill_worker(state: RunningService, crowd: Crowd) -> None:
    """As soon as the first answer has begun: other prompts are computed again by its successor."""
    crowd.send()
    wait_for(lambda: any(stream.pieces for stream in crowd.streams))
    kill(state, "prefill")
    assert not all(stream.pieces for stream in crowd.streams)

    check(crowd, "the prefill worker killed")


def kill(state: RunningService, role: str) -> None:
    victim = next(worker for worker in workers(state) if worker["role"] == role)
    os.kill(victim["pid"], signal.SIGKILL)


def check(crowd: Crowd, victim: str) -> None:
    """No stream failed, and each has its answer."""
    streams = crowd.end()

    assert [stream.error for stream in streams] == [None] * STREAMS
    assert [crowd.is_exact(stream) for stream in streams] == [True] * STREAMS
    pause_s = longest_pause_s(streams)
    print(f"\n{victim}: {STREAMS} streams exact, pauses up to {pause_s:.1f} s")


def wait_until_whole(state: RunningService) -> None:
    """The dead worker has a successor, and no worker holds anything."""
    wait_for(lambda: sum("pid" in worker for worker in workers(state)) == 3)
    wait_for(lambda: live_roles(state) == {"prefill", "decode"})
    wait_for(lambda: idle(state), describe=lambda: workers(state))
