from disagg.transfer.items import *  # noqa: F403
from disagg.transfer.items import KIND_ORDER, ArenaSource, Checklist, items_in_frame, message_bytes
from disagg.transfer.units import Unit, content_keys, units_of
