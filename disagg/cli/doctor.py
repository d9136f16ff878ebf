"""`disagg doctor`: compare the kernels of this machine with their references.

Exit status 1 if one of them is wrong.
"""

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import typer
from typer import Option

from disagg.cli import options
from disagg.cli.codecs import HeadDim, Specs
from disagg.cli.output import print_json, print_table, stages

if TYPE_CHECKING:
    from disagg.paged.doctor import Finding

HEADS = 2
COLUMNS = ["codec", "kernel", "backend", ">error", ">bound", ">first ms", ">ms", ""]
LEGEND = (
    "encode: a prompt into pages; append: decoded tokens until a page is sealed; attend: one "
    "query; replay: several queries\n"
    "error is relative to the reference; first ms includes compiling"
)


def doctor(
    specs: Specs = None,
    device: str = Option("auto", help="auto, cpu or cuda."),
    head_dim: HeadDim = 128,
    latent: int = Option(
        0,
        min=0,
        help="For latent attention (MLA): the channels of K that are V too.",
    ),
    as_json: options.Json = False,
) -> None:
    """Check every kernel of this machine against its reference."""
    with stages() as report:
        report("loading torch and the codecs")
        from disagg.codecs.contract import LATENT_CODECS
        from disagg.codecs.registry import codec_names, get_codec
        from disagg.model.cpu import has_bfloat16_units
        from disagg.model.runner import pick_device
        from disagg.paged.doctor import examine, name_of

        device = pick_device(device)
        for spec in specs or ():
            get_codec(spec, head_dim)  # raises for a wrong spec before anything runs
        names = LATENT_CODECS if latent else codec_names(head_dim)
        findings: list[Finding] = []
        for spec in specs or names:
            report(f"{spec} on {device}")
            findings += examine(spec, HEADS, head_dim, device, latent=latent or None)
    name = name_of(device)
    if as_json:
        rows = [{**asdict(finding), "sound": finding.sound} for finding in findings]
        result = {"device": device, "name": name, "sound": is_sound(findings)}
        print_json(result | {"rows": rows, "cpu_bfloat16_units": has_bfloat16_units()})
    else:
        if device == "cpu":
            name += ", bf16 units" if has_bfloat16_units() else ", no bf16 units"
        print_findings(f"{device}: {name}", findings)
    if not is_sound(findings):
        raise typer.Exit(1)


def print_findings(title: str, findings: "Sequence[Finding]") -> None:
    """A table of all kernels, and the verdict."""
    print_table(title, COLUMNS, [row_of(finding) for finding in findings])
    print(LEGEND)
    print(verdict(findings))


def is_sound(findings: "Sequence[Finding]") -> bool:
    """Whether all kernels are within their bounds."""
    return all(finding.sound for finding in findings)


def row_of(finding: "Finding") -> list[str]:
    """A line of the table."""
    return [
        finding.codec,
        finding.kernel,
        finding.backend,
        f"{finding.error:.2g}",
        f"{finding.bound:.2g}",
        f"{finding.first_ms:.1f}",
        f"{finding.ms:.1f}",
        finding.failure or ("ok" if finding.sound else "WRONG"),
    ]


def verdict(findings: "Sequence[Finding]") -> str:
    """One line that says whether this machine may serve."""
    wrong = [finding for finding in findings if not finding.sound]
    count = (
        f"{len(findings) - len(wrong)} of {len(findings)} kernels within their bounds"
    )
    if not wrong:
        return f"sound: {count}"
    names = ", ".join(f"{finding.codec} {finding.kernel}" for finding in wrong)
    return f"NOT SOUND: {count}; wrong: {names}"
