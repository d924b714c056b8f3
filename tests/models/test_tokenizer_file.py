"""The tokenizer that needs no torch says the same as the one of transformers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from tokenizers import Tokenizer

from stillhouse.actors.envs.base import TextTokenizer
from stillhouse.builtin import STUDENT_DIR, TEACHER_DIR
from stillhouse.models.tokenizer import TokenizerError, load_tokenizer, stop_token_ids, token_map_fingerprint
from stillhouse.models.tokenizer_file import FileTokenizer
from tests.models.test_chat_text import tokenizer_of
from tests.models.test_tokenizer import make_tokenizer
from tests.patience import PATIENCE_S

TEXTS = ["", "hello, world", "<calc>1+2</calc> 3<|im_end|>", "naïve 東京 \n\t  \x00", " <|im_start|>user\nhi"]
LOOPED = (
    "{%- for m in messages %}{% if m['role'] == 'system' %}{% continue %}{% endif %}"
    "<|im_start|>{{ m['role'] }} {% generation %}{{ m['content'] }}{% endgeneration %}<|im_end|>{% endfor %}"
    "{{ bos_token }}{{ messages[0] | tojson }}"
)


@pytest.fixture(scope="module", params=["student", "teacher", "saved", "config_only"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built-in models, one that transformers has saved, one whose special tokens only tokenizer_config.json knows."""
    if request.param in ("student", "teacher"):
        return STUDENT_DIR if request.param == "student" else TEACHER_DIR
    path = tmp_path_factory.mktemp("tokenizer")
    tokenizer = make_tokenizer(template=LOOPED, bos=True)
    if request.param == "saved":
        cast(Any, tokenizer).add_special_tokens({"extra_special_tokens": ["<more>"]})
    tokenizer.save_pretrained(path)
    if request.param == "config_only":
        config = json.loads((path / "tokenizer_config.json").read_text())
        config["extra_special_tokens"] = ["<later>", "<last>"]
        (path / "tokenizer_config.json").write_text(json.dumps(config))
    (path / "config.json").write_text(json.dumps({"model_type": "qwen3", "eos_token_id": [3, 1]}))
    return path


def test_ids_text_and_fingerprint_are_those_of_transformers(folder: Path) -> None:
    ours, theirs = FileTokenizer(folder), load_tokenizer(folder)

    assert ours.fingerprint == token_map_fingerprint(theirs)
    assert ours.get_added_vocab() == cast(Any, theirs).get_added_vocab()
    assert set(ours.all_special_tokens) == set(theirs.all_special_tokens)
    assert ours.stop_token_ids == stop_token_ids(folder, theirs)
    for text in TEXTS:
        assert ours.encode(text, add_special_tokens=True) == theirs.encode(text, add_special_tokens=True)


def test_environments_cannot_tell_them_apart(folder: Path) -> None:
    ours, theirs = TextTokenizer(FileTokenizer(folder)), TextTokenizer(load_tokenizer(folder))

    assert ours.vocab_size == theirs.vocab_size
    for text in TEXTS:
        np.testing.assert_array_equal(ours.encode(text), theirs.encode(text))
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text))
        assert ours.single_token(text) == theirs.single_token(text)
    np.testing.assert_array_equal(ours.chat_turn("go on", "tool"), theirs.chat_turn("go on", "tool"))
    turns, tools = [{"role": "user", "content": "what is in the box?"}], [{"name": "look", "parameters": {"é": 1}}]
    np.testing.assert_array_equal(ours.chat_prompt(turns, tools), theirs.chat_prompt(turns, tools))


TURN_BY_TURN = (
    "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}{% if m.reasoning_content %} thought: "
    "{{ m.reasoning_content }}{% endif %}{% for call in m.tool_calls or [] %} {{ call.function.name }} "
    "{{ call.function.arguments | tojson(separators=(',', ':'), sort_keys=true) }}{% endfor %}<|im_end|>{% endfor %}"
)


@pytest.mark.parametrize("where", ["files", "tokenizer_config.json"])
def test_of_several_templates_the_one_of_transformers_counts(where: str, tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    with_tools = "T{% for t in tools or [] %}{{ t | tojson(indent=1) }}{% endfor %}" + TURN_BY_TURN
    tokenizer.chat_template = cast(Any, {"default": TURN_BY_TURN, "tool_use": with_tools, "rag": "R"})
    tokenizer.save_pretrained(tmp_path, save_jinja_files=where == "files")
    ours, theirs = FileTokenizer(tmp_path), load_tokenizer(tmp_path)
    calls = [{"type": "function", "function": {"name": "add", "arguments": {"b": 1, "a": "é"}}}]
    turns: list[dict[str, Any]] = [
        {"role": "user", "content": "1+1=", "name": None},
        {"role": "assistant", "content": None, "tool_calls": calls, "reasoning": "add them"},
        {"role": "tool", "content": "2", "tool_calls": None},
    ]
    for tools in (None, [], [{"type": "function", "function": {"name": "add"}}]):
        given: Any = {"tools": tools, "tokenize": False, "add_generation_prompt": True}
        expected = cast(Any, theirs).apply_chat_template(turns, **given)
        assert ours.apply_chat_template(turns, **given) == expected
        assert expected.startswith("T") == (tools is not None) and "None" not in expected and "add them" in expected
        for one in (TextTokenizer(ours), TextTokenizer(theirs)):  # no tools are no list of tools
            right = cast(Any, theirs).apply_chat_template(turns, **{**given, "tools": tools or None})
            assert one.shown(one.chat_prompt(turns, tools)) == right
            assert one.chat_template == with_tools


@pytest.mark.parametrize("where", ["files", "tokenizer_config.json"])
def test_a_template_is_chosen_by_its_name_as_transformers_does(where: str, tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    short = TURN_BY_TURN.replace("{{ m.role }}", "{{ greeting }}")
    tokenizer.chat_template = cast(Any, {"default": TURN_BY_TURN, "tool_use": "T", "short": short})
    tokenizer.save_pretrained(tmp_path, save_jinja_files=where == "files")
    ours, theirs = FileTokenizer(tmp_path), load_tokenizer(tmp_path)
    turns, kwargs = [{"role": "user", "content": "1+1="}], {"chat_template": "short", "greeting": "hi"}
    expected = cast(Any, theirs).apply_chat_template(turns, tokenize=False, **kwargs)
    assert expected == "<|im_start|>hi 1+1=<|im_end|>"
    for one in (TextTokenizer(ours).with_template_kwargs(kwargs), TextTokenizer(theirs).with_template_kwargs(kwargs)):
        one.expect_read(kwargs)
        assert one.shown(one.chat_prompt(turns)) == expected and one.chat_template == short
        assert one.shown(one.chat_turns([{"role": "user", "content": "a"}])) == "<|im_start|>hi a<|im_end|>"
        for wrong in ("shrt", "{{ messages }}", 1):
            with pytest.raises(ValueError, match="expected the name of one of the model's templates, default, short"):
                one.expect_read({"chat_template": wrong})
            with pytest.raises(ValueError, match="expected the name of one"):
                one.with_template_kwargs({"chat_template": wrong}).chat_prompt(turns)
        with pytest.raises(ValueError, match="does not read 'greting'; did you mean 'greeting'"):
            one.expect_read({"chat_template": "short", "greting": "x"})
        with pytest.raises(ValueError, match="does not read 'greeting'"):  # this template does not
            one.expect_read({"chat_template": "default", "greeting": "x"})


def test_a_model_with_one_template_takes_no_other(tmp_path: Path) -> None:
    make_tokenizer().save_pretrained(tmp_path)
    for one in (TextTokenizer(FileTokenizer(tmp_path)), TextTokenizer(load_tokenizer(tmp_path))):
        for wrong in ("short", "{{ messages }}"):
            with pytest.raises(ValueError, match="of which none has a name"):
                one.with_template_kwargs({"chat_template": wrong}).chat_prompt([{"role": "user", "content": "a"}])


def test_a_base_model_with_a_template_in_its_folder_is_a_chat_model(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    assert FileTokenizer(tmp_path).chat_template is None and load_tokenizer(tmp_path).chat_template is None
    (tmp_path / "chat_template.jinja").write_text(TURN_BY_TURN)
    assert FileTokenizer(tmp_path).chat_template == load_tokenizer(tmp_path).chat_template == TURN_BY_TURN


def test_later_turns_are_by_the_template_of_a_conversation_with_tools() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = cast(
        Any, {"default": TURN_BY_TURN, "tool_use": TURN_BY_TURN.replace("<|im_end|>", "!<|im_end|>")}
    )
    ours = TextTokenizer(tokenizer)
    with pytest.raises(ValueError, match="puts '!<"):
        ours.chat_turns([{"role": "user", "content": "a"}], [{}])
    assert ours.shown(ours.chat_turns([{"role": "user", "content": "a"}])) == "<|im_start|>user a<|im_end|>"


def test_a_template_can_refuse(tmp_path: Path) -> None:
    make_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(Exception, match="no such role here"):
        turns = [{"role": "forbidden", "content": ""}]
        FileTokenizer(tmp_path).apply_chat_template(turns, tokenize=False, add_generation_prompt=False)


def test_a_model_without_the_file_is_refused_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text("{}")
    with pytest.raises(TokenizerError, match="save_pretrained"):
        FileTokenizer(tmp_path)
    with pytest.raises(TokenizerError, match="no folder"):
        FileTokenizer(tmp_path / "missing")


def test_it_needs_no_torch() -> None:
    code = (
        f"import sys; from stillhouse.models.tokenizer_file import FileTokenizer\n"
        f"t = FileTokenizer({str(STUDENT_DIR)!r})\n"
        "from stillhouse.actors.envs.base import TextTokenizer\n"
        "TextTokenizer(t).chat_turn('x'); t.stop_token_ids; t.fingerprint\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE_S)


@pytest.mark.parametrize(
    ("kind", "config", "model"),
    [
        ("legacy", {"tokenizer_class": "LlamaTokenizer"}, "llama"),  # other ids behind special tokens
        ("metaspace never", {"tokenizer_class": "LlamaTokenizerFast"}, "llama"),  # and for all text
        ("bytes", {"add_prefix_space": True}, "qwen2"),
        ("bytes", {}, "qwen3"),  # a token of the class's own
    ],
)
def test_text_has_the_ids_of_the_file_whatever_class_its_folder_names(
    kind: str, config: dict[str, Any], model: str, tmp_path: Path
) -> None:
    made = tokenizer_of(kind)
    made.save_pretrained(tmp_path)
    change(tmp_path, config, without=("tokenizer_class", "backend"))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model}))
    core = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    loaded = load_tokenizer(tmp_path)
    assert loaded.get_vocab() == core.get_vocab(with_added_tokens=True)
    for text in ("hello world", " it's 2023", "x<|im_end|>hello"):
        assert loaded.encode(text, add_special_tokens=False) == core.encode(text, add_special_tokens=False).ids


NAMED = "{{ image_token }}{{ pad_token }}" + LOOPED


@pytest.mark.parametrize(
    ("config", "files"),
    [
        ({"image_token": "<img>"}, {}),
        ({"extra_special_tokens": {"image_token": "<img>"}}, {}),
        ({}, {"special_tokens_map": {"eos_token": "<|im_start|>", "pad_token": {"content": "<pad>"}}}),
        ({"added_tokens_decoder": {}}, {"special_tokens_map": {"eos_token": "<|im_start|>"}}),
        ({}, {"added_tokens": {"<more>": 258, "<less>": 259}}),
        ({"split_special_tokens": True}, {}),
    ],
)
def test_special_tokens_are_taken_from_where_transformers_takes_them(
    config: dict[str, Any], files: dict[str, Any], tmp_path: Path
) -> None:
    make_tokenizer(template=NAMED).save_pretrained(tmp_path)
    change(tmp_path, config)
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    ours, theirs = FileTokenizer(tmp_path), load_tokenizer(tmp_path)
    assert ours.special_tokens_map == theirs.special_tokens_map and ours.get_vocab() == theirs.get_vocab()
    assert set(ours.all_special_tokens) == set(theirs.all_special_tokens)
    turns = [{"role": "user", "content": "hi <more>"}]
    right = cast(Any, theirs).apply_chat_template(turns, tokenize=True, return_dict=False)
    assert TextTokenizer(ours).chat_prompt(turns).tolist() == TextTokenizer(theirs).chat_prompt(turns).tolist()
    if "added_tokens" not in files:  # which is a control token of others here
        assert TextTokenizer(ours).shown(TextTokenizer(ours).chat_prompt(turns)) == theirs.decode(right)
    assert theirs.convert_tokens_to_ids("<|im_start|>") in right


def change(folder: Path, config: dict[str, Any], without: tuple[str, ...] = ()) -> None:
    file = folder / "tokenizer_config.json"
    kept = {key: value for key, value in json.loads(file.read_text()).items() if key not in without}
    file.write_text(json.dumps({**kept, **config}))
