"""H2O keeps the heaviest and the most recent tokens of a prompt, and all that come later."""

from dataclasses import replace

import pytest
import torch

from disagg.codecs import get_codec
from disagg.codecs.contract import Queries
from disagg.errors import RequestError
from disagg.kernels.view import Softmax
from disagg.paged.compressed_kv import compress
from tests.synthetic import realistic


def test_tokens_that_the_last_queries_look_at_are_kept() -> None:
    k, v = torch.randn(2, 2, 320, 64, generator=torch.Generator().manual_seed(0)).half()
    wanted = torch.tensor([17, 101, 140])
    q = 40 * torch.nn.functional.normalize(
        k[:, wanted].float(), dim=2
    )  # one head for each KV head
    cache = compress(get_codec("h2o:keep=0.25"), k, v, q=q)
    there = cache.present()
    assert there[:, wanted].all()
    assert there[:, -40:].all()  # recent: half of a quarter of 320
    assert (there.sum(1) == 80).all()
    seen_k, seen_v = cache.reconstruct()
    assert torch.equal(seen_k[there], k[there].float())
    assert torch.equal(seen_v[there], v[there].float())


def test_query_heads_of_a_kv_head_choose_together() -> None:
    k, v = torch.randn(2, 1, 128, 64, generator=torch.Generator().manual_seed(1)).half()
    q = torch.cat(
        [40 * torch.nn.functional.normalize(k[:, [t]].float(), dim=2) for t in (9, 33)]
    )
    there = compress(get_codec("h2o:keep=0.25"), k, v, q=q).present()
    assert there[0, [9, 33]].all()


@pytest.mark.parametrize(
    ("softmax", "times"), [(Softmax(1 / 64), 1 / 8), (Softmax(1 / 8, 1e6), 1)]
)
def test_tokens_are_weighed_with_the_scale_and_cap_of_the_model(softmax, times) -> None:
    k, v = realistic(2, 320, 64)
    q = torch.randn(2, 8, 64, generator=torch.Generator().manual_seed(0))
    queries, codec = Queries.of(q, 2, 320), get_codec("h2o:keep=0.25")
    there = compress(codec, k, v, q=replace(queries, softmax=softmax)).present()
    assert torch.equal(there, compress(codec, k, v, q=q * times).present())
    flat = replace(queries, softmax=Softmax(1 / 8, 1e-3))
    assert not torch.equal(there, compress(codec, k, v, q=flat).present())


def test_decoded_tokens_are_all_kept() -> None:
    k, v = realistic(2, 400, 64)
    cache = compress(get_codec("h2o"), k[:, :200], v[:, :200], q=torch.randn(2, 8, 64))
    cache.append(k[:, 200:], v[:, 200:])
    assert cache.present()[:, 192:].all()
    assert (cache.present().sum(1) == 96 + 208).all()


def test_without_queries_it_says_what_it_needs() -> None:
    k, v = realistic(1, 128, 64)
    with pytest.raises(RequestError, match="last queries of the prompt"):
        compress(get_codec("h2o"), k, v)


@pytest.mark.parametrize("shape", [(3, 8, 64), (2, 129, 64)])
def test_queries_of_other_heads_or_tokens_are_refused(shape: tuple[int, ...]) -> None:
    k, v = realistic(2, 128, 64)
    with pytest.raises(RequestError, match="a multiple of 2, at most 128"):
        compress(get_codec("h2o"), k, v, q=torch.randn(shape))
