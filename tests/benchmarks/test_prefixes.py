"""What prompts of hybrids compute, at sizes that say nothing of speed."""

from benchmarks import prefixes
from tests.model.tiny import random_prompt


def test_snapshots_save_tokens_where_prompts_repeat(hybrid):
    chat = random_prompt(240)
    turns = [tuple(chat[:length]) for length in (80, 160, 240)]

    without, with_snapshots = (
        prefixes.measure(hybrid("qwen3_5_text"), turns, share) for share in (0, 0.5)
    )

    assert without["computed_tokens"] == without["prompt_tokens"] == 480
    assert with_snapshots["computed_tokens"] == 80 + (160 - 64) + (240 - 144)


def test_workloads_share_what_their_names_say():
    chat, behind_system, unrelated = prefixes.workloads().values()

    assert all(chat[i + 1][: len(chat[i])] == chat[i] for i in range(len(chat) - 1))
    assert len({prompt[: prefixes.SYSTEM] for prompt in behind_system}) == 1
    assert len({prompt[:16] for prompt in unrelated}) == len(unrelated)
