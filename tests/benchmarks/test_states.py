"""The benchmark of rounded states: which runs it compares, and whose bytes it computes."""

import json

import pytest

from benchmarks import command, states
from disagg.errors import ConfigError
from disagg.kv.page import BF16, EXACT, INT8
from tests.model.tiny import save_config


@pytest.fixture(scope="module")
def rows(hybrid):
    runner = hybrid("qwen3_5_text")
    text = states.random_text(runner.info.vocab_size, prompt=40, answer=12, count=2)
    cases = [("raw", form) for form in (EXACT, BF16, INT8, states.FORGOTTEN)]
    patched = pytest.MonkeyPatch()
    patched.setattr(states, "CASES", cases)
    with patched.context():
        measured = states.measure_states(runner, text, "tiny")
    patched.undo()
    return {row["states"]: row for row in measured}


def test_the_more_is_rounded_the_more_the_next_tokens_diverge(rows):
    divergences = [rows[form]["kl_10"] for form in (BF16, INT8, states.FORGOTTEN)]

    assert divergences == sorted(divergences)
    assert divergences[0] > 0


def test_figures_are_compared_with_the_exact_run(rows):
    assert rows[EXACT]["perplexity_change"] == 0
    assert "kl_10" not in rows[EXACT]
    assert "kl_100" not in rows[INT8]


def test_bytes_are_those_of_the_hybrid_models_of_a_file(tmp_path):
    file = tmp_path / "configs.jsonl"
    lines = []
    for kind in ("llama", "qwen3_5_text"):
        folder = save_config(kind, tmp_path / kind)
        config = json.loads((folder / "config.json").read_text())
        lines.append(json.dumps({"name": kind, "config": config}))
    file.write_text("\n".join(lines))

    exact, bf16, int8 = states.size_rows(file)

    assert {x["model"] for x in (exact, bf16, int8)} == {"qwen3_5_text"}
    assert exact["state_bytes"] > bf16["state_bytes"] > int8["state_bytes"]
    saved_bytes = exact["state_bytes"] - int8["state_bytes"]
    assert exact["at_8192"] - int8["at_8192"] == saved_bytes


def test_a_model_without_states_is_refused(tiny):
    with pytest.raises(ConfigError, match="keeps no states"):
        command.run(states.states, [str(tiny)], "states")
