import torch

from disagg.bench.inputs import Knobs, generate
from tests.codecs.test_golden import golden


def test_the_golden_input_is_made_again():
    """To a unit in the last place: torch sums in another order where vectors are narrower."""
    made, stored = generate(1234), golden("inputs")
    for name in ("q", "k", "v"):
        found, expected = getattr(made, name), stored[name][0]
        torch.testing.assert_close(found, expected, rtol=2**-10, atol=2**-24)
    assert torch.equal(made.outliers, stored["outlier_tokens"])


def test_outlier_tokens_have_small_keys_and_three_channels_are_loud():
    layer = generate(0, Knobs(n=512, outliers=5))
    norms = layer.k.float().norm(dim=2)
    assert (norms[:, layer.outliers] < 0.3 * norms.median(1).values[:, None]).all()
    loudest = layer.k.float().abs().mean(1).topk(4, 1).values
    assert (loudest[:, 2] > 2 * loudest[:, 3]).all()
