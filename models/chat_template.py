"""Chat templates without transformers: which of a tokenizer's templates counts, and how it is rendered. No torch.

A tokenizer has one template, or several by name: then `tool_use` is for conversations with tools and `default` for all
others, as transformers has it. The argument `chat_template` names another one."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, TypeAlias, cast

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from stillhouse.models.files import TokenizerError, first_line, model_file

Templates: TypeAlias = str | dict[str, str] | None
"""A chat template, several by name, or none."""
DEFAULT, WITH_TOOLS = "default", "tool_use"
BY_NAME: Final = "chat_template"
"""Argument that names one of several templates."""
_FOLDER: Final = "additional_chat_templates"
_NOT_KWARGS: Final = {
    *("messages", "tools", "documents", "add_generation_prompt"),
    *("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"),
}
"""Names that `apply_chat_template` itself hands to a template. Special tokens are the tokenizer's alone."""
_REASONING: Final = ("reasoning_content", "thinking", "reasoning")
"""Names under which a message's reasoning is found; the first is the one that most templates read."""


def read_templates(path: str | Path, config: Mapping[str, Any]) -> Templates:
    """The templates of a model. `config`: its tokenizer_config.json. Raises TokenizerError."""
    named = {DEFAULT: "chat_template.jinja", WITH_TOOLS: f"{_FOLDER}/{WITH_TOOLS}.jinja"}
    files = {name: found for name, file in named.items() if (found := model_file(path, file)) is not None}
    if (tokenizer := model_file(path, "tokenizer.json")) is not None:
        files = {file.stem: file for file in sorted((tokenizer.parent / _FOLDER).glob("*.jinja"))} | files
    given: Any = {name: file.read_text(encoding="utf-8") for name, file in files.items()}
    if not given:
        given = config.get("chat_template") or {}
    if isinstance(given, list):
        given = {entry["name"]: entry["template"] for entry in cast("list[dict[str, str]]", given)}
    if not given:
        return None
    return given[DEFAULT] if list(given) == [DEFAULT] else given


def template_for(templates: Templates, tools: Sequence[Any] | None, name: object = None) -> str | None:
    """The template of a conversation with these tools, or the one of this name. Raises TokenizerError where there is
    none."""
    if name is not None:
        known = templates if isinstance(templates, dict) else {}
        if not isinstance(name, str) or name not in known:
            raise TokenizerError(
                f"chat_template_kwargs: 'chat_template': got {name!r:.80}, expected the name of one of the model's "
                f"templates, {', '.join(sorted(known)) or 'of which none has a name'}: files {_FOLDER}/NAME.jinja"
            )
        return known[name]
    if not isinstance(templates, dict):
        return templates
    for name in (DEFAULT,) if tools is None else (WITH_TOOLS, DEFAULT):
        if name in templates:
            return templates[name]
    raise TokenizerError(
        f"the tokenizer has the chat templates {sorted(templates)}, expected one that is called {DEFAULT!r}"
    )


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    values: Mapping[str, Any],
    *,
    opened: bool,
) -> str:
    """The text of a conversation, as `apply_chat_template` of transformers makes it. `values`: special tokens and
    arguments. `opened`: with the opening of the next answer. Raises jinja2's TemplateError, and what a template may."""
    return _compiled(template).render(
        messages=[_as_templates_read_it(message) for message in messages],
        tools=tools,
        documents=None,
        add_generation_prompt=opened,
        **values,
    )


@lru_cache
def template_variables(template: str) -> frozenset[str]:
    """Names that a chat template reads, besides those that it sets itself. Raises jinja2's TemplateError."""
    environment = _environment()
    return frozenset(meta.find_undeclared_variables(environment.parse(template)) - set(environment.globals))


def expect_read(templates: Templates, given: Mapping[str, Any]) -> None:
    """Raise TokenizerError for an argument that the chat template (or one of several by name) does not read: to hand it
    over would change nothing, or how templates are applied. `tools` may be among them, and the name of a template."""
    if templates is None:
        raise TokenizerError(f"{', '.join(given)}: only a chat template reads this, got a tokenizer without one")
    named = template_for(templates, None, given[BY_NAME]) if BY_NAME in given else None
    texts = [named] if named else [templates] if isinstance(templates, str) else templates.values()
    try:
        read = frozenset[str]().union(*map(template_variables, texts))
    except jinja2.TemplateError as error:
        raise TokenizerError(f"the chat template cannot be read: {first_line(error)}") from error
    kwargs = sorted(read - _NOT_KWARGS)
    for name in given:
        if name == BY_NAME:
            continue
        if name != "tools" and name not in kwargs:
            near = difflib.get_close_matches(name[:80], kwargs, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"it reads {', '.join(kwargs) or 'no arguments'}"
            raise TokenizerError(f"chat_template_kwargs: the chat template does not read {name!r:.80}; {hint}")
        if name not in read:
            raise TokenizerError(
                "the chat template shows no tools, got a row with 'tools'; describe them in the prompt"
            )


@lru_cache
def literal_text(template: str) -> str:
    """All text that a template itself may write, in pieces that a NUL separates. Raises jinja2's TemplateError."""
    tree = _environment().parse(template)
    pieces = [node.data for node in tree.find_all(nodes.TemplateData)]
    pieces += [node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)]
    return "\0".join(pieces)


def _as_templates_read_it(message: Mapping[str, Any]) -> dict[str, Any]:
    """Without keys that are null, which templates would show as None; the reasoning under the names they know."""
    said = {key: value for key, value in message.items() if value is not None}
    reasoning = next((said[name] for name in _REASONING if name in said), None)
    return said if reasoning is None else {"thinking": reasoning, **said, "reasoning_content": reasoning}


@lru_cache
def _compiled(template: str) -> jinja2.Template:
    return _environment().from_string(template)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    cast("dict[str, Any]", environment.globals).update(raise_exception=_raise, strftime_now=_now)
    return environment


class _GenerationTag(Extension):
    """`{% generation %} ... {% endgeneration %}` marks the assistant's text; rendered like any other text."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
