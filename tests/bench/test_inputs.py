import torch

from disagg.bench.inputs import Knobs, generate
from tests.codecs.test_golden import golden


def test_the_golden_input_is_made_again():
    """To a unit in the last place: torch sums in another order where vectors are narrower."""
    layer = generate(1234)

    stored = golden("inputs")
    torch.testing.assert_close(layer.q, stored["q"][0], rtol=2**-10, atol=2**-24)
    torch.testing.assert_close(layer.k, stored["k"][0], rtol=2**-10, atol=2**-24)
    torch.testing.assert_close(layer.v, stored["v"][0], rtol=2**-10, atol=2**-24)
    assert torch.equal(layer.outliers, stored["outlier_tokens"])


def test_outlier_tokens_have_small_keys_and_three_channels_are_loud():
    layer = generate(0, Knobs(n=512, outliers=5))

    keys = layer.k.float()
    norms = keys.norm(dim=2)
    medians = norms.median(1).values[:, None]
    assert (norms[:, layer.outliers] < 0.3 * medians).all()

    magnitudes = keys.abs().mean(1)
    loudest = magnitudes.topk(4, 1).values
    assert (loudest[:, 2] > 2 * loudest[:, 3]).all()
