"""The layouts of a model's KV as plain values."""

from typing import Any

from disagg.codecs.planning import KVShape, parse_plan
from disagg.model.describe import describe_model
from disagg.page import Layout
from disagg.plan import LayerGroup


def layouts_of(spec: str, model: str | None) -> dict[str, Any]:
    """Every layout of every layer group, with its planes."""
    info = describe_model(model)
    shape = KVShape(info.num_layers, info.heads, info.head_dim, info.dtype, info.windows)
    plan = parse_plan(spec, shape)
    groups = [
        {
            "layers": ", ".join(map(str, group.layers)),
            "codec": group.codec,
            "heads": group.heads,
            "window": group.window,
            "residual": group.residual,
            "layouts": [_layout(group, layout) for layout in group.layouts()],
        }
        for group in plan.groups
    ]
    return {"spec": plan.spec, "fingerprint": plan.fingerprint, "groups": groups}


def _layout(group: LayerGroup, layout: Layout) -> dict[str, Any]:
    planes = [
        {
            "name": plane.name,
            "dtype": plane.dtype,
            "shape": list(plane.shape),
            "offset": plane.offset,
            "bytes": plane.nbytes,
        }
        for plane in layout.planes
    ]
    return {
        "kind": layout.kind.value,
        "tokens": layout.tokens,
        "block_bytes": layout.block_bytes,
        "record_bytes": group.record(layout).nbytes,
        "fingerprint": layout.fingerprint,
        "planes": planes,
    }
