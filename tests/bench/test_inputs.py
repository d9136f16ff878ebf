import torch

from disagg.bench.inputs import Knobs, generate
from tests.codecs.test_golden import golden


def test_the_golden_input_is_made_again():
    """To a unit in the last place: torch sums in another order where vectors are narrower."""
    layer = generate(1234)

    stored = golden("inputs")
    for name in ("q", "k", "v"):
        torch.testing.assert_close(
            getattr(layer, name),
            stored[name][0],
            rtol=2**-10,
            atol=2**-24,
        )
    assert torch.equal(layer.outliers, stored["outlier_tokens"])


def test_outlier_tokens_are_small_and_three_channels_are_loud():
    layer = generate(0, Knobs(n=512, outliers=5))

    keys = layer.k.float()
    norms = keys.norm(dim=2)
    outlier_norms = norms[:, layer.outliers]
    medians = norms.median(1, keepdim=True).values
    assert (outlier_norms < 0.3 * medians).all()

    magnitudes = keys.abs().mean(1)
    loudest = magnitudes.topk(4, dim=1).values
    third = loudest[:, 2]
    fourth = loudest[:, 3]
    assert (third > 2 * fourth).all()
