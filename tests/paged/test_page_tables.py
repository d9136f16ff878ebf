"""Tables of a step on their way to the device."""

import torch

from disagg.paged.append import RecordIds
from disagg.paged.page_tables import ChunkTables, upload

DEVICE = torch.device("meta")


def ids(*pages: int) -> torch.Tensor:
    return torch.tensor(pages, dtype=torch.int32)


def test_all_tables_of_a_chunk_are_copied_to_the_device():
    records = RecordIds(
        pages=ids(1, 2),
        segments=ids(),
        tail=ids(3),
        kept_pages=ids(),
        side=ids(4),
    )
    tables = ChunkTables(record_ids=(records,), prefix_pages=(ids(5, 6, 7),))

    (on_device,) = upload((tables,), DEVICE)

    copies = [*vars(on_device.record_ids[0]).values(), *on_device.prefix_pages]
    assert {copy.device for copy in copies} == {DEVICE}
    assert [len(copy) for copy in copies] == [2, 0, 1, 0, 1, 3]
