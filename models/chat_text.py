"""A conversation as text by the chat template, and text as token ids: the same for every role. No torch.

Three rules hold for all ids that are made of text here:

- *Control tokens of the template are the template's alone.* Where text of users, tools or rows contains one, it is
  tokenised as text, as `apply_chat_template(..., sanitize_control_tokens=True)` of transformers does.
- *A piece of text behind other text* has the ids that follow those of the other text when both are tokenised as one
  (`ids_behind`). Tokenised alone it may begin with a space that is not there.
- *What a tokenizer puts before a text* (BOS) is there once, also where the text has it already (`prompt_ids`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any, Final, Protocol, cast

from tokenizers import Tokenizer

from stillhouse.models.chat_template import BY_NAME, Templates, literal_text, template_for
from stillhouse.models.files import TokenizerError, first_line

OPEN, CLOSE = "\ufdd0", "\ufdd1"
"""Stand around a control token that is text. Unicode keeps these characters free for such uses."""
_MARKED: Final = re.compile(f"{OPEN}([^{OPEN}{CLOSE}]*){CLOSE}|[{OPEN}{CLOSE}]")
_WORD: Final = re.compile(r"\w+")
_TAIL: Final = 8
"""Ids whose text shows where another text is put behind them."""
_PLAIN_TURNS: Final = [{"role": role, "content": "-"} for role in ("user", "assistant", "user")]
_ANSWER: Final = "yes"


class ChatTokenizer(Protocol):
    """What is asked of a tokenizer here; that of transformers and `models.tokenizer_file.FileTokenizer` have it."""

    @property
    def chat_template(self) -> Templates: ...

    @property
    def backend_tokenizer(self) -> Tokenizer:
        """Missing in tokenizers that are written in Python."""
        ...

    def apply_chat_template(self, *args: Any, **kwargs: Any) -> Any: ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...


def conversation_text(
    tokenizer: ChatTokenizer,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    *,
    opened: bool = True,
) -> str:
    """The text of a conversation, for `text_ids`: control tokens that were text before are marked in it. `opened`: with
    the opening of the next answer. Raises TokenizerError for what the chat template refuses."""
    template = template_for(tokenizer.chat_template, tools or None, (template_kwargs or {}).get(BY_NAME))
    if template is None:
        raise TokenizerError("a conversation needs a tokenizer with a chat template, got one without")
    of_others, of_assistants = _control_tokens(tokenizer, template)
    turns = [marked(turn, of_assistants if turn.get("role") == "assistant" else of_others) for turn in messages]
    listed = [marked(tool, of_others) for tool in tools] if tools else None
    text = _applied(tokenizer, turns, listed, marked(template_kwargs or {}, of_others), opened)
    if any(isinstance(turn.get("content"), list) and str(turn["content"]) in text for turn in turns):
        raise TokenizerError("the chat template takes no content that is a list of parts; expected one text")
    for turn in turns:
        word = _longest_word(turn.get("content"))
        if turn.get("role") != "assistant" and word not in text:
            raise TokenizerError(
                f"the chat template leaves out a turn with the role {turn.get('role')!r} (nowhere in what it shows is "
                f"{word!r:.60}); expected roles that it shows, and no system prompt where it shows none"
            )
    return text


def plain_text(tokenizer: ChatTokenizer, text: str) -> str:
    """Text of others that goes to the student without a chat template, for `text_ids`."""
    template = template_for(tokenizer.chat_template, None)
    return marked(text, _control_tokens(tokenizer, template or "")[0])


def unmarked(text: str) -> str:
    """The text as people read it."""
    return text.replace(OPEN, "").replace(CLOSE, "")


def without_marked(text: str) -> str:
    """The text with other characters in place of all that is marked; positions stay."""
    return _MARKED.sub(lambda found: CLOSE * len(found[0]), text)


def text_ids(tokenizer: ChatTokenizer, text: str) -> list[int]:
    """Token ids of text, without the tokens that the tokenizer puts before a text. Raises TokenizerError for a control
    token that this tokenizer cannot read as text."""
    if OPEN not in text and CLOSE not in text:
        return tokenizer.encode(text, add_special_tokens=False)
    first, *pieces = _MARKED.split(text)
    ids = list(tokenizer.encode(first, add_special_tokens=False))
    known: dict[str, list[int]] = {}
    for i, piece in enumerate(pieces):
        if not piece:
            continue
        if i % 2:
            ids += _piece_ids(tokenizer, piece, as_text=False)
        else:
            ids += (
                known[piece] if piece in known else known.setdefault(piece, _piece_ids(tokenizer, piece, as_text=True))
            )
    return ids


def ids_behind(tokenizer: ChatTokenizer, text: str, piece: str) -> list[int]:
    """Token ids of `piece` where it follows `text`. Raises TokenizerError where the two share a token."""
    before, whole = text_ids(tokenizer, text), text_ids(tokenizer, text + piece)
    if whole[: len(before)] != before:
        raise TokenizerError(
            f"{piece[:40]!r} behind {text[-40:]!r} changes the tokens before it; expected text that begins with a "
            "token of its own, such as behind a space or a special token"
        )
    return whole[len(before) :]


def closing_id(tokenizer: ChatTokenizer) -> int | None:
    """The first id that the chat template writes behind an assistant's answer; None where it writes none."""
    turns = [{"role": "user", "content": "Is it?"}, {"role": "assistant", "content": _ANSWER}]
    try:
        before, answer, behind = conversation_text(tokenizer, turns, opened=False).rpartition(_ANSWER)
        ids = ids_behind(tokenizer, before + answer, behind) if answer else []
    except TokenizerError:
        return None
    return ids[0] if ids else None


def piece_ids(tokenizer: ChatTokenizer, text: str, behind: Sequence[int] = ()) -> list[int]:
    """Token ids of text behind these ids, which a model may have written: as behind the text of the last of them, or
    else as behind a special token, if both together are shown as this text. Empty: as behind a special token. Raises
    TokenizerError."""
    if not behind:
        return ids_behind(tokenizer, _neutral(tokenizer), text)
    tail = list(behind[-1:] if behind[-1] in _added(tokenizer) else behind[-_TAIL:])
    shown = _shown(tokenizer, tail)
    with suppress(TokenizerError):
        return ids_behind(tokenizer, shown, text)
    ids = ids_behind(tokenizer, _neutral(tokenizer), text)
    if _shown(tokenizer, [*tail, *ids]) == shown + unmarked(text):
        return ids
    raise TokenizerError(
        f"{text[:40]!r} cannot be put behind {shown[-40:]!r}: this tokenizer has no tokens for it there; expected text "
        "that begins with a space or a line's end, or a turn of the chat"
    )


def prompt_ids(tokenizer: ChatTokenizer, text: str) -> list[int]:
    """Token ids of text that the student continues, without a chat template: with the tokens that the tokenizer puts
    before a text, unless the text begins with them, and without those that it puts behind one."""
    before, ids = _put_before(tokenizer), text_ids(tokenizer, text)
    return ids if ids[: len(before)] == before else before + ids


def marked(value: Any, control: re.Pattern[str]) -> Any:
    """The value with marks around all control tokens in its texts, at any depth. Names of fields stay."""
    match value:
        case str() if control.search(value):
            return control.sub(f"{OPEN}\\g<0>{CLOSE}", unmarked(value))
        case Mapping():
            return {key: marked(one, control) for key, one in cast("Mapping[str, Any]", value).items()}
        case list() | tuple():
            return [marked(one, control) for one in cast("list[Any]", value)]
        case _:
            return value


def _applied(
    tokenizer: ChatTokenizer,
    turns: list[dict[str, Any]],
    tools: list[Any] | None,
    template_kwargs: Mapping[str, Any],
    opened: bool,
) -> str:
    # transformers below 5.23 shows what is null as None
    turns = [{key: value for key, value in turn.items() if value is not None} for turn in turns]
    try:
        text: str = tokenizer.apply_chat_template(
            turns, tools=tools, tokenize=False, add_generation_prompt=opened, **template_kwargs
        )
    except Exception as error:  # a template is a program
        roles = [turn.get("role") for turn in turns]
        raise TokenizerError(
            f"the chat template refuses these messages (roles {roles}): {first_line(error)}"
        ) from error
    return text


@lru_cache(maxsize=16)
def _control_tokens(tokenizer: ChatTokenizer, template: str) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Patterns of the tokens that are text in what others say, and of those that are text in an assistant's turns: the
    tokens of turns, since an assistant writes all others (of tool calls, of thoughts) itself."""
    backend, special = getattr(tokenizer, "backend_tokenizer", None), set(cast(Any, tokenizer).all_special_tokens)
    if backend is not None:
        special |= {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    added = [*dict.fromkeys([*special, *_added(tokenizer).values()])]
    literals = literal_text(template)
    control = [one for one in added if one in special or (one in literals and not one.isspace())]
    of_turns: list[str] = []
    if template:
        try:
            shown = _applied(tokenizer, _PLAIN_TURNS, None, {}, opened=False)
            of_turns = [one for one in control if one in shown]
        except TokenizerError:  # it takes no such turns
            of_turns = [one for one in control if one in special and one in literals]
    return _pattern(control), _pattern(of_turns)


def _longest_word(content: Any) -> str:
    """That of a turn, as templates show it that strip a text or write it in JSON."""
    parts = cast("list[Any]", content) if isinstance(content, list) else [{"text": content}]
    texts = [part.get("text") for part in parts if isinstance(part, Mapping)]
    return max(
        (word[0] for text in texts if isinstance(text, str) for word in _WORD.finditer(text)), key=len, default=""
    )


def _pattern(tokens: Sequence[str]) -> re.Pattern[str]:
    """Matches the longest of the tokens; never, for none."""
    return re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) or "(?!)")


def _piece_ids(tokenizer: ChatTokenizer, piece: str, *, as_text: bool) -> list[int]:
    """Ids of a piece in the middle of a text. Behind a line's end tokenizers put no space before it."""

    def ids_of(text: str) -> list[int]:
        return _ids_without_added(tokenizer, text) if as_text else tokenizer.encode(text, add_special_tokens=False)

    line_end = tokenizer.encode("\n", add_special_tokens=False)
    ids = ids_of(f"\n{piece}")
    ids = ids[len(line_end) :] if ids[: len(line_end)] == line_end else ids_of(piece)
    if as_text and _id_of(tokenizer, piece) in ids:
        raise TokenizerError(f"the tokenizer makes the token {piece!r} of plain text too; take it out of the text")
    return ids


def _ids_without_added(tokenizer: ChatTokenizer, text: str) -> list[int]:
    """Ids of plain text in which no added token is looked for."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return cast(Any, tokenizer).encode(text, add_special_tokens=False, split_special_tokens=True)
    if backend.normalizer is not None:
        text = backend.normalizer.normalize_str(text)
    splits = [text]
    if backend.pre_tokenizer is not None:
        splits = [split for split, _ in backend.pre_tokenizer.pre_tokenize_str(text)]
    return [token.id for split in splits for token in backend.model.tokenize(split)]


def _id_of(tokenizer: ChatTokenizer, token: str) -> int | None:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return cast(Any, tokenizer).convert_tokens_to_ids(token) if backend is None else backend.token_to_id(token)


@lru_cache(maxsize=16)
def _put_before(tokenizer: ChatTokenizer) -> list[int]:
    text, whole = (tokenizer.encode("a", add_special_tokens=added) for added in (False, True))
    at = next((i for i in range(len(whole)) if whole[i : i + len(text)] == text), 0)
    return whole[:at]


@lru_cache(maxsize=16)
def _added(tokenizer: ChatTokenizer) -> dict[int, str]:
    return {i: text for text, i in cast(Any, tokenizer).get_added_vocab().items()}


@lru_cache(maxsize=16)
def _neutral(tokenizer: ChatTokenizer) -> str:
    """A special token behind which text stays as it is; empty where there is none."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return next(map(str, cast(Any, tokenizer).all_special_tokens), "")
    tokens = backend.get_added_tokens_decoder().values()
    return next((one.content for one in tokens if one.special and not one.rstrip and not one.single_word), "")


def _shown(tokenizer: ChatTokenizer, ids: list[int]) -> str:
    return cast(Any, tokenizer).decode(ids, skip_special_tokens=False)
