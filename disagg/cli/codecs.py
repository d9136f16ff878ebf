"""`disagg codecs` and `disagg page`: sizes of codecs, and the layout of their pages."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from disagg.cli import options
from disagg.cli.output import print_json, print_table
from disagg.config import AUTO

if TYPE_CHECKING:
    from disagg.kv.page import Layout
    from disagg.kv.plan import LayerGroup

HeadDim = Annotated[int, Option(min=1, help="Head dimension.")]
Specs = Annotated[
    list[str] | None, Argument(help="Codec specs; by default every codec.")
]
Spec = Annotated[str, Argument(help='Codec spec, "kivi:bits=2", or a plan.')]


def codecs(
    specs: Specs = None,
    heads: int = Option(8, min=1, help="Number of KV heads."),
    head_dim: HeadDim = 128,
    tokens: int = Option(2048, min=1, help="Prompt length."),
    as_json: options.Json = False,
) -> None:
    """List codecs: options, page size, and size relative to fp16."""
    from disagg.codecs.describe import describe, describe_all, measured_costs
    from disagg.codecs.registry import codec_names

    rows = [describe(spec, heads, head_dim, tokens) for spec in specs or []]
    rows = rows or list(describe_all(heads, head_dim, tokens))
    if as_json:
        print_json([asdict(row) for row in rows])
        return
    columns = [
        "codec",
        ">bits",
        ">page tokens",
        ">page bytes",
        ">segment",
        ">% of fp16",
    ]
    columns += [">perplexity %", ">KL", "spec"]
    cells = [
        [
            row.name,
            f"{row.bits_per_element:.2f}",
            str(row.page_tokens),
            f"{row.page_bytes:,}",
            f"{row.segment_bytes:,}",
            f"{row.fp16_pct:.1f}",
            "" if row.ppl_pct is None else f"{row.ppl_pct:+.2f}",
            "" if row.kl is None else f"{row.kl:.4f}",
            row.spec,
        ]
        for row in rows
    ]
    title = f"{heads} KV heads of {head_dim}, {tokens} tokens; perplexity and KL as measured on "
    print_table(title + measured_costs()["model"], columns, cells)
    unsupported = sorted(set(codec_names()) - set(codec_names(head_dim)))
    if unsupported and not specs:
        print(f"not for a head dim of {head_dim}: {', '.join(unsupported)}")


def page(
    spec: Spec, model: options.Model = None, as_json: options.Json = False
) -> None:
    """Show the byte layout of a codec's pages for a model."""
    layouts = layouts_of(spec, model)
    if as_json:
        print_json(layouts)
        return
    for group in layouts["groups"]:
        _draw(group)


def layouts_of(spec: str, model: str | None) -> dict[str, Any]:
    """Every layout of every layer group of a model's KV, with its planes, as plain values."""
    from disagg.codecs.planning import parse_plan
    from disagg.model.capacity import kv_shape
    from disagg.model.describe import describe_model

    plan = parse_plan(spec, kv_shape(describe_model(model), AUTO))
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


def _layout(group: "LayerGroup", layout: "Layout") -> dict[str, Any]:
    planes = [
        asdict(plane) | {"shape": list(plane.shape), "bytes": plane.nbytes}
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


def _draw(group: dict[str, Any]) -> None:
    print(f"layers {group['layers']} · {group['codec']} · {group['heads']} KV heads")
    for layout in group["layouts"]:
        title = (
            f"{layout['kind']}: {layout['tokens']} tokens, {layout['block_bytes']:,} bytes a block,"
            f" {layout['record_bytes']:,} a record · {layout['fingerprint']}"
        )
        rows = [
            [str(plane[key]) for key in ("name", "dtype", "shape", "offset", "bytes")]
            for plane in layout["planes"]
        ]
        print_table(title, ["plane", "dtype", "shape", ">offset", ">bytes"], rows)
