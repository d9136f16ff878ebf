"""Outlier channels in keys: no answer changes, and keys are those of a changed checkpoint."""

from pathlib import Path

import pytest
import torch

from disagg.eval.paged import EXACT, PagedKV, prefill
from disagg.model.outliers import KeyOutliers
from disagg.model.runner import Runner
from tests.model.tiny import add_outliers, random_prompt, save_tiny

PROMPT = random_prompt(60)
ANSWER = random_prompt(20, seed=1)


def logits_of(runner: Runner) -> torch.Tensor:
    kv = PagedKV(runner, EXACT, prefill(runner, PROMPT))
    return kv.feed(ANSWER)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen3", "gemma2", "gpt_oss"])
def test_exact_logits_do_not_change(kind: str, tmp_path: Path) -> None:
    runner = Runner.load(str(save_tiny(kind, tmp_path)))
    expected = logits_of(runner)

    runner.key_outliers = KeyOutliers(256)

    assert torch.allclose(logits_of(runner), expected, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [("llama", {}), ("llama", {"attention_bias": True}), ("qwen2", {})],
    ids=["rows", "rows-and-biases", "qwen2"],
)
def test_keys_are_those_of_a_checkpoint_with_outliers(
    kind: str, changes: dict[str, bool], tmp_path: Path
) -> None:
    folder = save_tiny(kind, tmp_path, head_dim=16, **changes)
    plain = Runner.load(str(folder))
    plain_logits = logits_of(plain)
    plain.key_outliers = KeyOutliers(256)
    add_outliers(folder, 256, range(3))

    changed = Runner.load(str(folder))

    assert torch.allclose(logits_of(changed), plain_logits, atol=1e-4)
    layers = zip(
        prefill(changed, PROMPT).layers, prefill(plain, PROMPT).layers, strict=True
    )
    for of_checkpoint, of_call in layers:
        assert torch.allclose(of_checkpoint.k, of_call.k, rtol=1e-4, atol=1e-4)
        assert torch.equal(of_checkpoint.v, of_call.v)


def test_some_channels_are_outliers_and_the_others_stay(runner: Runner) -> None:
    before = prefill(runner, PROMPT).layers[0].k
    runner.key_outliers = KeyOutliers(64)
    try:
        after = prefill(runner, PROMPT).layers[0].k
    finally:
        runner.key_outliers = None

    factors = (after / before).amax(1)  # [H, D]
    assert (factors[0] == 64).sum() == 6
    assert torch.equal(factors.unique(), torch.tensor([1.0, 64.0]))
    assert (factors[1] == 1).all()
