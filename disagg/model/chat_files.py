"""The chat template of a model's folder, found as transformers' AutoTokenizer finds it.

Reads files only and does not import transformers, so that a template can be checked before a
service starts.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser

from disagg.errors import ConfigError, ModelError
from disagg.model.describe import locate_model
from disagg.model.json_file import read_object

DEFAULT = "default"  # of several templates, the name of the one to use
# what transformers passes to every template
PASSED = {"messages", "tools", "documents", "add_generation_prompt"}
# variables of Jinja's loops and macros, and functions of transformers
PREDEFINED = {
    "loop",
    "caller",
    "varargs",
    "kwargs",
    "self",
    "raise_exception",
    "strftime_now",
    *jinja2.defaults.DEFAULT_NAMESPACE,
}


@dataclass(frozen=True)
class TemplateSource:
    """A chat template. words: the special tokens that it may name, such as "bos_token"."""

    text: str
    words: Mapping[str, str]

    @property
    def undefined_words(self) -> list[str]:
        """Variables that the template uses although nothing defines them.

        They are empty, unless a request sets them in `chat_template_kwargs`. Variables that the
        template tests first (`{% if tools %}`, `is defined`, `default`) are not among them.
        """
        tree = parse(self.text)
        names = list(tree.find_all(nodes.Name))
        read = {name.name for name in names if name.ctx == "load"}
        own = {name.name for name in names if name.ctx != "load"}
        own.update(macro.name for macro in tree.find_all(nodes.Macro))
        defined = own | PASSED | PREDEFINED | {*self.words}
        return sorted(read - defined - _optional(tree))


def read_template(
    ref: str | None = None, file: str | None = None
) -> TemplateSource | None:
    """The chat template of a model that `locate_model` finds; None if it has none.

    file: a template in place of the model's: Jinja, or JSON with the key "chat_template"

    ModelError for a template that cannot be used; ConfigError for such a file.
    """
    folder = locate_model(ref)
    config = read_object(folder / "tokenizer_config.json")
    words = _special_words(folder, config)
    if file is not None:
        try:
            return _checked(_read_file(Path(file)), words, file)
        except ModelError as error:
            raise ConfigError(f"server.chat_template: {error}") from error
    templates = _templates(folder, config)
    if not templates:
        return None
    return _checked(_default(templates, folder), words, folder)


def _checked(text: str, words: Mapping[str, str], place: str | Path) -> TemplateSource:
    try:
        parse(text)
    except RecursionError as error:
        raise ModelError(f"the chat template of {place} is nested too deep") from error
    except jinja2.TemplateSyntaxError as error:
        raise ModelError(
            f"the chat template of {place} is not Jinja, line {error.lineno}: {error.message}"
        ) from error
    return TemplateSource(text, words)


def _templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """By name. Separate files go first; if none is the default, the config may have one."""
    templates = _jinja_files(folder)
    if DEFAULT not in templates:
        file = folder / "tokenizer_config.json"
        templates = {**_named(config.get("chat_template"), file), **templates}
    return templates or _from_processor(folder)


def _jinja_files(folder: Path) -> dict[str, str]:
    files = {
        file.stem: file
        for file in sorted((folder / "additional_chat_templates").glob("*.jinja"))
    }
    main = folder / "chat_template.jinja"
    if main.is_file():
        files[DEFAULT] = main
    texts = {name: _read_text(file) for name, file in files.items()}
    return {name: text for name, text in texts.items() if text}


def _from_processor(folder: Path) -> dict[str, str]:
    """Templates of a model that also reads images, where AutoProcessor finds them."""
    for name in ("chat_template.json", "processor_config.json"):
        file = folder / name
        templates = _named(read_object(file).get("chat_template"), file)
        if templates:
            return templates
    return {}


def _named(value: Any, file: Path) -> dict[str, str]:
    """Templates by name: from a text, an object, or a list of objects with name and template."""
    if value is None:
        return {}
    if isinstance(value, str):
        value = {DEFAULT: value}
    try:
        if isinstance(value, list):
            value = {each["name"]: each["template"] for each in value}
        texts = list(value.values())
    except (TypeError, KeyError, AttributeError) as error:
        raise ModelError(f"the chat template in {file} is not text") from error
    if not all(isinstance(text, str) for text in texts):
        raise ModelError(f"a chat template in {file} is not text")
    return {name: text for name, text in value.items() if text}


def _default(templates: Mapping[str, str], folder: Path) -> str:
    """The one named "default", else the only one; ModelError where neither decides."""
    if DEFAULT in templates:
        return templates[DEFAULT]
    if len(templates) == 1:
        return next(iter(templates.values()))
    names = ", ".join(sorted(templates))
    raise ModelError(
        f"{folder} has the chat templates {names}, and none is named default; "
        "choose a file with --chat-template"
    )


def _special_words(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """The special tokens by their names in the tokenizer's files, each a text or an object."""
    mapped = read_object(folder / "special_tokens_map.json")
    # as in transformers: the map wins if the config does not list added tokens
    is_old = "added_tokens_decoder" not in config
    sources = [config, mapped] if is_old else [mapped, config]
    words = {}
    for source in sources:
        for name, value in _token_fields(source):
            word = value.get("content") if isinstance(value, dict) else value
            if isinstance(word, str):
                words[name] = word
    return words


def _token_fields(source: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in source.items():
        if name.endswith("_token"):
            yield name, value
    extra = source.get("extra_special_tokens")
    if isinstance(extra, dict):
        yield from extra.items()


def _read_file(file: Path) -> str:
    text = _read_text(file)
    if file.suffix != ".json":
        return text
    try:
        templates = _named(json.loads(text).get("chat_template"), file)
    except (ValueError, AttributeError) as error:
        raise ModelError(f"{file} is not a JSON object: {error}") from error
    if not templates:
        raise ModelError(f"{file} has no key chat_template")
    return _default(templates, file)


def _read_text(file: Path) -> str:
    try:
        return file.read_text("utf-8")
    except OSError as error:
        raise ModelError(f"cannot read {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ModelError(f"{file} is not text: {error}") from error


class _GenerationTag(Extension):
    """`{% generation %}` marks for training what an assistant says; it changes no text."""

    tags = {"generation"}  # noqa: RUF012 - declared so by the base class

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def parse(text: str) -> nodes.Template:
    """The tree of a template; TemplateSyntaxError for one that is not Jinja."""
    extensions: list[str | type[Extension]] = [
        "jinja2.ext.loopcontrols",
        _GenerationTag,
    ]
    return jinja2.Environment(extensions=extensions).parse(text)


def _optional(tree: nodes.Template) -> set[str]:
    """Variables that a template tests before it uses them."""
    asking: list[nodes.Node] = []
    for test in tree.find_all(nodes.Test):
        if test.name in ("defined", "undefined"):
            asking.append(test.node)
    for filtered in tree.find_all(nodes.Filter):
        if filtered.name in ("default", "d") and filtered.node is not None:
            asking.append(filtered.node)
    for statement in tree.find_all(nodes.If):
        asking += _conditions(statement.test)
    for expression in tree.find_all(nodes.CondExpr):
        asking += _conditions(expression.test)
    return {node.name for node in asking if isinstance(node, nodes.Name)}


def _conditions(test: nodes.Node) -> list[nodes.Node]:
    """The parts of a condition that `and`, `or` and `not` join."""
    if isinstance(test, nodes.And | nodes.Or):
        return _conditions(test.left) + _conditions(test.right)
    if isinstance(test, nodes.Not):
        return _conditions(test.node)
    return [test]
