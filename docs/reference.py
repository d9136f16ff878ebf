"""Write docs/settings.md and docs/commands.md from the code that they describe.

python docs/reference.py          # writes both pages
python docs/reference.py --check  # exits 1 if a page is out of date
"""

import dataclasses
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import click
from typer.main import get_command

from disagg.cli.app import app
from disagg.config import Config

DOCS = Path(__file__).resolve().parent
SETTINGS_HEAD = """# Settings

Every setting with its default, from `disagg/config.py`. A YAML file
(`disagg serve --config service.yaml`) overrides defaults, and flags
(`--set engine.max_sequences=8`) override the file. `disagg serve --show-config` prints the
values in force. An unknown key is an error that lists the known ones. The words are those of the
[glossary](architecture.md#glossary).

```yaml
# service.yaml
codec: banded:bits=3
model: {name: /models/llama-8b}
cluster: {prefill: 2, decode: 4}
```
"""
COMMANDS_HEAD = """# Commands

Every command with its options, as `--help` prints them. `--json` prints one JSON object instead
of text. Exit codes are those of the [error table](api.md#errors).
"""


def settings() -> str:
    """The page of settings: a section for each part of the configuration."""
    lines = [SETTINGS_HEAD]
    scalars = [x for x in dataclasses.fields(Config) if not is_section(x)]
    lines += section("Codecs", "", type(Config()), scalars, Config())
    for field in dataclasses.fields(Config):
        if is_section(field):
            part = getattr(Config(), field.name)
            fields = list(dataclasses.fields(part))
            lines += section(field.name, f"{field.name}.", type(part), fields, part)
    return "\n".join(lines)


def is_section(field: dataclasses.Field) -> bool:
    return dataclasses.is_dataclass(getattr(Config(), field.name))


def section(
    title: str,
    prefix: str,
    kind: type,
    fields: list[dataclasses.Field],
    defaults: object,
) -> list[str]:
    """A heading, the first line of the docstring, and a table row per setting."""
    docstring = inspect.getdoc(kind) or ""
    texts = dict(entries(docstring))
    lines = [f"## {title}", "", docstring.splitlines()[0], ""]
    lines += ["| setting | default | meaning |", "|---|---|---|"]
    for field in fields:
        default = getattr(defaults, field.name)
        shown = "null" if default is None else str(default).lower()
        if isinstance(default, str):
            shown = default
        text = as_yaml(texts.get(field.name, "")).replace("|", "\\|")
        escaped = shown.replace("|", "\\|")
        lines.append(f"| `{prefix}{field.name}` | `{escaped}` | {text} |")
    return [*lines, ""]


def as_yaml(text: str) -> str:
    """A text about Python values in the words of YAML."""
    return re.sub(r"\bNone\b", "null", re.sub(r"\bFalse\b", "false", text))


def entries(docstring: str) -> Iterator[tuple[str, str]]:
    """Every "name: text" of a docstring, with the lines that continue it; "a, b: text" is two."""
    names: list[str] = []
    words: list[str] = []
    for line in [*docstring.splitlines(), "end: "]:
        head = re.match(r"([a-z_]+(?:, [a-z_]+)*): +(.*)|(end): $", line)
        if head is None:
            words.append(line.strip())
            continue
        for name in names:
            yield name, " ".join(words).strip()
        names = (head[1] or "").split(", ")
        words = [head[2] or ""]


def commands() -> str:
    """The page of commands: usage, what it does, a table of its options."""
    lines = [COMMANDS_HEAD]
    for name, command in walk(get_command(app), "disagg"):
        context = click.Context(command, info_name=name)
        usage = " ".join(command.collect_usage_pieces(context))
        lines += [f"## {name}", "", "```", f"{name} {usage}", "```", ""]
        lines += [inspect.cleandoc(command.help or ""), ""]
        rows = list(options(command, context))
        if rows:
            lines += ["| option | default | meaning |", "|---|---|---|", *rows, ""]
    return "\n".join(lines)


def walk(command: click.Command, name: str) -> Iterator[tuple[str, click.Command]]:
    """Every command that does something, with its full name."""
    if not hasattr(command, "commands"):
        yield name, command
        return
    for part, child in command.commands.items():
        if not child.hidden:
            yield from walk(child, f"{name} {part}")


def options(command: click.Command, context: click.Context) -> Iterator[str]:
    """A table row for each visible option of a command."""
    for parameter in command.get_params(context):
        help_text = getattr(parameter, "help", None) or ""
        if getattr(parameter, "hidden", False) or "--help" in parameter.opts:
            continue
        names = ", ".join(f"`{name}`" for name in names_of(parameter))
        default = parameter.default
        is_plain = isinstance(default, str | int | float) and not isinstance(
            default, bool
        )
        shown = f"`{default}`" if is_plain else ""
        text = help_text.replace("|", "\\|").replace("\n", " ")
        yield f"| {names} | {shown} | {text} |"


def names_of(parameter: click.Parameter) -> list[str]:
    """The names of an option, or the placeholder of a positional argument."""
    if parameter.param_type_name == "argument":
        return [(parameter.metavar or parameter.name.upper()).strip("[]")]
    return [*parameter.opts, *parameter.secondary_opts]


def main(check: bool) -> int:
    pages = {"settings.md": settings(), "commands.md": commands()}
    stale = [name for name, text in pages.items() if not is_current(DOCS / name, text)]
    if check and stale:
        print(
            f"out of date: {', '.join(stale)}; run python docs/reference.py",
            file=sys.stderr,
        )
        return 1
    if not check:
        for name, text in pages.items():
            (DOCS / name).write_text(text)
    return 0


def is_current(file: Path, text: str) -> bool:
    return file.exists() and file.read_text() == text


if __name__ == "__main__":
    sys.exit(main(check="--check" in sys.argv))
