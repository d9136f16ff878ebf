"""Workers that are groups of ranks, of any number on either side, on real sockets."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from disagg.codecs.registry import codec_names
from disagg.config import Config, load_config
from disagg.engine.sequence import SamplingParams
from disagg.errors import RanksLostError
from disagg.llm import LLM
from disagg.transfer.messages import Role
from disagg.worker import ranks
from disagg.worker.worker import Worker
from tests.model.tiny import random_prompt, save_tiny
from tests.transfer.peer import until
from tests.worker.pairs import House, house

# ranks and one process differ by 1e-7. Codecs that round can make another token of that; to these
# prompts every codec gives the same answer also when all weights have noise of 1e-7
LENGTHS = (17, 120, 190)
TOKENS = 20
CODECS = ["raw", "kivi", "gear", "ott"]
MANY_BYTES = 10_000
FROZEN = {"cluster.rank_timeout_s": 2.0}
SLOW_LINK = {
    "transfer.link_mbps": 0.4,
    "transfer.burst_bytes": 4096,
}  # seconds a prompt
SHAPES = [(1, 2), (2, 1), (2, 2)]  # ranks of the prefill and of the decode worker


@pytest.fixture(scope="module")
def four_heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that 4 ranks can share."""
    folder = tmp_path_factory.mktemp("four-heads")
    return save_tiny("llama", folder, num_key_value_heads=4)


def config_of(path: Path, senders: int, receivers: int, **settings: object) -> Config:
    flags = {
        "model.name": str(path),
        "cluster.prefill_ranks": senders,
        "cluster.decode_ranks": receivers,
        "cluster.rank_timeout_s": 60.0,
        "engine.arena_bytes": 32 << 20,
        "engine.torch_threads": 1,
        "transfer.min_disagg_tokens": 0,
    }
    return load_config(None, flags | settings)


@asynccontextmanager
async def group_pair(
    path: Path, senders: int, receivers: int, **settings: object
) -> AsyncIterator[House]:
    """A prefill worker "p" and a decode worker "d"; at the end nobody holds anything."""
    async with house(config_of(path, senders, receivers, **settings)) as home:
        home.add("p", Role.PREFILL)
        home.add("d", Role.DECODE)
        yield home
        await home.empty()


def answers_alone(
    path: Path, codec: str, lengths: Sequence[int] = LENGTHS, **sampling: float
) -> list[list[int]]:
    """What one process says."""
    sampling = {"max_tokens": TOKENS, "ignore_eos": True, **sampling}
    params = SamplingParams(**sampling)
    prompts = [random_prompt(n) for n in lengths]
    completions = LLM(str(path), codec=codec).generate(prompts, params)
    return [list(x.tokens) for x in completions]


async def answers_of(
    home: House, codec: str, lengths: Sequence[int] = LENGTHS, **sampling: float
) -> list[list[int]]:
    """What the workers say to the same prompts at the same time."""
    params = {"max_tokens": TOKENS, "ignore_eos": True, **sampling}
    asked = [home.complete(random_prompt(n), codec, **params) for n in lengths]
    return [tokens for tokens, _ in await asyncio.gather(*asked)]


def has_ended(pid: int) -> bool:
    """Also before its parent has noticed."""
    try:
        return "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True


def is_sending(worker: Worker) -> bool:
    """Whether parts of a hand-off are on the wire."""
    handoffs = worker.service.prefill.context.in_flight.values()
    return any(handoff.wire_bytes > MANY_BYTES for handoff in handoffs)


def busy_worker(home: House, role: Role) -> str:
    """The name of one of this role that computes; "" if none does."""
    for name, worker in home.workers.items():
        if worker._initial_role == role and worker.engine.load.running:
            return name
    return ""


def received_tokens(home: House) -> int:
    """Of all prompts that were handed over to "d"."""
    counts = home.workers["d"].service.reservations.counts
    return counts["received_tokens"] + counts["shared_tokens"]


@pytest.mark.slow
@pytest.mark.parametrize(("senders", "receivers"), SHAPES)
async def test_groups_hand_over_every_codec(tiny, senders, receivers):
    async with group_pair(tiny, senders, receivers) as home:
        for codec in codec_names():
            answered = await answers_of(home, codec)

            assert answered == answers_alone(tiny, codec), codec
        assert received_tokens(home) == len(codec_names()) * sum(LENGTHS)


@pytest.mark.slow
@pytest.mark.parametrize(("senders", "receivers"), [(2, 4), (4, 2)])
async def test_groups_of_four_hand_over_to_groups_of_two(
    four_heads, senders, receivers
):
    async with group_pair(four_heads, senders, receivers) as home:
        for codec in CODECS:
            answered = await answers_of(home, codec)

            assert answered == answers_alone(four_heads, codec), codec
        assert received_tokens(home) == len(CODECS) * sum(LENGTHS)


@pytest.mark.slow
@pytest.mark.parametrize(("senders", "receivers"), SHAPES)
async def test_groups_hand_over_sampled_answers(tiny, senders, receivers):
    sampling = {"temperature": 1.0, "seed": 5}
    async with group_pair(tiny, senders, receivers) as home:
        answered = await answers_of(home, "kivi", **sampling)

    assert answered == answers_alone(tiny, "kivi", **sampling)


@pytest.mark.slow
async def test_groups_hand_over_on_direct_connections(tiny):
    settings = {"transfer.channel": "direct"}
    async with group_pair(tiny, 2, 2, **settings) as home:
        answered = await answers_of(home, "kivi")

    assert answered == answers_alone(tiny, "kivi")


@pytest.mark.slow
async def test_groups_compute_in_chunks_and_reuse_prefixes(tiny):
    settings = {"engine.max_batch_tokens": 48}
    lengths = (17, 130, 200)  # the last has whole pages of `kivi`, which are shared
    expected = answers_alone(tiny, "kivi", lengths)
    async with group_pair(tiny, 2, 2, **settings) as home:
        first = await answers_of(home, "kivi", lengths)
        again = await answers_of(home, "kivi", lengths)

        assert first == again == expected
        assert home.workers["p"].engine.counts["cached_tokens"] > sum(lengths) // 2
        assert home.workers["d"].service.reservations.counts["shared_tokens"] > 0


@pytest.mark.slow
async def test_groups_decode_with_drafts(tiny):
    sampling = {"max_tokens": 250}
    settings = {"engine.speculative_tokens": 5}
    async with group_pair(tiny, 2, 2, **settings) as home:
        answered = await answers_of(home, "raw", **sampling)

        assert home.workers["d"].engine.counts["accepted_tokens"] > 0
    assert answered == answers_alone(tiny, "raw", **sampling)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
async def test_a_sequence_moves_from_a_group(tiny, ranks):
    """To a worker of as many ranks, or of one."""
    (expected,) = answers_alone(tiny, "kivi", [130], max_tokens=200)
    async with group_pair(tiny, 1, 2) as home:
        asking = await home.begin_to_move(tuple(random_prompt(130)), "kivi", 20, 200)
        home.config = config_of(tiny, 1, ranks)
        leaving = await home.relieve()

        tokens, _ = await asking

        assert tokens == expected
        assert leaving.service.decode.counts["moved"] == 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
async def test_all_streams_survive_a_killed_follower(tiny, role):
    lengths = [*range(60, 220, 10)]
    expected = answers_alone(tiny, "kivi", lengths, max_tokens=60)
    async with group_pair(tiny, 2, 2) as home:
        home.add("p2", Role.PREFILL)
        home.add("d2", Role.DECODE)
        asking = asyncio.create_task(answers_of(home, "kivi", lengths, max_tokens=60))
        await until(lambda: busy_worker(home, role))
        victim = busy_worker(home, role)
        worker = home.workers[victim]

        os.kill(worker._ranks.pids[0], signal.SIGKILL)
        with pytest.raises(RanksLostError):
            await until(lambda: worker.wait(0.0))
        del home.workers[victim]
        home.router.died(victim)

        assert await asking == expected
        home.add(victim, Role(worker._initial_role))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_a_follower_that_freezes_ends_an_idle_group(tiny, monkeypatch):
    """No step would tell, and every hand-off would fail. It is killed: nothing else ends it."""
    monkeypatch.setattr(ranks, "END_S", 60.0)
    async with house(config_of(tiny, 1, 2, **FROZEN)) as home:
        worker = home.add("d", Role.DECODE)
        (pid,) = worker._ranks.pids
        os.kill(pid, signal.SIGSTOP)

        with pytest.raises(RanksLostError, match="rank 1 has not answered for 2 s"):
            await until(lambda: worker.wait(0.0))
        del home.workers["d"]
        home.router.died("d")

        await until(lambda: has_ended(pid), seconds=30.0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("victim", ["p", "d"])
async def test_a_follower_that_freezes_in_a_hand_off_costs_no_answer(tiny, victim):
    """It sends its part, or stores it: no part of a prompt is admitted, and all pages are free."""
    lengths = [200, 190, 180]
    expected = answers_alone(tiny, "raw", lengths)
    async with group_pair(tiny, 2, 2, **FROZEN, **SLOW_LINK) as home:
        asking = asyncio.create_task(answers_of(home, "raw", lengths))
        await until(lambda: is_sending(home.workers["p"]))
        worker = home.workers[victim]
        os.kill(worker._ranks.pids[0], signal.SIGSTOP)

        with pytest.raises(RanksLostError):
            await until(lambda: worker.wait(0.0))
        assert not received_tokens(home)
        del home.workers[victim]
        home.router.died(victim)
        home.add(victim, Role(worker._initial_role))

        assert await asking == expected
        assert received_tokens(home) == sum(lengths)
