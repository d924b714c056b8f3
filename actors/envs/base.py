"""The interface of environments: token ids in, token ids out, async. No torch.

The loop around it (`actors.envs.episode`):

    reset(task)  -> Observation   tokens to put behind the prompt, mostly none
    the student samples a turn, up to a stop token
    step(action) -> StepResult    tokens the student reads next, or done and a reward;  and so on
    close()

Token in, token out: the student's tokens are kept as sampled. An environment sees them (as ids and, for convenience, as
text) but cannot replace them; it tokenises only its own text. Text that a model wrote need not tokenise back to the
same ids, and log-probs of other ids would be wrong.

An environment serves one rollout, on its own thread and event loop: it may await, and it may block. Shapes: n = tokens
of the item at hand.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, Self, TypeAlias, cast

import numpy as np

from stillhouse.engines.base import Int32s
from stillhouse.models.chat_template import BY_NAME, expect_read, template_for
from stillhouse.models.chat_text import conversation_text, ids_behind, piece_ids, plain_text, prompt_ids, text_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from stillhouse.models.tokenizer_file import FileTokenizer

TurnEnd: TypeAlias = Literal["stop", "length"]


def no_tokens() -> Int32s:
    """An empty array of token ids."""
    return np.zeros(0, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class EnvTask:
    """The task of one rollout."""

    prompt_ids: Int32s
    """[n] The student reads these before anything that `reset` adds."""
    ground_truth: str | None
    tag: str
    rollout_id: str
    seed: int
    """The rollout's seed, for environments that draw random numbers."""
    row: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """All columns of the prompt's row, as in the prompts file, also `prompt` or `messages`. `chat_template_kwargs` has
    those of the configuration too."""


@dataclass(frozen=True, slots=True)
class Observation:
    """The result of `reset`."""

    token_ids: Int32s = field(default_factory=no_tokens)
    """[n] Appended to the prompt, not trained."""
    prompt_ids: Int32s | None = None
    """[n] A whole prompt that the environment made, in place of the task's. None: the task's prompt stays."""


@dataclass(frozen=True, slots=True)
class Action:
    """One turn of the student."""

    token_ids: Int32s
    """[n] As sampled, the stop token included. Read-only."""
    text: str
    """The same tokens as text, without special tokens. Never tokenise it again."""
    finish_reason: TurnEnd
    """stop: ended on a stop token; length: the rollout's tokens are used up."""
    turn: int
    """0 for the first."""
    last: bool
    """No turn follows (tokens or turns are used up): give the reward now; `StepResult.token_ids` is not used."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """The environment's answer to a turn."""

    token_ids: Int32s = field(default_factory=no_tokens)
    """[n] Appended to the turn, not trained; the student continues from there. Not used when the episode ends here."""
    done: bool = False
    reward: float | None = None
    """For this turn. The rollout's reward is the sum over its turns; None at all of them: the environment cannot judge
    (e.g. no ground truth)."""
    info: Mapping[str, float] = field(default_factory=dict[str, float])
    """Numbers about this step; the actor sums them over a rollout into its statistics."""


class Environment(Protocol):
    """Inherit from it to get the defaults. Built as `factory(tokenizer, **options)`, once per rollout."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a turn in this environment, in addition to the model's own stop tokens."""
        return ()

    async def reset(self, task: EnvTask) -> Observation:
        """Begin the episode. Any exception fails the rollout under the exception's name."""
        ...

    async def step(self, action: Action) -> StepResult:
        """Respond to one turn of the student."""
        ...

    async def close(self) -> None:
        """Release what the episode holds. Always called once."""
        return


class EnvironmentFactory(Protocol):
    """Usually an environment class. `options` come from the configuration."""

    def __call__(self, tokenizer: TextTokenizer, /, **options: object) -> Environment: ...


TOOL_MARKS: Final = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "tool_call", "tool▁")
"""Parts of the added tokens that notations of tool calls use."""


class TextTokenizer:
    """The tokenizer as environments use it: their own text to tokens, the student's tokens to text."""

    def __init__(self, given: PreTrainedTokenizerBase | FileTokenizer) -> None:
        tokenizer = self._tokenizer = cast(Any, given)
        self._added = cast("dict[str, int]", tokenizer.get_added_vocab())
        self.vocab_size = max(tokenizer.get_vocab().values()) + 1
        """Every id is below this."""
        marked = {i: text for text, i in self._added.items() if any(mark in text for mark in TOOL_MARKS)}
        self._tool_marks = {i: text for i, text in marked.items() if not self._plain([i])}
        """Tags of tool calls that this tokenizer counts as special: Mistral's, and one of Llama's."""
        self._template_kwargs: Mapping[str, Any] = {}

    def with_template_kwargs(self, given: Mapping[str, Any] | None) -> Self:
        """The same tokenizer, with these arguments for its chat template over those that it has. None as an argument
        changes nothing, as in `actors.envs.registry.options_of_row`."""
        if not given:
            return self
        other = copy.copy(self)
        named = {name: value for name, value in given.items() if value is not None}
        other._template_kwargs = {**self._template_kwargs, **named}
        return other

    def expect_read(self, given: Mapping[str, Any]) -> None:
        """Raise ValueError for arguments that the chat template does not read."""
        expect_read(self._tokenizer.chat_template, given)

    @property
    def has_template(self) -> bool:
        """Whether the tokenizer has a chat template, which `chat_turn` needs."""
        return self._tokenizer.chat_template is not None

    @property
    def chat_template(self) -> str | None:
        """That of conversations with tools, where there are several."""
        named = self._template_kwargs.get(BY_NAME)
        return template_for(self._tokenizer.chat_template, (), named) if self.has_template else None

    def encode(self, text: str, behind: Int32s | None = None) -> Int32s:
        """Token ids [n] of the environment's own text, without a template, where it stands behind these token ids, or
        behind a special token. Text of others belongs into `plain` first.

        Raises ValueError for text that the tokenizer cannot put there."""
        return np.asarray(piece_ids(self._tokenizer, text, () if behind is None else behind.tolist()), dtype=np.int32)

    def plain(self, text: str) -> str:
        """Text of others (users, tools) for `encode`: the chat template's control tokens in it stay text."""
        return plain_text(self._tokenizer, text)

    def encode_prompt(self, text: str) -> Int32s:
        """Token ids [n] of text that begins a context, with what the tokenizer puts before a text, once."""
        return np.asarray(prompt_ids(self._tokenizer, text), dtype=np.int32)

    def decode(self, token_ids: Int32s) -> str:
        """The text without special tokens (end of turn, padding); tool tags stay."""
        if not self._tool_marks:
            return self._plain(token_ids.tolist())
        parts: list[str] = []
        begun = 0
        for at in np.flatnonzero(np.isin(token_ids, list(self._tool_marks))).tolist():
            parts += [self._plain(token_ids[begun:at].tolist()), self._tool_marks[int(token_ids[at])]]
            begun = at + 1
        return "".join([*parts, self._plain(token_ids[begun:].tolist())])

    def _plain(self, token_ids: list[int]) -> str:
        return cast(str, self._tokenizer.decode(token_ids, skip_special_tokens=True))

    def shown(self, token_ids: Int32s) -> str:
        """The text with special tokens, for people."""
        return cast(str, self._tokenizer.decode(token_ids.tolist(), skip_special_tokens=False))

    def opens_reasoning(self, prompt_ids: Int32s) -> bool:
        """Whether a prompt ends with <think>, so that the response begins inside it."""
        return self.shown(prompt_ids[-8:]).rstrip().endswith("<think>")

    def single_token(self, text: str) -> int | None:
        """The id of `text` if it is always one token whatever surrounds it, else None.

        Only added tokens are: plain BPE may split the same text differently in another context."""
        return self._added.get(text)

    def chat_turn(self, text: str, role: str = "user", *, closed: bool = True, ended_by: int | None = None) -> Int32s:
        """Token ids [n] that follow a finished turn of the student: one new turn, of `role` saying `text`. See
        `chat_turns`."""
        return self.chat_turns([{"role": role, "content": text}], closed=closed, ended_by=ended_by)

    def chat_turns(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        closed: bool = True,
        ended_by: int | None = None,
    ) -> Int32s:
        """Token ids [n] that follow a finished turn of the student: the rest of the template's end of turn, these new
        turns (`role` and `content`), and the opening of the student's next turn. `tools`: those of the conversation,
        which may have a template of its own. `closed`: the student wrote the token
        that ends its turn; otherwise that comes first. `ended_by`: that token, where it is known. In templates whose
        turns end with the opening of the next one (GLM), another opening than the student wrote is added.

        Raises ValueError when the tokenizer has no chat template, one that does not close turns with a token, or one
        that refuses these turns."""
        if not self.has_template:
            raise ValueError("chat_turn needs a tokenizer with a chat template, got one without; use encode")
        before, closing, behind = self._around_a_turn(messages, tools)
        if closed and ended_by is not None and self.single_token(closing) != ended_by:
            closed = not self._opens_a_turn(closing, str(messages[0]["role"]))
        if closed:
            before += closing
        else:
            behind = f"{closing}{behind}"
        return np.asarray(ids_behind(self._tokenizer, before, behind), dtype=np.int32)

    def _around_a_turn(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> tuple[str, str, str]:
        """Text up to the end of a turn of the student, the special token there, and all that follows, with these
        turns."""
        mark = "\u2063written\u2063"
        student = [{"role": "user", "content": "-"}, {"role": "assistant", "content": mark}]
        rendered = conversation_text(self._tokenizer, [*student, *messages], tools, self._template_kwargs)
        if mark not in rendered:
            raise ValueError("the chat template leaves out an assistant turn before these turns")
        at = rendered.rindex(mark) + len(mark)
        before, behind = rendered[:at], rendered[at:]
        closing = next((t for t in self._special_tokens() if behind.startswith(t)), None)
        if closing is None:
            raise ValueError(
                f"the chat template puts {behind[:20]!r} behind an assistant turn, expected a special token there"
            )
        return before, closing, behind[len(closing) :]

    def _opens_a_turn(self, closing: str, role: str) -> bool:
        """Whether the token behind a turn of the student belongs to the next turn: it is another for another role."""
        for other in ("user", "tool"):
            if other != role:
                with suppress(ValueError):
                    return self._around_a_turn([{"role": other, "content": "-"}])[1] != closing
        return False

    def chat_prompt(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> Int32s:
        """Token ids [n] of a whole prompt: these turns (`role` and `content`), then the opening of the student's turn.
        `tools`: JSON schemas of functions, for the template. Without a chat template: the contents, joined by newlines.

        Raises ValueError for messages that the template refuses, and for tools without a template."""
        if self.has_template:
            text = conversation_text(self._tokenizer, messages, tools, self._template_kwargs)
            return np.asarray(text_ids(self._tokenizer, text), dtype=np.int32)
        if tools:
            raise ValueError("tools need a tokenizer with a chat template, got one without; describe them as text")
        return self.encode_prompt("\n".join(self.plain(str(message["content"])) for message in messages))

    def _special_tokens(self) -> Sequence[str]:
        return sorted((str(t) for t in self._tokenizer.all_special_tokens), key=len, reverse=True)
