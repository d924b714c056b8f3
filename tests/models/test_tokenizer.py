"""Loading, stop tokens, fingerprints and rendering, on small tokenizers built and saved here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoConfig, GenerationConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from stillhouse.models.tokenizer import (
    TokenizerError,
    load_tokenizer,
    render_prompt,
    stop_token_ids,
    token_map_fingerprint,
)
from stillhouse.models.tokenizer_file import FileTokenizer

TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'forbidden' %}{{ raise_exception('no such role here') }}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


class Record(NamedTuple):
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None


def make_tokenizer(
    *, template: str | None = TEMPLATE, swap: bool = False, bos: bool = False
) -> PreTrainedTokenizerFast:
    """One token per byte, plus the chat tokens; `swap` exchanges the ids of "a" and "b"."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if swap:
        alphabet = [{"a": "b", "b": "a"}.get(c, c) for c in alphabet]
    core = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    if bos:
        core.post_processor = processors.TemplateProcessing(
            single="<|im_start|> $A", special_tokens=[("<|im_start|>", core.token_to_id("<|im_start|>"))]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<|im_start|>", eos_token="<|im_end|>", pad_token="<|im_end|>"
    )
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


def text_of(tokenizer: PreTrainedTokenizerBase, ids: np.ndarray) -> str:
    assert ids.dtype == np.int32
    return str(tokenizer.decode(ids.tolist()))


def test_a_missing_folder_is_refused_with_the_nearest_name(tmp_path: Path) -> None:
    (tmp_path / "student").mkdir()
    with pytest.raises(TokenizerError, match=r"did you mean '.*/student'"):
        load_tokenizer(tmp_path / "studnet")


def test_a_folder_without_tokenizer_files_says_what_it_holds(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(TokenizerError, match=r"expected one of tokenizer\.json.*found \['model\.safetensors'\]"):
        load_tokenizer(tmp_path)


def test_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match="is a file, expected a Hugging Face model folder"):
        load_tokenizer(tmp_path / "tokenizer.json")


def test_broken_tokenizer_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match="does not load"):
        load_tokenizer(tmp_path)


def test_an_unknown_hub_name_is_refused_without_minutes_of_retries() -> None:
    with pytest.raises(TokenizerError, match="stillhouse-tests/there-is-no-such-model"):
        load_tokenizer("stillhouse-tests/there-is-no-such-model")


def test_stop_tokens_are_those_of_the_generation_config_and_the_tokenizer(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    tokenizer.save_pretrained(tmp_path)
    im_end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert stop_token_ids(tmp_path, tokenizer) == (im_end,)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "eos_token_id": 7}))
    assert stop_token_ids(tmp_path, tokenizer) == (7, im_end)
    of_text = {"model_type": "qwen3_5_text", "eos_token_id": 9}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_5", "text_config": of_text}))
    assert GenerationConfig.from_model_config(AutoConfig.from_pretrained(tmp_path)).eos_token_id == 9
    assert stop_token_ids(tmp_path, tokenizer) == FileTokenizer(tmp_path).stop_token_ids == (9, im_end)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [im_end, 3]}))
    assert stop_token_ids(tmp_path, tokenizer) == (3, im_end)


def test_no_stop_token_at_all_is_refused(tmp_path: Path) -> None:
    core = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=core).save_pretrained(tmp_path)
    with pytest.raises(TokenizerError, match="no end-of-sequence token"):
        stop_token_ids(tmp_path, load_tokenizer(tmp_path))


def test_fingerprints_differ_when_two_tokens_of_one_vocabulary_change_places() -> None:
    plain, swapped = make_tokenizer(), make_tokenizer(swap=True)
    assert set(plain.get_vocab()) == set(swapped.get_vocab())
    assert token_map_fingerprint(plain) != token_map_fingerprint(swapped)


def test_a_prompt_becomes_one_user_turn(tokenizer: PreTrainedTokenizerFast) -> None:
    ids = render_prompt(tokenizer, Record("1+2="))
    assert text_of(tokenizer, ids) == "<|im_start|>user\n1+2=<|im_end|>\n<|im_start|>assistant\n"


def test_messages_are_rendered_as_they_are(tokenizer: PreTrainedTokenizerFast) -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    text = text_of(tokenizer, render_prompt(tokenizer, Record(messages=turns)))
    assert text == (
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n<|im_start|>user\nc<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_the_system_prompt_goes_in_front_unless_the_messages_have_their_own(tokenizer: PreTrainedTokenizerFast) -> None:
    assert text_of(tokenizer, render_prompt(tokenizer, Record("a"), "be brief")).startswith(
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\na"
    )
    own = [{"role": "system", "content": "own"}, {"role": "user", "content": "a"}]
    assert "be brief" not in text_of(tokenizer, render_prompt(tokenizer, Record(messages=own), "be brief"))
    assert own == [{"role": "system", "content": "own"}, {"role": "user", "content": "a"}]


def test_without_template_a_prompt_is_tokenised_with_the_tokens_the_tokenizer_adds() -> None:
    plain = make_tokenizer(template=None, bos=True)
    assert text_of(plain, render_prompt(plain, Record("ab"))) == "<|im_start|>ab"


def test_with_template_nothing_is_added_around_it() -> None:
    chatty = make_tokenizer(bos=True)
    assert text_of(chatty, render_prompt(chatty, Record("ab"))).count("<|im_start|>") == 2


def test_chat_template_off_leaves_a_prompt_as_it_is(tokenizer: PreTrainedTokenizerFast) -> None:
    rendered = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    ids = render_prompt(tokenizer, Record(rendered), chat_template="off")
    np.testing.assert_array_equal(ids, render_prompt(tokenizer, Record("a")))


def test_a_prompt_that_is_rendered_already_is_not_rendered_again(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(TokenizerError, match="rendered already"):
        render_prompt(tokenizer, Record("<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"))


def test_what_cannot_be_rendered_is_refused_with_a_reason(tokenizer: PreTrainedTokenizerFast) -> None:
    plain = make_tokenizer(template=None)
    user = [{"role": "user", "content": "a"}]
    with pytest.raises(TokenizerError, match="messages need a chat template, got a tokenizer without one"):
        render_prompt(plain, Record(messages=user))
    with pytest.raises(TokenizerError, match="messages need a chat template, got chat_template=off"):
        render_prompt(tokenizer, Record(messages=user), chat_template="off")
    with pytest.raises(TokenizerError, match="system prompt needs a chat template"):
        render_prompt(plain, Record("a"), "be brief")
    with pytest.raises(
        TokenizerError, match=r"must end with the turn to be answered, got roles \['user', 'assistant'\]"
    ):
        render_prompt(tokenizer, Record(messages=[*user, {"role": "assistant", "content": "b"}]))
    with pytest.raises(TokenizerError, match=r"roles \['forbidden'\]\): no such role here"):
        render_prompt(tokenizer, Record(messages=[{"role": "forbidden", "content": "a"}]))
    with pytest.raises(TokenizerError, match="got neither"):
        render_prompt(tokenizer, Record())
    with pytest.raises(TokenizerError, match="no tokens at all"):
        render_prompt(plain, Record(""))
