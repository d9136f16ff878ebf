"""`disagg doctor`: does what serves each codec on this machine compute what it should?

Exit status 1 if anything does not.
"""

from dataclasses import asdict

import typer
from typer import Option

from disagg.cli import options
from disagg.cli.codecs import HeadDim, Specs
from disagg.cli.output import print_json, print_table, stages

HEADS = 2
COLUMNS = ["codec", "kernel", "backend", ">error", ">bound", ">first ms", ">ms", ""]


def doctor(
    specs: Specs = None,
    device: str = Option("auto", help="auto, cpu or cuda."),
    head_dim: HeadDim = 128,
    as_json: options.Json = False,
) -> None:
    """Hold every kernel of every codec against its reference."""
    with stages() as say:
        say("loading torch and the codecs")
        from disagg.codecs.registry import codec_names, get_codec
        from disagg.model.runner import pick_device
        from disagg.paged.doctor import examine, name_of

        where, found = pick_device(device), []
        for spec in specs or ():
            get_codec(spec, head_dim)  # its errors now
        for spec in specs or codec_names(head_dim):
            say(f"{spec} on {where}")
            found += examine(spec, HEADS, head_dim, where)
    sound = all(x.sound for x in found)
    if as_json:
        rows = [asdict(x) | {"sound": x.sound} for x in found]
        print_json(
            {"device": where, "name": name_of(where), "sound": sound, "rows": rows}
        )
    else:
        cells = [
            [x.codec, x.kernel, x.backend]
            + [f"{y:.2g}" for y in (x.error, x.bound)]
            + [f"{y:.1f}" for y in (x.first_ms, x.ms)]
            + [x.failure or ("" if x.sound else "WRONG")]
            for x in found
        ]
        print_table(f"{where}: {name_of(where)}", COLUMNS, cells)
    if not sound:
        raise typer.Exit(1)
