"""Tokenizers and chat templates that do not fit are found."""

from __future__ import annotations

import json
from pathlib import Path

from tests.tools.doctor.conftest import Examine, of


def changed(file: Path, **fields: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text(encoding="utf-8")) | fields), encoding="utf-8")


def test_sound_ones_pass(examine: Examine) -> None:
    for name in ("tokenizer maps", "chat template"):
        found = examine(name)
        assert len(found) >= 2 and all(finding.status == "ok" for finding in found), found


def test_two_ids_that_are_swapped(examine: Examine, teacher: Path) -> None:
    file = teacher / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["1"], vocabulary["2"] = vocabulary["2"], vocabulary["1"]
    file.write_text(json.dumps(content))
    found = of(examine("tokenizer maps", f"--teacher={teacher}"), "pool default")
    assert found.status == "failed"
    assert "2 with another id" in found.measured and "'1' is" in found.measured and "'2' is" in found.measured
    assert any("tokenizer differs" in one.measured for one in examine("configuration", f"--teacher={teacher}"))


def test_a_token_that_only_the_tokenizer_configuration_adds(examine: Examine, teacher: Path) -> None:
    """The launcher's check reads tokenizer.json alone."""
    changed(teacher / "tokenizer_config.json", extra_special_tokens={"image_token": "<|image|>"})
    changed(teacher / "config.json", vocab_size=320)
    assert [one.status for one in examine("configuration", f"--teacher={teacher}")] == ["ok"]
    found = of(examine("tokenizer maps", f"--teacher={teacher}"), "pool default")
    assert found.status == "failed" and "<|image|>" in found.measured


def test_fewer_embedding_rows_than_ids(examine: Examine, student: Path) -> None:
    changed(student / "config.json", vocab_size=300)
    found = of(examine("tokenizer maps", f"--student={student}"), "student")
    assert found.status == "failed" and "300 embedding rows for 320 ids" in found.measured


def test_a_student_that_does_not_stop_where_its_template_ends_a_turn(examine: Examine, student: Path) -> None:
    changed(student / "generation_config.json", eos_token_id=314)
    changed(student / "tokenizer_config.json", eos_token="<|endoftext|>")
    found = examine("configuration", f"--student={student}")
    assert of(found, "models.student").status == of(found, "models.teacher").status == "warning"
    assert "'<|im_end|>' (313)" in of(found, "models.student").measured


def test_a_template_that_drops_text(examine: Examine, student: Path) -> None:
    template = student / "chat_template.jinja"
    template.write_text(template.read_text().replace("message['content']", "message['content'][:-1]"))
    found = of(examine("chat template", f"--student={student}"), "content")
    assert found.status == "failed" and "the template drops '83370+71033='" in found.measured


def test_a_template_that_drops_the_system_turn(examine: Examine, student: Path) -> None:
    template = student / "chat_template.jinja"
    template.write_text(template.read_text().replace("in messages %}", "in messages if message['role'] != 'system' %}"))
    arguments = (f"--student={student}", "--learner.tasks.system_prompt=Add the numbers.")
    found = of(examine("chat template", *arguments), "content")
    assert found.status == "failed" and "leaves out a turn with the role 'system'" in found.measured


def test_a_template_without_an_opening(examine: Examine, student: Path) -> None:
    template = student / "chat_template.jinja"
    template.write_text(template.read_text().replace("{% if add_generation_prompt %}", "{% if false %}"))
    found = examine("chat template", f"--student={student}")
    assert of(found, "opening").status == "warning" and of(found, "content").status == "ok"
    assert of(found, "pool default").status == "warning", "the teacher's own template opens the answer"


def test_a_teacher_with_another_template(examine: Examine, teacher: Path) -> None:
    template = teacher / "chat_template.jinja"
    template.write_text(template.read_text().replace("+ message['role'] + '\\n'", "+ message['role'] + ': '"))
    found = of(examine("chat template", f"--teacher={teacher}"), "pool default")
    assert found.status == "warning" and "renders 8 of 8 prompts differently" in found.measured


def test_text_that_the_tokenizer_changes(examine: Examine, student: Path) -> None:
    """A normalizer that makes all letters large."""
    file = student / "tokenizer.json"
    content = json.loads(file.read_text())
    file.write_text(json.dumps(content | {"normalizer": {"type": "Lowercase"}}))
    prompts = student / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "\ufb01ve+2="}) + "\n")
    arguments = (f"--student={student}", f"--teacher={student}", f"--prompts={prompts}", "--learner.eval_every=0")
    found = examine("chat template", *arguments)
    assert of(found, "round trip").status in ("ok", "warning")
