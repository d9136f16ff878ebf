import pytest
import torch

from disagg.codecs import get_codec
from disagg.errors import ConfigError, UnknownNameError
from tests.synthetic import realistic


def test_the_tail_keeps_the_last_tokens_exact():
    k, v = (x.half() for x in realistic(2, 500, 64))
    seen_k, seen_v = get_codec("kivi:bits=2,group=64,residual=128").compress(k, v).reconstruct()
    assert torch.equal(seen_k[:, -128:], k[:, -128:].float())
    assert torch.equal(seen_v[:, -128:], v[:, -128:].float())
    assert not torch.equal(seen_k[:, :64], k[:, :64].float())


@pytest.mark.parametrize(
    ("spec", "error", "message"),
    [
        ("kiwi:bits=2", UnknownNameError, "unknown codec 'kiwi'; known: .*kivi.*raw"),
        ("kivi:bit=2", UnknownNameError, "unknown option of codec kivi 'bit'; known: bits, group"),
        ("kivi:bits=3", ConfigError, "kivi:bits is 3; 2 and 4 are known"),
        ("kivi:bits=two", ConfigError, "option bits of codec kivi is 'two'; a number"),
        ("kivi:bits", ConfigError, "option 'bits' of codec kivi has no value"),
        ("kivi:bits=2,bits=4", ConfigError, "given twice"),
        ("kivi:residual=-16", ConfigError, "kivi:residual is -16; a multiple of 16 tokens"),
        ("gear:sparsity=0.02", ConfigError, "a multiple of 1/64"),
        ("gear:sparsity=0", ConfigError, "1/64"),
        ("gear:sparsity=0.3", ConfigError, "1/64"),
        ("ott:rank=17", ConfigError, "ott:rank is 17; 0 to 16 is wanted"),
        ("raw:dtype=fp8", ConfigError, "raw:dtype is 'fp8'; model, fp16, bf16 and fp32 are known"),
    ],
)
def test_a_spec_that_cannot_be_says_what_would_be_right(spec, error, message):
    with pytest.raises(error, match=message):
        get_codec(spec)
