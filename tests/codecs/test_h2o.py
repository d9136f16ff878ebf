"""H2O keeps the heaviest and the most recent tokens of a prompt, and all later ones."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from disagg.codecs import get_codec
from disagg.codecs.contract import Queries
from disagg.errors import RequestError
from disagg.kernels.view import Softmax
from disagg.paged.compressed_kv import compress
from tests.synthetic import gaussian, prompt_and_decode, realistic


def random_kv(heads: int, n: int, seed: int) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(seed)
    k, v = torch.randn(2, heads, n, 64, generator=source).half()
    return k, v


def queries_for(k: Tensor, tokens: list[int]) -> Tensor:
    """For each KV head, queries that give nearly all their attention to one token each."""
    keys = k[:, tokens].float()
    return 40 * torch.nn.functional.normalize(keys, dim=2)


def test_tokens_that_the_last_queries_attend_to_are_present() -> None:
    k, v = random_kv(heads=2, n=320, seed=0)
    heavy = [17, 101, 140]
    q = queries_for(k, heavy)  # one head for each KV head

    cache = compress(get_codec("h2o:keep=0.25"), k, v, q=q)
    present = cache.present()
    assert present[:, heavy].all()
    assert present[:, -40:].all()  # recent: half of a quarter of 320
    assert (present.sum(1) == 80).all()

    new_k, new_v = cache.reconstruct()
    assert torch.equal(new_k[present], k[present].float())
    assert torch.equal(new_v[present], v[present].float())


def test_query_heads_of_a_kv_head_choose_together() -> None:
    k, v = random_kv(heads=1, n=128, seed=1)
    first, second = queries_for(k, [9]), queries_for(k, [33])
    q = torch.cat([first, second])

    present = compress(get_codec("h2o:keep=0.25"), k, v, q=q).present()
    assert present[0, [9, 33]].all()


@pytest.mark.parametrize(
    ("softmax", "factor"),
    [
        (Softmax(1 / 64), 1 / 8),
        (Softmax(1 / 8, 1e6), 1),
    ],
    ids=["scale", "cap"],
)
def test_tokens_are_weighed_with_the_softmax_of_the_model(softmax, factor) -> None:
    k, v = realistic(2, 320, 64)
    q = gaussian(2, 8, 64, seed=0)
    codec = get_codec("h2o:keep=0.25")

    def present(q: Tensor | Queries) -> Tensor:
        return compress(codec, k, v, q=q).present()

    queries = Queries.of(q, 2, 320)
    chosen = present(replace(queries, softmax=softmax))
    assert torch.equal(chosen, present(q * factor))

    flat = replace(queries, softmax=Softmax(1 / 8, 1e-3))
    assert not torch.equal(chosen, present(flat))


def test_decoded_tokens_are_all_present() -> None:
    k, v = realistic(2, 400, 64)
    q = torch.randn(2, 8, 64)
    cache = prompt_and_decode("h2o", k, v, prompt=200, q=q)

    present = cache.present()
    assert present[:, 192:].all()
    assert (present.sum(1) == 96 + 208).all()


def test_without_queries_it_says_what_it_needs() -> None:
    k, v = realistic(1, 128, 64)
    with pytest.raises(RequestError, match="last queries of the prompt"):
        compress(get_codec("h2o"), k, v)


@pytest.mark.parametrize(
    "shape",
    [
        (3, 8, 64),
        (2, 129, 64),
    ],
    ids=["heads", "tokens"],
)
def test_queries_of_other_heads_or_tokens_are_refused(shape: tuple[int, ...]) -> None:
    k, v = realistic(2, 128, 64)
    with pytest.raises(RequestError, match="a multiple of 2, at most 128"):
        compress(get_codec("h2o"), k, v, q=torch.randn(shape))
