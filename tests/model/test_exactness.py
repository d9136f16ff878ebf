from tests.model.exactness import compare, make_prompts, measure
from tests.model.reference import Reference
from tests.model.tiny import save_tiny


def test_the_first_difference_counts_and_what_follows_does_not():
    truth = Reference((1, 2, 3, 4), (1.0, 1.0, 1e-5, 1.0))
    result = compare([[1, 2, 3, 4], [1, 2, 9, 9], [1, 9, 9, 9]], [truth] * 3, 1.0)
    assert (result["mismatches"], result["ties"]) == (1, 1)
    assert (result["tokens"], result["compared"]) == (12, 4 + 3 + 2)


def test_prompts_are_of_all_lengths(tiny, tmp_path):
    text = tmp_path / "text"
    text.write_text("All happy families are alike. " * 100)
    for source in (None, text):
        assert [len(x) for x in make_prompts(str(tiny), source, 4)] == [
            5,
            503,
            1001,
            1500,
        ]


def test_exact_kv_is_exact_one_by_one_and_together(tmp_path):
    path = str(save_tiny("llama", tmp_path, max_position_embeddings=2048))
    result = measure(path, None, prompts=3, max_tokens=6)
    assert result["lengths"] == [5, 752, 1500]
    for part in (result["one_by_one"], result["ragged"]):
        assert (part["mismatches"], part["compared"]) == (0, 18)
