"""Prompts and steps of whole codecs through the Triton kernels, against the torch reference."""

import pytest
import torch
from torch import Tensor

from disagg.codecs import get_codec
from disagg.kernels import ops
from disagg.kernels.cpu import library
from disagg.kernels.gpu import combine
from disagg.kernels.view import Softmax
from disagg.paged.compressed_kv import CompressedKV, GrowingArena, compress
from tests.kernels.cases import DEVICE
from tests.synthetic import realistic, relative_error

PAGES = {  # how far the pages of the kernels are from those of the reference, relative
    "raw:dtype=fp16": 0.0,
    "kivi:bits=2,group=32,residual=16": 0.0,
    "banded": 0.0,
    "banded:bits=2,sink=0": 0.0,
    "fp8": 0.0,
    "kcvt": 0.0,
    "decoquant:bits=4": 0.0,
    "gear:bits=2,backbone=kivi,group=64": 1e-3,
    "ott:residual=0,group=64,rank=2": 1e-3,
    "ott:residual=0,outliers=20,aux=60": 1e-3,
    "h2o": 0.0,
    "alignedkv": 0.0,
}
ATTENTION = ["attend_kernel", "merge_kernel"]  # in one layer, with any tables
OF_PLANES = [
    "attend_kernel",
    "plane_scores_kernel",
    "plane_values_kernel",
    "merge_kernel",
]


def make_cache(
    spec: str, device: str, heads=3, head_dim=64
) -> tuple[CompressedKV, Tensor]:
    """A prompt and steps that seal a page; and a query [heads, head_dim]."""
    codec = get_codec(spec)
    tokens = get_codec(spec).page_tokens
    k, v = (x.half().to(device) for x in realistic(1, 2 * tokens + 80, head_dim))
    prompt = tokens + 70
    q = torch.randn(heads, 9, head_dim, generator=torch.Generator().manual_seed(1)).to(
        device
    )
    cache = compress(codec, k[:, :prompt], v[:, :prompt], layer=3, q=q[:, 1:])
    cache.append(k[:, prompt:], v[:, prompt:])
    return cache, q[:, 0]


def watch(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Take the way of a GPU on any device; returns the names of kernels as they launch."""
    monkeypatch.setattr(ops, "on_gpu", lambda x: True)
    launched: list[str] = []
    kind = type(combine.merge_kernel)
    launch = kind.__getitem__

    def note(kernel, grid):
        launched.append(kernel.__name__)
        return launch(kernel, grid)

    monkeypatch.setattr(kind, "__getitem__", note)
    return launched


@pytest.mark.parametrize("spec", PAGES)
def test_a_codec_on_kernels_is_the_codec_of_the_reference(spec, monkeypatch):
    reference, q = make_cache(spec, "cpu")
    expected = reference.attend(q.double())
    launched = watch(monkeypatch)
    cache, q = make_cache(spec, DEVICE)

    assert "append_kernel" in launched

    launched.clear()
    o = cache.attend(q).cpu()

    assert launched == (OF_PLANES if spec == "alignedkv" else ATTENTION)
    assert relative_error(o, expected) <= 1e-3

    bound = PAGES[spec] if DEVICE == "cpu" else 1e-3

    for x, y in zip(cache.reconstruct(), reference.reconstruct(), strict=True):
        assert relative_error(x.cpu(), y.double()) <= bound


class DirtyArena(GrowingArena):
    """As memory of a GPU is that others had: full of what is no number in any format."""

    def _extend(self, nbytes: int) -> int:
        page = super()._extend(nbytes)
        self.bytes[page * 128 : page * 128 + nbytes] = 255
        return page


@pytest.mark.parametrize("spec", ["raw:dtype=fp16", "banded", "ott:residual=0", "h2o"])
def test_what_memory_held_before_is_never_seen(spec, monkeypatch):
    watch(monkeypatch)
    clean, q = make_cache(spec, DEVICE)
    monkeypatch.setattr("disagg.paged.compressed_kv.GrowingArena", DirtyArena)
    dirty, _ = make_cache(spec, DEVICE)

    assert torch.equal(dirty.attend(q), clean.attend(q))


@pytest.mark.parametrize("spec", ["banded", "kivi:bits=2", "h2o"])
def test_wide_queries_that_share_pages_equal_the_reference(spec, monkeypatch):
    reference, q = make_cache(spec, "cpu", 8, 256)
    expected = reference.attend(q.double())
    watch(monkeypatch)
    cache, q = make_cache(spec, DEVICE, 8, 256)

    assert relative_error(cache.attend(q).cpu(), expected) <= 1e-3


@pytest.mark.parametrize(
    "spec", ["raw:dtype=fp16", "kcvt", "banded", "h2o", "alignedkv"]
)
def test_caps_and_sinks_are_those_of_the_reference(spec, monkeypatch):
    cache, q = make_cache(spec, DEVICE)
    softmax = Softmax(0.3, 2.0, torch.tensor([-1.0, 2.0, 5.0], device=DEVICE))
    with library.forced(library.TORCH):
        expected = cache.attend(q, softmax)
    watch(monkeypatch)

    assert (
        relative_error(cache.attend(q, softmax).cpu(), expected.cpu().double()) <= 1e-3
    )
    assert relative_error(cache.attend(q).cpu(), expected.cpu().double()) > 1e-2


@pytest.mark.parametrize(
    "spec", ["banded", "kivi:residual=0", "gear:bits=2,backbone=kivi", "h2o", "kcvt"]
)
def test_a_token_that_completes_a_page_takes_one_launch(spec, monkeypatch):
    cache, _ = make_cache(spec, DEVICE)
    launched = watch(monkeypatch)
    k, v = (x.half().to(DEVICE) for x in realistic(1, 64, 64))
    sealed = [cache.group.sealed(cache.num_tokens + more) for more in range(65)]
    count = sealed.index(sealed[0] + 64) - 1  # one less than completes the next page
    cache.append(k[:, :count], v[:, :count])
    sealed = len(cache._state.page_ids())
    launched.clear()
    cache.append(k[:, :1], v[:, :1])

    assert len(cache._state.page_ids()) == sealed + 1
    assert launched == ["append_kernel"]
