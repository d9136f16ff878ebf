"""The requests of `disagg bench serve`."""

import json
from pathlib import Path

import pytest

from disagg.bench.workload import LoadRequest, WorkloadOptions, make_requests
from disagg.errors import ConfigError
from disagg.model.tokenizer import Tokenizer

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,37,4
2023-11-16 18:15:50.9951690,39,1
"""


def requests_of(
    dataset: str, path: Path | None = None, **lengths: int
) -> list[LoadRequest]:
    options = WorkloadOptions(dataset, path, num_prompts=9, **lengths)
    return make_requests(options, Tokenizer.load())


def test_random_prompts_have_their_length_and_follow_the_seed():
    lengths = {"input_len": 50, "output_len": 6, "prefix_len": 5}
    tokenizer = Tokenizer.load()

    requests = requests_of("random", **lengths)

    assert len(requests) == 9
    for request in requests:
        tokens = tokenizer.encode(request.prompt, special=False)
        assert request.prompt_tokens == len(tokens)
        assert abs(request.prompt_tokens - 55) <= 2
        assert request.max_tokens == 6
    assert len({request.prompt for request in requests}) == 9
    assert requests == requests_of("random", **lengths)
    assert requests != requests_of("random", **lengths, seed=1)


def test_a_conversation_yields_its_first_turn_and_answer_length(tmp_path):
    file = tmp_path / "talks.json"
    long, short = {"value": "The ship left the harbour. " * 5}, {"value": "No"}
    talks = [
        {"conversations": [long, long]},
        {"conversations": [long]},
        {"conversations": [short, long]},
    ]
    file.write_text(json.dumps(talks))

    (request,) = requests_of("sharegpt", file)

    assert request.prompt == long["value"]
    assert request.max_tokens == request.prompt_tokens


def test_a_trace_of_azure_gives_lengths_and_times(tmp_path):
    file = tmp_path / "a.csv"
    file.write_text(AZURE)

    first, second = requests_of("azure", file)

    assert (first.max_tokens, second.max_tokens) == (4, 1)
    assert abs(first.prompt_tokens - 37) <= 2
    assert (first.at_s, second.at_s) == (0, pytest.approx(4.314579))


def test_a_trace_of_mooncake_gives_shared_prefixes(tmp_path):
    file = tmp_path / "m.jsonl"
    rows = [
        {"timestamp": 500, "input_length": 520, "output_length": 2, "hash_ids": [0, 1]},
        {
            "timestamp": 2500,
            "input_length": 600,
            "output_length": 3,
            "hash_ids": [0, 2],
        },
    ]
    file.write_text("\n".join(map(json.dumps, rows)))

    first, second = requests_of("mooncake", file)

    assert second.at_s == 2.0
    assert abs(second.prompt_tokens - 600) <= 2
    assert first.prompt[:1000] == second.prompt[:1000]
    assert first.prompt != second.prompt


@pytest.mark.parametrize("dataset", ["sharegpt", "azure", "mooncake"])
def test_a_file_of_something_else_is_an_error_that_names_it(dataset, tmp_path):
    file = tmp_path / "a"
    file.write_text("nothing\n")

    with pytest.raises(ConfigError, match=str(file)):
        requests_of(dataset, file)
