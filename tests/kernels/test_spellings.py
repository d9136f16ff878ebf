"""The check that precedes every timing on a GPU finds right what is right."""

import pytest
import torch

from disagg.kernels.bits import MAGIC, PLAIN
from disagg.kernels.spellings import check_spelling

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.filterwarnings("ignore:divide by zero")  # the interpreter: log2(0)
@pytest.mark.parametrize(("spelling", "bits"), [(PLAIN, 2), (MAGIC, 4)])
def test_a_spelling_that_runs_here_is_exact_and_attends_rightly(spelling, bits):
    check = check_spelling(spelling, bits, DEVICE)
    assert check.exact_sums
    assert check.error < 1e-3
