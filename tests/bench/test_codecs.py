from disagg.bench.codecs import measure
from disagg.bench.kvgen import Knobs, generate


def test_a_speed_is_measured_against_a_copy_of_the_same_tensors() -> None:
    layer = generate(0, Knobs(kv_heads=1, group=1, n=256))
    speed = measure("int8", layer.q, layer.k, layer.v)
    assert speed.spec == "int8"
    assert speed.gb_per_s > 0
    assert speed.copies > 0
    assert 50 < speed.fp16_pct < 52
