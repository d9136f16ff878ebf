import pytest

from tests.model.exactness import compare, make_prompts, measure
from tests.model.reference import Reference
from tests.model.tiny import save_tiny


def test_only_the_first_difference_counts():
    truth = Reference((1, 2, 3, 4), (1.0, 1.0, 1e-5, 1.0))
    answers = [
        [1, 2, 3, 4],
        [1, 2, 9, 9],
        [1, 9, 9, 9],
    ]

    result = compare(answers, [truth] * 3, 1.0)

    assert (result["mismatches"], result["ties"]) == (1, 1)
    assert result["tokens"] == 12
    assert result["compared"] == 4 + 3 + 2


@pytest.mark.parametrize("source", ["random", "text"])
def test_prompts_are_of_all_lengths(source, tiny, tmp_path):
    text = None
    if source == "text":
        text = tmp_path / "text"
        text.write_text("All happy families are alike. " * 100)

    prompts = make_prompts(str(tiny), text, 4)

    assert [len(prompt) for prompt in prompts] == [5, 503, 1001, 1500]


def test_exact_kv_is_exact_one_by_one_and_together(tmp_path):
    path = str(save_tiny("llama", tmp_path, max_position_embeddings=2048))

    result = measure(path, None, prompts=3, max_tokens=6)

    assert result["lengths"] == [5, 752, 1500]
    for part in (result["one_by_one"], result["ragged"]):
        assert part["mismatches"] == 0
        assert part["compared"] == 18
