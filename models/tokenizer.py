"""Tokenizers: loading, stop tokens, the fingerprint that peers compare, and rendering prompts to token ids.

Chat templates are applied only here, once per prompt, by the learner; every other role gets token ids. Needs
transformers, and so torch; workers that start without torch use `models.tokenizer_file`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal, Protocol, TypeAlias, cast

import numpy as np
import numpy.typing as npt
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from stillhouse.models.chat_template import expect_read
from stillhouse.models.chat_text import ChatTokenizer, conversation_text, prompt_ids, text_ids
from stillhouse.models.files import TokenizerError, first_line, model_file, model_source, stop_ids
from stillhouse.models.tokenizer_file import FileTokenizer
from stillhouse.protocol.handshake import vocab_fingerprint

ChatTemplateMode: TypeAlias = Literal["auto", "off"]
"""auto: a `prompt` becomes one user turn where the tokenizer has a chat template; off: it is tokenised unchanged."""

NO_KWARGS: Final[Mapping[str, Any]] = MappingProxyType({})
_PROBE: Final = "Hello world,  it's eBay in 2023: x = 1.\n\n\tna\u00efve \u6771\u4eac"
_log = logging.getLogger(__name__)


class Promptlike(Protocol):
    """The part of a record that `render_prompt` reads; exactly one of the two is not None."""

    @property
    def prompt(self) -> str | None: ...

    @property
    def messages(self) -> Sequence[Mapping[str, Any]] | None: ...


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder, or of a model hub name.

    Raises TokenizerError within seconds when there is none: wrong path (with the nearest name), a folder without
    tokenizer files, a hub name that is neither cached nor reachable, files that do not load."""
    name, local_only = model_source(path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, local_files_only=local_only, trust_remote_code=False)
    except Exception as error:  # tokenizers raises Exception itself for a file of a newer release
        raise TokenizerError(f"tokenizer of {name!r} does not load: {first_line(error)}") from error
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise TokenizerError(f"{name!r} gave a {type(tokenizer).__name__}, expected a Hugging Face tokenizer")
    if not _reads_as_its_file(path, tokenizer):
        _log.warning(
            "%s: transformers loads this tokenizer as %s, which gives text other ids than its tokenizer.json; it is "
            "taken as the file has it",
            name,
            type(tokenizer).__name__,
        )
        tokenizer = PreTrainedTokenizerFast.from_pretrained(name, local_files_only=local_only)
    tokenizer.clean_up_tokenization_spaces = False  # takes spaces out of what the student wrote
    tokenizer.split_special_tokens = False  # makes plain text of the chat template's tokens
    return tokenizer


def stop_token_ids(path: str | Path, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Ids that end a turn, ascending: those of generation_config.json (of config.json where it is missing, as
    `model.generate` does), and the tokenizer's own end-of-sequence token.

    Raises TokenizerError when there is none: every rollout would run into its length limit."""
    return stop_ids(path, _generation_eos(path), tokenizer.eos_token_id)


def token_map_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash of the token-to-id map, including added tokens: equal only if every token has the same id."""
    return vocab_fingerprint(tokenizer.get_vocab())


def render_prompt(
    tokenizer: PreTrainedTokenizerBase,
    record: Promptlike,
    system: str | None = None,
    *,
    chat_template: ChatTemplateMode = "auto",
    tools: Sequence[Mapping[str, Any]] | None = None,
    template_kwargs: Mapping[str, Any] = NO_KWARGS,
) -> npt.NDArray[np.int32]:
    """Token ids int32 [n_prompt] of one record, up to where the student starts to write.

    `messages` go through the chat template as they are; a `prompt` becomes one user turn (see `ChatTemplateMode`).
    `system` is prepended unless the messages already begin with a system turn. `tools` (JSON schemas of functions) and
    `template_kwargs` (e.g. enable_thinking) are handed to the template.

    Raises TokenizerError for: no template where one is needed, a prompt that was rendered before, messages that end
    with the answer, a template that refuses the messages or does not read what it is handed, and an empty result."""
    if record.messages is not None:
        turns = _with_system([dict(turn) for turn in record.messages], system)
        if not turns or turns[-1].get("role") == "assistant":
            raise TokenizerError(
                f"messages must end with the turn to be answered, got roles {[t.get('role') for t in turns]}; "
                "leave the answer out (ground_truth is the place for it)"
            )
    elif record.prompt is None:
        raise TokenizerError("a record needs a prompt or messages, got neither")
    else:
        turns = _with_system([{"role": "user", "content": record.prompt}], system)
    if record.prompt is None or (chat_template == "auto" and tokenizer.chat_template is not None):
        text = render_text(tokenizer, turns, chat_template, tools, template_kwargs, opened=True)
        ids = text_ids(as_chat_tokenizer(tokenizer), text)
        if record.prompt is not None:
            _refuse_second_rendering(tokenizer, record.prompt, ids)
        return _as_array(ids, record)
    if tools or template_kwargs:
        _expect_read(tokenizer, chat_template, tools, template_kwargs)
    if system is not None:
        raise TokenizerError(
            "a system prompt needs a chat template, got "
            + ("chat_template=off" if chat_template == "off" else "a tokenizer without one")
            + "; put the text into the prompts, or take the system prompt out"
        )
    return _as_array(prompt_ids(as_chat_tokenizer(tokenizer), record.prompt), record)


def as_chat_tokenizer(tokenizer: PreTrainedTokenizerBase) -> ChatTokenizer:
    """The tokenizer as `models.chat_text` takes it."""
    return cast(ChatTokenizer, tokenizer)


def render_text(
    tokenizer: PreTrainedTokenizerBase,
    turns: Sequence[Mapping[str, Any]],
    chat_template: ChatTemplateMode,
    tools: Sequence[Mapping[str, Any]] | None,
    template_kwargs: Mapping[str, Any],
    *,
    opened: bool,
) -> str:
    """A conversation as text for `models.chat_text.text_ids`, in which special tokens are text too. `opened`: with the
    opening of the next answer. Raises TokenizerError as `render_prompt` does."""
    if tools or template_kwargs:
        _expect_read(tokenizer, chat_template, tools, template_kwargs)
    if chat_template == "off" or tokenizer.chat_template is None:
        raise TokenizerError(
            "messages need a chat template, got "
            + (
                "chat_template=off; give text in the field 'prompt' instead"
                if chat_template == "off"
                else "a tokenizer without one, as base models have; put one into the model's folder as "
                "chat_template.jinja (docs/prompts.md), or give text in the field 'prompt' instead"
            )
        )
    return conversation_text(as_chat_tokenizer(tokenizer), turns, tools, template_kwargs, opened=opened)


def _reads_as_its_file(path: str | Path, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether text has the ids of tokenizer.json, by which models were trained, and by which `FileTokenizer` goes.
    transformers' classes for one family put rules and tokens of their own in place of the file's."""
    if type(tokenizer) is PreTrainedTokenizerFast or not hasattr(tokenizer, "backend_tokenizer"):
        return True
    found = model_file(path, "tokenizer.json")
    if found is None:
        return True
    file = FileTokenizer(found.parent)
    behind = f"x{next(iter(file.get_added_vocab()), '')}hello"
    try:
        return file.get_vocab() == tokenizer.get_vocab() and all(
            file.encode(text, add_special_tokens=False) == tokenizer.encode(text, add_special_tokens=False)
            for text in (_PROBE, " a", behind)
        )
    except Exception:  # tokenizers raises Exception itself
        return False


def _generation_eos(path: str | Path) -> object:
    name, local_only = model_source(path)
    try:
        return GenerationConfig.from_pretrained(name, local_files_only=local_only).eos_token_id
    except OSError:
        pass  # no generation_config.json: fall back to the model's config
    try:
        config = AutoConfig.from_pretrained(name, local_files_only=local_only, trust_remote_code=False)
        of_text = config.get_text_config() if getattr(config, "eos_token_id", None) is None else config
        return getattr(of_text, "eos_token_id", None)
    except (OSError, ValueError):
        return None  # a folder with only a tokenizer, which may name the token


def _with_system(turns: list[dict[str, Any]], system: str | None) -> list[dict[str, Any]]:
    if system is None or (turns and turns[0].get("role") == "system"):
        return turns
    return [{"role": "system", "content": system}, *turns]


def _expect_read(
    tokenizer: PreTrainedTokenizerBase,
    chat_template: ChatTemplateMode,
    tools: Sequence[Mapping[str, Any]] | None,
    template_kwargs: Mapping[str, Any],
) -> None:
    """Raise TokenizerError for a name that the chat template does not read: handing it over would change nothing."""
    given = {**({"tools": tools} if tools else {}), **template_kwargs}
    if chat_template == "off":
        raise TokenizerError(f"{', '.join(given)}: only a chat template reads this, got chat_template=off")
    expect_read(as_chat_tokenizer(tokenizer).chat_template, given)


def _refuse_second_rendering(tokenizer: PreTrainedTokenizerBase, prompt: str, ids: list[int]) -> None:
    """Raise TokenizerError for a prompt that begins with the template's first token: it was rendered before."""
    special = {str(token) for token in tokenizer.all_special_tokens}
    text = prompt.lstrip()
    doubled = next((token for token in special if text.startswith(token)), None)
    if doubled is not None and tokenizer.convert_ids_to_tokens(ids[:1]) == [doubled]:
        raise TokenizerError(
            f"the prompt begins with {doubled!r}, as the chat template does: it seems to be rendered already; "
            "give plain text, or set chat_template=off"
        )


def _as_array(ids: Sequence[int], record: Promptlike) -> npt.NDArray[np.int32]:
    if len(ids) == 0:
        raise TokenizerError(f"the prompt renders to no tokens at all: {record.prompt!r}")
    return np.asarray(ids, dtype=np.int32)
