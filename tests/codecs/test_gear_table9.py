"""GEAR's Table 9 recomputed: KV sizes as that paper counts them, which is not what is stored.

The paper adds the exact buffer instead of replacing tokens by it, divides it by the prompt alone,
adds the metadata of K and V, ignores what decoding adds, and counts rank 2 (a flat 2 % for
LLaMA3-8B) where it prints 4. True stored bytes are in disagg.codecs.describe.

source: GEAR, arXiv:2403.05527, Table 9
"""

from dataclasses import dataclass

PROMPTS = {"GSM8k": 900, "AQuA": 1304, "BBH": 1021}  # tokens
WIDTHS = {"LLaMA3-8B": 4096, "LLaMA2-13B": 5120, "Mistral-7B": 4096}  # channels, as counted there
HEAD_DIM = 128
GROUP, GROUPED_BUFFER, KCVT_BUFFER = 64, 64, 20
FLAT_LOW_RANK = "LLaMA3-8B"

REPORTED = {  # method: percent for GSM8k, AQuA, BBH of each model in turn
    "pertoken-4": (35.2, 33.0, 34.4, 35.2, 33.0, 34.4, 35.2, 33.0, 34.4),
    "kcvt-4": (26.7, 27.2, 27.2, 27.5, 26.7, 27.2, 27.5, 26.7, 27.2),
    "kivi-4": (35.2, 33.0, 34.4, 35.2, 33.0, 34.4, 35.2, 33.0, 34.4),
    "gear-l(kcvt)-4": (29.7, 28.9, 29.4, 29.3, 28.4, 29.0, 29.3, 28.5, 29.0),
    "gear(kcvt)-4": (31.7, 30.9, 31.4, 31.3, 30.4, 31.0, 31.3, 30.5, 31.0),
    "pertoken-2": (22.7, 20.5, 21.9, 22.7, 20.5, 21.9, 22.7, 20.5, 21.9),
    "kivi-2": (22.7, 20.5, 21.9, 22.7, 20.5, 21.9, 22.7, 20.5, 21.9),
    "gear-l(kivi)-2": (25.0, 22.7, 24.1, 24.5, 22.2, 23.7, 24.5, 22.2, 23.7),
    "gear(kivi)-2": (29.0, 26.7, 28.1, 28.5, 26.2, 27.7, 28.5, 26.2, 27.7),
}


@dataclass(frozen=True)
class Cell:
    """One number of the table, in percent of fp16."""

    method: str
    model: str
    dataset: str
    computed: float
    reported: float

    @property
    def agrees(self) -> bool:
        """Whether the two are within 0.05 point."""
        return abs(self.computed - self.reported) <= 0.05 + 1e-9


def table9() -> list[Cell]:
    """All 81 cells."""
    places = [(model, dataset) for model in WIDTHS for dataset in PROMPTS]
    return [
        Cell(method, model, dataset, paper_percent(method, model, PROMPTS[dataset]), reported)
        for method, row in REPORTED.items()
        for (model, dataset), reported in zip(places, row, strict=True)
    ]


def paper_percent(method: str, model: str, n: int) -> float:
    """The size that the paper's counting gives a method for a prompt of n tokens."""
    name, bits = method.rsplit("-", 1)
    kcvt = "kcvt" in name
    if kcvt:
        share = int(bits) / 16 + 2 / n + 2 / WIDTHS[model] + KCVT_BUFFER / n
    else:
        share = int(bits) / 16 + 2 / GROUP + GROUPED_BUFFER / n
    if name.startswith("gear"):
        share += 2 / n + (0.02 if model == FLAT_LOW_RANK else 2 / HEAD_DIM)
    if name.startswith("gear("):
        share += 0.02 if kcvt else 0.04
    return 100 * share


def test_the_paper_s_own_counting_gives_79_of_its_81_sizes() -> None:
    cells = table9()
    for cell in cells:
        mark = "" if cell.agrees else "  <- not reproduced"
        place = f"{cell.method:15} {cell.model:11} {cell.dataset:6}"
        print(f"{place} {cell.computed:6.2f} {cell.reported:6.1f}{mark}")
    assert len(cells) == 81
    missed = [cell for cell in cells if not cell.agrees]
    assert len(missed) <= 2
    assert all(cell.method == "kcvt-4" and cell.model == "LLaMA3-8B" for cell in missed)
