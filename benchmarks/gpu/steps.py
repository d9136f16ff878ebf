"""The steps, in order of value, with their shares of the budget in seconds."""

from benchmarks.gpu import (
    attention,
    decode,
    environment,
    equality,
    suite,
    transfer,
    truth,
    warmup,
)
from benchmarks.gpu.setting import Step

STEPS = {
    "warmup": Step("warmup", 150.0, warmup.rows, warmup.headline),
    "environment": Step("environment", 15.0, environment.rows, environment.headline),
    "equality": Step("equality", 90.0, equality.rows, equality.headline),
    "attention": Step("attention", 90.0, attention.rows, attention.headline),
    "truth": Step("truth", 50.0, truth.rows, truth.headline),
    "decode": Step("decode", 110.0, decode.rows, decode.headline),
    "transfer": Step("transfer", 50.0, transfer.rows, transfer.headline),
    "suite": Step("suite", 35.0, suite.rows, suite.headline),
}
