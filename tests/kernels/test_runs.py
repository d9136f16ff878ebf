"""Runs of pages that share a segment, found in Triton."""

import pytest
import torch

from disagg.kernels.runs import run_spans

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def spans(lo: list[int], hi: list[int], owner: list[list[int]], segments: int) -> list[list[int]]:
    tables = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in (lo, hi, owner))
    start, stop = run_spans(*tables, segments, 64)
    return torch.stack([start, stop], 1).cpu().tolist()


def test_runs_are_what_a_window_sees_of_each_segment():
    owner = [[0, 0, 1, 1, 2, 0], [0, 1, 0, 0, 0, 0]]  # behind what a sequence shows is padding
    found = spans([70, 0], [300, 65], owner, 3)
    shown = [span for span in found if span[1] > span[0]]
    assert shown == [[70, 128], [128, 256], [256, 300], [0, 64], [64, 65]]


def test_a_sequence_without_pages_shows_no_run():
    assert all(stop <= start for start, stop in spans([0], [0], [[0, 0, 0]], 2))


@pytest.mark.parametrize(("segments", "pages"), [(1, 300), (17, 19), (33, 8), (40, 32)])
def test_long_sequences_have_runs_of_any_length(segments, pages):
    owner = [i for i in range(segments) for _ in range(1 + (pages - 1) * (i % 3 == 0))]
    ends = [64 * (1 + max(p for p, own in enumerate(owner) if own == i)) for i in range(segments)]
    hi = 64 * len(owner) - 9
    expected = [list(x) for x in zip([0, *ends[:-1]], [*ends[:-1], hi], strict=True)]
    assert spans([0], [hi], [[*owner, 0, 0]], segments) == expected


def test_owners_that_would_be_misread_are_refused():
    owner = torch.zeros(4, 2, dtype=torch.int32)
    with pytest.raises(ValueError, match="contiguous"):
        run_spans(owner[:, 0], owner[:, 0], owner.t(), 1, 64)
    with pytest.raises(ValueError, match="int32"):
        run_spans(owner[:, 0], owner[:, 0], owner.long(), 1, 64)
