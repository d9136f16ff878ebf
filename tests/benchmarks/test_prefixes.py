"""What prompts of hybrids compute, at sizes that say nothing of speed."""

from itertools import pairwise

from benchmarks import prefixes
from tests.model.tiny import random_prompt


def test_snapshots_save_tokens_where_prompts_repeat(hybrid):
    runner = hybrid("qwen3_5_text")
    chat = random_prompt(240)
    turns = [tuple(chat[:length]) for length in (80, 160, 240)]

    without = prefixes.measure(runner, turns, share=0)
    resumed = prefixes.measure(runner, turns, share=0.5)

    assert without["computed_tokens"] == without["prompt_tokens"]
    assert resumed["computed_tokens"] == without["computed_tokens"] - 64 - 144


def test_workloads_share_what_their_names_say():
    workloads = prefixes.workloads()
    chat, behind_system, unrelated = workloads.values()

    for turn, next_turn in pairwise(chat):
        assert next_turn[: len(turn)] == turn
    systems = {prompt[: prefixes.SYSTEM] for prompt in behind_system}
    beginnings = {prompt[:16] for prompt in unrelated}
    assert len(systems) == 1
    assert len(beginnings) == len(unrelated)
