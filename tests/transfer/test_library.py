"""What a decode worker keeps for others, and whom it lets in."""

from disagg.plan import Plan
from disagg.transfer.shares import Manifest, Note, Shares
from disagg.transfer.sharing import Library
from tests.transfer.prompts import make_group, make_pool, make_related

BY_PAGE = Plan((make_group((0,), 1, False, False),), (0,))


def test_cached_pages_that_lie_scattered_do_not_keep_out_who_would_share_them():
    """Three slabs, a page to share in each: a prompt that needs a slab for its tail."""
    prompt, pool = make_related(127 * 64 + 1, 1, 8192, BY_PAGE), make_pool(3 << 14)
    library, (group,) = Library(pool), BY_PAGE.groups
    pages = pool.allocate(group.record(group.page), pool.free_pages(group.record(group.page)))
    wanted = Shares(BY_PAGE, prompt.request())
    manifest = Manifest(prompt.checklist, prompt.commit().digests)
    scattered = pages[:: len(pages) // 3]
    for key, unit, page in zip(wanted.keys[0], wanted.units[0], scattered, strict=False):
        pool.keep(key, (page,), Note(manifest, unit))
    pool.release(pages)
    assert pool.cached_pages == 3
    groups, shares = library.hold(BY_PAGE, prompt.request())
    assert shares.cached == [0]
    library.release(groups)
    pool.check_integrity()
    assert pool.referenced_pages == 0
