"""A tokenizer read from its files, for workers that must start without torch (transformers imports it).

Gives the same ids, text and fingerprint as `models.tokenizer`, for models with a tokenizer.json, which all recent ones
have. Where transformers would build a tokenizer from other files, this module still reads tokenizer.json.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken, Tokenizer

from stillhouse.models.chat_template import Templates, read_templates, render, template_for
from stillhouse.models.files import TokenizerError, model_file, stop_ids
from stillhouse.protocol.handshake import vocab_fingerprint

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
            self.backend_tokenizer: Final = Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises Exception itself
            raise TokenizerError(f"{file} does not load: {error}") from error
        self.backend_tokenizer.no_truncation()
        self.backend_tokenizer.no_padding()
        config = _json(path, "tokenizer_config.json")
        if "added_tokens_decoder" not in config:  # else transformers reads neither of these two
            config |= _json(path, "special_tokens_map.json")
            config["added_tokens_decoder"] = _older_added_tokens(_json(path, "added_tokens.json"), config)
        self.special_tokens_map = {name: _content(token) for name, token in _named_tokens(config).items()}
        self.all_special_tokens: Final[list[str]] = list(
            dict.fromkeys([*self.special_tokens_map.values(), *_extra_tokens(config)])
        )
        self._add_missing(config)
        self.chat_template: Final[Templates] = read_templates(path, config)

    def get_vocab(self) -> dict[str, int]:
        return self.backend_tokenizer.get_vocab(with_added_tokens=True)

    def get_added_vocab(self) -> dict[str, int]:
        return {token.content: i for i, token in sorted(self.backend_tokenizer.get_added_tokens_decoder().items())}

    @property
    def fingerprint(self) -> str:
        """Same as `models.tokenizer.token_map_fingerprint`."""
        return vocab_fingerprint(self.get_vocab())

    @cached_property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Same as `models.tokenizer.stop_token_ids`. Raises TokenizerError when there is none."""
        file = "generation_config.json" if model_file(self._path, "generation_config.json") else "config.json"
        eos = (
            self.backend_tokenizer.token_to_id(self.special_tokens_map["eos_token"])
            if "eos_token" in self.special_tokens_map
            else None
        )
        config = _json(self._path, file)
        own = config.get("eos_token_id")
        return stop_ids(self._path, config.get("text_config", {}).get("eos_token_id") if own is None else own, eos)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return self.backend_tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        tokenize: bool,
        add_generation_prompt: bool,
        chat_template: str | None = None,
        **template_kwargs: Any,
    ) -> str:
        """The rendered text; `chat_template`: the name of one of several. Raises what `models.chat_template.render`
        does, TokenizerError where no template is for this conversation, and ValueError for tokenize=True."""
        if tokenize:
            raise ValueError("chat templates are rendered to text here, not to ids; got tokenize=True")
        template = template_for(self.chat_template, tools, chat_template) or ""
        values = {**self.special_tokens_map, **template_kwargs}
        return render(template, messages, tools, values, opened=add_generation_prompt)

    def _add_missing(self, config: dict[str, Any]) -> None:
        """Add tokens that are only in tokenizer_config.json, in the order in which transformers adds them."""
        known = {token.content for token in self.backend_tokenizer.get_added_tokens_decoder().values()}
        listed = config["added_tokens_decoder"]
        tokens = [
            AddedToken(**{key: value for key, value in listed[i].items() if key != "__type"})
            for i in sorted(listed, key=int)
        ]
        tokens += [AddedToken(text, special=True, normalized=False) for text in self.all_special_tokens]
        for token in tokens:
            if token.content not in known:
                self.backend_tokenizer.add_tokens([token])
                known.add(token.content)


def spread(ids: Sequence[int], most: int) -> Sequence[int]:
    """At most so many of the ids, at equal distances."""
    return ids[:: max(1, -(-len(ids) // most))]


def bare(text: str) -> str:
    """The text of a token without white space, which servers normalise."""
    return "".join(text.split())


def _json(path: str | Path, filename: str) -> dict[str, Any]:
    file = model_file(path, filename)
    if file is None:
        return {}
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{file} does not load: {error}") from error


def _content(token: str | dict[str, Any]) -> str:
    return token if isinstance(token, str) else token["content"]


def _named_tokens(config: dict[str, Any]) -> dict[str, Any]:
    """Special tokens with a name, which templates may read, such as image_token."""
    named = {name: config[name] for name in _NAMED if config.get(name) is not None}
    named |= {name: token for name, token in config.items() if name.endswith("_token") and isinstance(token, str)}
    extra = config.get(_EXTRA[0])
    return named | extra if isinstance(extra, dict) else named


def _older_added_tokens(added: dict[str, int], config: dict[str, Any]) -> dict[str, Any]:
    """Those of added_tokens.json, as tokenizer_config.json has them today."""
    special = {_content(token) for token in _named_tokens(config).values()} | set(_extra_tokens(config))
    return {
        str(i): {"content": text, "special": text in special, "normalized": text not in special}
        for text, i in added.items()
    }


def _extra_tokens(config: dict[str, Any]) -> list[str]:
    found: list[str] = []
    for name in _EXTRA:
        listed = config.get(name) or []
        found += [_content(token) for token in (listed.values() if isinstance(listed, dict) else listed)]
    return found
