"""A tokenizer read from its files, for workers that must start without torch (transformers imports it).

Gives the same ids, text and fingerprint as `models.tokenizer`, for models with a tokenizer.json, which all recent ones
have. Where transformers would build a tokenizer from other files, this module still reads tokenizer.json.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Final, cast

import jinja2
from jinja2 import meta
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Tokenizer

from models.files import TokenizerError, model_file, stop_ids
from protocol.handshake import vocab_fingerprint

_NAMED: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_EXTRA: Final = ("extra_special_tokens", "additional_special_tokens")


class FileTokenizer:
    """The part of a Hugging Face tokenizer that workers use, under the same names."""

    def __init__(self, path: str | Path) -> None:
        """`path`: a model folder or a hub name. Raises TokenizerError."""
        self._path = path
        file = model_file(path, "tokenizer.json")
        if file is None:
            raise TokenizerError(
                f"{str(path)!r} has no tokenizer.json, which workers on SGLang read; make a folder that has one with "
                "transformers: AutoTokenizer.from_pretrained(...).save_pretrained(...)"
            )
        try:
            self._tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises Exception itself
            raise TokenizerError(f"{file} does not load: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        config = {**_json(path, "special_tokens_map.json"), **_json(path, "tokenizer_config.json")}
        self._named = {name: _content(config[name]) for name in _NAMED if config.get(name) is not None}
        self.all_special_tokens: Final[list[str]] = list(dict.fromkeys([*self._named.values(), *_extra_tokens(config)]))
        self._add_missing(config)
        self.chat_template: Final = _chat_template(path, config)

    def get_vocab(self) -> dict[str, int]:
        return self._tokenizer.get_vocab(with_added_tokens=True)

    def get_added_vocab(self) -> dict[str, int]:
        return {token.content: i for i, token in sorted(self._tokenizer.get_added_tokens_decoder().items())}

    @property
    def fingerprint(self) -> str:
        """Same as `models.tokenizer.token_map_fingerprint`."""
        return vocab_fingerprint(self.get_vocab())

    @cached_property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Same as `models.tokenizer.stop_token_ids`. Raises TokenizerError when there is none."""
        file = "generation_config.json" if model_file(self._path, "generation_config.json") else "config.json"
        eos = self._tokenizer.token_to_id(self._named["eos_token"]) if "eos_token" in self._named else None
        return stop_ids(self._path, _json(self._path, file).get("eos_token_id"), eos)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        tokenize: bool,
        add_generation_prompt: bool,
        **template_kwargs: Any,
    ) -> str:
        """The rendered text. Raises jinja2's TemplateError, and ValueError for tokenize=True."""
        if tokenize:
            raise ValueError("chat templates are rendered to text here, not to ids; got tokenize=True")
        return self._template.render(
            messages=messages,
            tools=tools,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **{**self._named, **template_kwargs},
        )

    @cached_property
    def _template(self) -> jinja2.Template:
        return _template_environment().from_string(self.chat_template or "")

    def _add_missing(self, config: dict[str, Any]) -> None:
        """Add tokens that are only in tokenizer_config.json, in the order in which transformers adds them."""
        known = {token.content for token in self._tokenizer.get_added_tokens_decoder().values()}
        listed = config.get("added_tokens_decoder", {})
        tokens = [
            AddedToken(**{key: value for key, value in listed[i].items() if key != "__type"})
            for i in sorted(listed, key=int)
        ]
        tokens += [AddedToken(text, special=True, normalized=False) for text in self.all_special_tokens]
        for token in tokens:
            if token.content not in known:
                self._tokenizer.add_tokens([token])
                known.add(token.content)


@lru_cache
def template_variables(template: str) -> frozenset[str]:
    """Names that a chat template reads, besides those that it sets itself. Raises jinja2's TemplateError."""
    environment = _template_environment()
    return frozenset(meta.find_undeclared_variables(environment.parse(template)) - set(environment.globals))


def _template_environment() -> ImmutableSandboxedEnvironment:
    """The same as transformers makes for chat templates."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    cast("dict[str, Any]", environment.globals).update(raise_exception=_raise, strftime_now=_now)
    return environment


class _GenerationTag(Extension):
    """`{% generation %} ... {% endgeneration %}` marks the assistant's text; rendered like any other text."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: object, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _json(path: str | Path, filename: str) -> dict[str, Any]:
    """The file's content; empty where the model has no such file."""
    file = model_file(path, filename)
    if file is None:
        return {}
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{file} does not load: {error}") from error


def _content(token: str | dict[str, Any]) -> str:
    return token if isinstance(token, str) else token["content"]


def _extra_tokens(config: dict[str, Any]) -> list[str]:
    found: list[str] = []
    for name in _EXTRA:
        listed = config.get(name) or []
        found += [_content(token) for token in (listed.values() if isinstance(listed, dict) else listed)]
    return found


def _chat_template(path: str | Path, config: dict[str, Any]) -> str | None:
    file = model_file(path, "chat_template.jinja")
    if file is not None:
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template") or _json(path, "chat_template.json").get("chat_template")
    if isinstance(template, list):
        return {entry["name"]: entry["template"] for entry in cast("list[dict[str, str]]", template)}.get("default")
    return template
