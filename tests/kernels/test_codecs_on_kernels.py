"""Prompts and steps of whole codecs through the Triton encoders, against the torch reference."""

import pytest
import torch
from torch import Tensor

from disagg.bench.synthetic import realistic
from disagg.codecs import alignedkv, get_codec, h2o, kivi, ott, paged
from disagg.kernels import compete, encode, encode_aligned, paged_aligned, paged_exact
from disagg.kernels.formats_paged import as_paged
from tests.kernels.cases import relative_error

pytestmark = pytest.mark.filterwarnings("ignore:divide by zero")  # the interpreter: log2(0)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BOUNDS = {  # of attention, relative
    "kivi:bits=2,group=32,residual=16": 0.0,
    "fp8": 0.0,
    "kcvt": 0.0,
    "decoquant:bits=4": 0.0,
    "gear:bits=2,backbone=kivi,group=64": 1e-3,
    "ott:residual=0,group=64,rank=2": 1e-3,
    "ott:residual=0,outliers=20,aux=60": 1e-3,
    "h2o": 1e-3,
    "alignedkv": 1e-3,
}


def attend(spec: str, device: str) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Attention after a prompt and steps that seal a page, and what the pages stand for."""
    codec, tokens = get_codec(spec), get_codec(spec).page_tokens
    k, v = (x.half().to(device) for x in realistic(1, 2 * tokens + 80, 64))
    prompt = tokens + 70
    q = torch.randn(3, 9, 64, generator=torch.Generator().manual_seed(1)).to(device)
    cache = codec.compress(k[:, :prompt], v[:, :prompt], layer=3, q=q[:, 1:])
    cache.append(k[:, prompt:], v[:, prompt:])
    return cache.attend(q[:, 0]).cpu(), tuple(x.cpu() for x in cache.reconstruct())


def use_kernels(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Do what ops do on a GPU, on whatever device this is; the names of what is called."""
    called = []

    def use(module, name, kernel):
        def call(*arguments):
            called.append(name)
            return kernel(*arguments)

        monkeypatch.setattr(module, name, call)

    def seal_quantized(k, v, places, fmt):
        encode.seal_segments(k, v, places, as_paged(fmt), [0], k.shape[1])

    use(kivi, "seal_quantized", seal_quantized)
    use(paged, "seal_segments", encode.seal_segments)
    use(paged, "encode_segments", encode.encode_segments)
    use(ott, "keep_outliers", compete.keep_outliers)
    use(ott, "attend_kept", paged_exact.attend_kept)
    use(h2o, "attend_dropped", paged_exact.attend_dropped)
    use(alignedkv, "seal_aligned", encode_aligned.seal_aligned)
    use(alignedkv, "attend_aligned", paged_aligned.attend_aligned)
    return called


@pytest.mark.parametrize("spec", BOUNDS)
def test_a_codec_on_kernels_is_the_codec_of_the_reference(spec, monkeypatch):
    expected, pages = attend(spec, "cpu")
    called = use_kernels(monkeypatch)
    found, found_pages = attend(spec, DEVICE)
    assert len(called) >= 2, called  # the prompt, and a page while decoding
    bound = BOUNDS[spec] if DEVICE == "cpu" else max(BOUNDS[spec], 1e-3)
    assert relative_error(found, expected.double()) <= bound
    for x, y in zip(found_pages, pages, strict=True):
        assert relative_error(x, y.double()) <= 1e-3
