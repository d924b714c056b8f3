"""Configurations whose parts do not fit one another are refused before anything starts, or warned of."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen3MoeConfig

from stillhouse import builtin
from stillhouse.buffer.batch_size import MOST_ROLLOUTS
from stillhouse.engines import registry
from stillhouse.engines.provider import EngineProvider
from stillhouse.launch.checks.adapters import choose_adapters
from stillhouse.launch.checks.preflight import check
from stillhouse.launch.config.consistency import check_consistency, context_window
from stillhouse.launch.config.run import RunConfig
from stillhouse.launch.config.tree import build
from stillhouse.launch.errors import ConfigError
from stillhouse.launch.run import main
from stillhouse.protocol.messages import TopIdsWanted

OWN_ENVIRONMENT = """
class Own:
    def __init__(self, tokenizer, *, size, colour="red"): ...
    async def reset(self, task): ...
    async def step(self, action): ...
    async def close(self): ...

class Sync(Own):
    def step(self, action): ...
"""


def mistakes(**plain: Any) -> list[str]:
    return check_consistency(build(RunConfig, plain), builtin.STUDENT_DIR).mistakes


def warnings(**plain: Any) -> list[str]:
    return check_consistency(build(RunConfig, plain), builtin.STUDENT_DIR).warnings


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (Qwen3MoeConfig().to_dict(), "router_aux_loss_coef = 0.001"),
        ({"text_config": {"aux_loss_alpha": 0.5}}, "aux_loss_alpha = 0.5"),
        (Qwen3MoeConfig(router_aux_loss_coef=0.0).to_dict(), ""),
        ({"router_aux_loss_coef": None}, ""),
    ],
)
def test_the_router_s_loss_of_a_mixture_is_said_not_to_be_used(
    tmp_path: Path, content: dict[str, Any], named: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(content), encoding="utf-8")
    told = [one for one in check_consistency(build(RunConfig, {}), tmp_path).warnings if "aux_loss" in one]
    assert [named in one for one in told] == ([True] if named else [])


def test_the_defaults_fit() -> None:
    assert check_consistency(RunConfig(), builtin.STUDENT_DIR) == ([], [])


def test_a_pool_that_nothing_is_sent_to_and_a_route_to_nobody_are_both_told() -> None:
    assert mistakes(teacher={"pool": "math"}) == [
        "learner.tasks.routes: got pool 'default', which no teacher serves; expected 'math', the teacher.pool of all "
        "teachers of a run without `pools`",
        "teacher.pool: got 'math', to which learner.tasks.routes sends nothing; expected one of its pools: default",
    ]
    assert mistakes(teacher={"pool": "math"}, learner={"tasks": {"routes": {"math": ["sums"]}}}) == []
    (told,) = mistakes(learner={"tasks": {"routes": {"default": [], "judge": []}}})
    assert "got pool 'judge', which no teacher serves" in told
    whole = {"learner": {"tasks": {"routes": {}}, "objective": {"advantage": "grpo"}}, "buffer": {"release": "rollout"}}
    (told,) = mistakes(**whole)
    assert "expected one of its pools: (none)" in told
    assert check_consistency(build(RunConfig, {"teachers": 0, **whole}), builtin.STUDENT_DIR) == ([], [])


def test_a_run_without_workers_waits_for_those_who_join_and_says_so() -> None:
    assert mistakes(teachers=0, learner={"tasks": {"routes": {"judge": []}}}) == []
    assert [told.split(":")[0] for told in warnings(actors=0, teachers=0)] == ["actors", "teachers"]
    routes = {"tasks": {"routes": {"math": [], "style": []}}}
    (told,) = warnings(teachers=1, pools={"math": {"count": 0}, "style": {}}, learner=routes)
    assert told.startswith("pools.math.count: 0; what is sent to it is not scored until teachers join")


def test_open_ports_are_told_of_at_each_start() -> None:
    publish = {"host": "10.0.0.7", "allow_plain_network": True}
    (told,) = warnings(weights=publish)
    assert told.startswith("weights.allow_plain_network: other machines can reach 10.0.0.7; torch's store and the por")
    assert warnings(weights={"host": "10.0.0.7"}) == []  # by wire: nothing is open
    plain = {"bind": "tcp://10.0.0.7:0", "encrypt": "off", "allow_plain_network": True}
    (told,) = warnings(buffer=plain)
    assert told.startswith("buffer.allow_plain_network: the links to tcp://10.0.0.7:0 are not encrypted")
    assert warnings(buffer={"bind": "tcp://10.0.0.7:0"}) == []
    behind = {"advertise": "tcp://10.0.0.7:5", "encrypt": "off", "allow_plain_network": True}
    (told,) = warnings(buffer=behind)
    assert told.startswith("buffer.allow_plain_network: the links to tcp://10.0.0.7:5 are not encrypted")


def test_ranks_on_several_hosts_must_be_allowed_to_talk_in_plain_text() -> None:
    learner = {"ranks": 4, "hosts": 2}
    (told,) = mistakes(learner=learner, weights={"host": "10.0.0.7"})
    assert told.startswith("learner.hosts: got 2 with weights.host = 10.0.0.7, which other machines can reach; the")
    assert mistakes(learner=learner, weights={"host": "10.0.0.7", "allow_plain_network": True}) == []
    (told,) = warnings(learner=learner, weights={"host": "10.0.0.7", "allow_plain_network": True})
    assert "the weight group and the learner's ranks accept any client" in told


def test_a_batch_with_more_rollouts_than_a_message_holds_is_refused() -> None:
    (told,) = mistakes(buffer={"batch_rollouts": MOST_ROLLOUTS + 1})
    assert told.startswith(
        f"buffer.batch_rollouts: got {MOST_ROLLOUTS + 1}, expected at most {MOST_ROLLOUTS}; no message"
    )
    assert mistakes(buffer={"batch_rollouts": MOST_ROLLOUTS}) == []


def environments(**environment: Any) -> dict[str, Any]:
    return {"actor": {"environments": {"mine": environment}}, "learner": {"tasks": {"env": "mine"}}}


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (
            {"name": "calculater"},
            "actor.environments.mine: unknown environment 'calculater'; did you mean 'calculator'",
        ),
        (
            {"name": "calculator", "options": {"answer_patern": "(x)"}},
            "actor.environments.mine.options: environment 'calculator' has no option 'answer_patern'; did you mean "
            "'answer_pattern'? It has: answer_pattern, result_role",
        ),
        ({"name": "nowhere.to_be:Found"}, "cannot load 'nowhere.to_be:Found': No module named 'nowhere'"),
        (
            {"name": "own_env:Sync", "options": {"size": 3}},
            "its step is a plain function, expected `async def step(self",
        ),
        ({"name": "broken_env:Own"}, "cannot load 'broken_env:Own': ZeroDivisionError: division by zero ("),
        ({"name": "leaving_env:Own"}, "cannot load 'leaving_env:Own': SystemExit: 0 ("),
    ],
)
def test_an_environment_that_could_not_be_made_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environment: dict[str, Any], message: str
) -> None:
    (tmp_path / "own_env.py").write_text(OWN_ENVIRONMENT)
    (tmp_path / "broken_env.py").write_text("1 / 0")
    (tmp_path / "leaving_env.py").write_text("import sys\nsys.exit(0)")
    monkeypatch.chdir(tmp_path)  # where workers find a user's modules
    (told,) = mistakes(**environments(**environment))
    assert message in told


@pytest.mark.parametrize(
    ("key", "plain"),
    [
        ("weights.transport", {"weights": {"transport": "PATH"}}),
        ("learner.trackers", {"learner": {"trackers": ["PATH"]}}),
        ("learner.optimizer", {"learner": {"optimizer": "PATH"}}),
        ("learner.objective.aggregation", {"learner": {"objective": {"aggregation": "PATH"}}}),
        ("learner.objective.cost_transform", {"learner": {"objective": {"cost_transform": "PATH"}}}),
        (
            "learner.objective.teacher_divergences.default",
            {"learner": {"objective": {"teacher_divergences": {"default": "PATH"}}}},
        ),
    ],
)
def test_functions_of_ones_own_that_cannot_be_loaded_are_told(key: str, plain: dict[str, Any]) -> None:
    def told(path: str) -> list[str]:
        return mistakes(**json.loads(json.dumps(plain).replace("PATH", path)))

    assert told("no_module:f") == [f"{key}: cannot load 'no_module:f': No module named 'no_module'"]
    assert told("math:pi") == [f"{key}: 'math:pi' is a float, expected a function"]
    assert told("math:fsum") == []


def test_environments_of_the_working_directory_and_unused_ones_are_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fine_env.py").write_text(OWN_ENVIRONMENT)
    monkeypatch.chdir(tmp_path)
    assert mistakes(**environments(name="fine_env:Own", options={"size": 3})) == []
    (told,) = mistakes(actor={"environments": {"unused": {"name": "calculater"}}})
    assert told.startswith("actor.environments.unused: unknown environment")
    (told,) = mistakes(learner={"tasks": {"env": "calculater"}})
    assert told.startswith("learner.tasks.env: unknown environment")


def test_a_group_that_could_never_begin_is_refused_for_whole_groups_only() -> None:
    buffer = {"batch_rollouts": 4, "max_staleness": 1}
    tasks = {"group_size": 9}
    (told,) = mistakes(buffer={**buffer, "release": "rollout"}, learner={"tasks": tasks})
    assert told.startswith("learner.tasks.group_size: got 9 with buffer.release = rollout, expected at most 8")
    assert mistakes(buffer={**buffer, "release": "rollout"}, learner={"tasks": {"group_size": 8}}) == []
    assert mistakes(buffer=buffer, learner={"tasks": tasks}) == []


def test_an_advantage_of_parts_of_rollouts_is_refused() -> None:
    assert mistakes(learner={"objective": {"advantage": "grpo"}}, buffer={"release": "segment"}) == [
        "learner.objective.advantage: got 'grpo' with buffer.release = segment, expected buffer.release = rollout; it "
        "needs whole rollouts, and the first batch with parts of one would end the run"
    ]
    (told,) = mistakes(learner={"objective": {"advantage": "reinforce_pp"}})
    assert told.startswith("learner.objective.advantage: got 'reinforce_pp' with buffer.release = deadline")
    (told,) = mistakes(learner={"objective": {"advantage": "gae"}})
    assert told.startswith("learner.objective.advantage: got 'gae' with buffer.release = deadline")
    assert mistakes(learner={"objective": {"advantage": "grpo"}}, buffer={"release": "rollout"}) == []


def test_batches_that_whole_groups_do_not_fill_evenly_are_warned_of() -> None:
    (told,) = warnings(buffer={"batch_rollouts": 12, "release": "rollout"})
    assert told.startswith("buffer.batch_rollouts: 12 is not a multiple of learner.tasks.group_size = 8")
    assert warnings(buffer={"batch_rollouts": 12}) == []


def test_a_context_beyond_the_students_is_refused() -> None:
    assert mistakes(actor={"torch": {"max_context": 1025}}) == [
        f"actor.torch.max_context: got 1025, expected at most 1024, the max_position_embeddings of "
        f"{builtin.STUDENT_DIR / 'config.json'}"
    ]


@pytest.mark.parametrize(
    ("told", "window"),
    [
        ({"max_position_embeddings": 7}, 7),
        ({"text_config": {"max_position_embeddings": 8}}, 8),
        ({"n_positions": 9}, 9),
        ({"text_config": None}, None),
    ],
)
def test_the_context_window_is_read_where_models_say_it(
    tmp_path: Path, told: dict[str, Any], window: int | None
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(told))
    assert context_window(tmp_path) == window


def test_prompts_that_leave_too_little_room_are_warned_of() -> None:
    (told,) = warnings(learner={"tasks": {"max_new_tokens": 512}})
    assert "answers to prompts of more than 512 tokens will be cut short" in told
    assert "prompts of 1024 tokens or more get no answer" in told


@pytest.mark.parametrize(
    ("plain", "message"),
    [
        (
            {"learner": {"publish_every": 4, "eval_every": 0}, "buffer": {"max_staleness": 2}},
            r"learner.publish_every is 4, expected at most buffer.max_staleness \+ 1 = 3",
        ),
        ({"learner": {"publish_every": 3}}, "learner.eval_every is 20, expected a multiple of learner.publish_every"),
    ],
)
def test_weights_that_are_waited_for_but_never_published_are_refused(plain: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(RunConfig, plain)


def test_publishing_as_rarely_as_the_staleness_allows_is_fine() -> None:
    build(RunConfig, {"learner": {"publish_every": 3, "eval_every": 21}, "buffer": {"max_staleness": 2}})


def test_check_refuses_them_and_prints_warnings(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match=r"teacher\.pool: got 'math'"):
        check(build(RunConfig, {"teacher": {"pool": "math"}}))
    assert main(["--check", "--env", "calculater"]) == 2
    assert "learner.tasks.env: unknown environment 'calculater'" in capsys.readouterr().err
    assert main(["--check", "--learner.tasks.max_new_tokens", "512"]) == 0
    assert capsys.readouterr().out.count("warning: actor.torch.max_context: 1024 is less than ") == 1


def test_adapters_without_the_package_that_makes_them_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert mistakes(learner={"lora": {"rank": 4}}) == []
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)  # pyright: ignore[reportUnknownLambdaType]
    (told,) = mistakes(learner={"lora": {"rank": 4}})
    assert told.startswith("learner.lora.rank: got 4") and ".[lora]" in told
    assert mistakes() == []


def test_a_divergence_between_distributions_needs_teachers_that_send_sets() -> None:
    for name in ("reverse_kl", "forward_kl", "mixed", "jsd", "multi_sample"):
        (told,) = mistakes(learner={"objective": {"divergence": name}})
        assert told.startswith(
            f"learner.objective.divergence = {name!r} needs teacher.top_k: got 0, expected one above 0, e.g. 256"
        )
        assert mistakes(learner={"objective": {"divergence": name}}, teacher={"top_k": 256}) == []
        assert warnings(learner={"objective": {"divergence": name}}, teacher={"top_k": 256}) == []
    of_two: dict[str, Any] = {"math": {"top_k": 8}, "style": {}}
    routes: dict[str, list[str]] = {"math": ["m"], "style": []}
    (told,) = mistakes(
        learner={"objective": {"divergence": "jsd"}, "tasks": {"routes": routes}}, pools=of_two, teachers=2
    )
    assert "needs pools.style.top_k: got 0" in told
    for coefs in ({"teacher_coefs": {"style": 0.0}}, {"coef": 0.0, "teacher_coefs": {"math": 1.0}}):
        learner = {"objective": {"divergence": "jsd", **coefs}, "tasks": {"routes": routes}}
        assert mistakes(learner=learner, pools=of_two, teachers=2) == []
        assert warnings(learner=learner, pools=of_two, teachers=2) == []
        (told,) = warnings(learner=learner, pools=of_two, teachers=2, teacher={"top_k": 4})
        assert told.startswith("pools.style.top_k: got 4, but learner.objective has the coefficient 0 for this pool")


def test_a_baseline_needs_teachers_that_send_sets_or_hidden_states() -> None:
    k1: dict[str, Any] = {"objective": {"divergence": {"name": "k1", "baseline": "expected_cost"}}}
    (told,) = mistakes(learner=k1)
    assert told.startswith(
        "learner.objective.divergence.baseline = 'expected_cost' of 'k1' needs teacher.top_k: got 0, expected one"
    )
    for teacher in ({"top_k": 256}, {"payload": "hidden"}):
        assert mistakes(learner=k1, teacher=teacher) == [] and warnings(learner=k1, teacher=teacher) == []


def test_hidden_states_do_for_every_divergence_between_distributions() -> None:
    for name in ("reverse_kl", "forward_kl", "mixed", "jsd", "multi_sample"):
        plain: dict[str, Any] = {"learner": {"objective": {"divergence": name}}, "teacher": {"payload": "hidden"}}
        assert mistakes(**plain) == [] and warnings(**plain) == []
    (told,) = warnings(teacher={"payload": "hidden"})
    assert told.startswith("teacher.payload: got hidden, but learner.objective.divergence = 'k1' uses only the sampled")


def test_hidden_states_that_no_learner_could_use_are_refused() -> None:
    """From servers, from an average of the student, and of more bytes than the buffer takes: the built-in teacher's
    have 160 numbers."""
    jsd: dict[str, Any] = {"objective": {"divergence": "jsd"}}
    warm = {"objective": {"divergence": {"name": "jsd", "temperature": 2.0}}}
    assert mistakes(learner=warm, teacher={"payload": "hidden"}) == []
    (told,) = mistakes(learner=warm, teacher={"top_k": 64})
    assert told.startswith("learner.objective.divergence.temperature = 2.0 needs teacher.payload = hidden")
    (told,) = mistakes(learner=jsd, teacher={"payload": "hidden", "engine": "sglang"})
    assert told.startswith(
        "teacher.engine: got 'sglang' with teacher.payload = hidden, expected 'torch', which gives its last "
        "hidden states: servers return hidden states as decimal numbers in JSON"
    )
    (told,) = mistakes(learner=jsd, teacher={"payload": "hidden"}, buffer={"max_top_k_bytes": 319})
    assert told.startswith(
        "buffer.max_top_k_bytes: got 319, expected at least 320, the bytes per token of the hidden states of models.t"
    )
    assert mistakes(learner=jsd, teacher={"payload": "hidden"}, buffer={"max_top_k_bytes": 320}) == []
    student = str(builtin.STUDENT_DIR)
    averaged: dict[str, Any] = {"learner": jsd | {"ema": {"decay": 0.9}}, "models": {"teacher": student}}
    (told,) = mistakes(**averaged, teacher={"payload": "hidden"})
    assert told.startswith("teacher.payload: got hidden with learner.ema.decay = 0.9, expected top_k")
    assert mistakes(**averaged, teacher={"top_k": 8}) == []


@pytest.mark.parametrize(
    ("plain", "said"),
    [
        ({"actor": {"engine": "sglang"}}, "with actor.engine = 'sglang', expected torch"),
        ({"pools": {"default": {"model": "builtin", "count": 1}}}, "with pools: actors mix with one teacher"),
        ({"teacher": {"tokenizer": "other"}}, "with teacher.tokenizer = other"),
        ({"learner": {"tasks": {"privileged": "{ground_truth}"}}}, "with privileged prompts"),
        ({"learner": {"ema": {"decay": 0.9}}}, "with learner.ema"),
    ],
)
def test_a_teacher_that_actors_cannot_mix_with_is_refused(plain: dict[str, Any], said: str) -> None:
    learner = plain.get("learner", {})
    tasks = {"teacher_share": 0.2, **learner.get("tasks", {})}
    told = mistakes(**{**plain, "learner": {**learner, "tasks": tasks}})
    assert any(one.startswith("learner.tasks.teacher_share: got 0.2 ") and said in one for one in told), told


def test_sets_that_nobody_looks_at_are_warned_of() -> None:
    (told,) = warnings(teacher={"top_k": 8})
    assert told.startswith("teacher.top_k: got 8, but learner.objective.divergence = 'k1' uses only the sampled token")


def test_sets_that_would_not_get_through_the_buffer_are_told() -> None:
    learner: dict[str, Any] = {"objective": {"divergence": "jsd"}}
    (told,) = warnings(learner=learner, teacher={"top_k": 256}, buffer={"max_top_k_bytes": 100})
    assert "teacher.top_k: 256 takes up to 844 bytes per token, buffer.max_top_k_bytes is 100" in told
    tight = {"batch_rollouts": 20_000}
    assert [told.split(":")[0] for told in warnings(learner=learner, teacher={"top_k": 256}, buffer=tight)] == [
        "buffer.batch_rollouts"
    ]


def test_every_token_behind_the_set_is_for_small_vocabularies(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 50_000}))
    config = build(
        RunConfig, {"learner": {"objective": {"divergence": "jsd"}}, "teacher": {"top_k": 8, "tail": "each"}}
    )
    (told,) = check_consistency(config, tmp_path).mistakes
    assert told.startswith("teacher.tail: got 'each' with 50000 rows in the embedding, expected at most 4096")


def test_an_average_of_the_student_needs_the_student_as_teacher_and_an_engine_that_reads_it() -> None:
    ema = {"learner": {"ema": {"decay": 0.9}}}
    (told,) = mistakes(**ema)
    assert told.startswith("models.teacher: got 'builtin'") and str(builtin.STUDENT_DIR) in told
    assert mistakes(**ema, models={"teacher": str(builtin.STUDENT_DIR)}) == []
    assert mistakes(**ema, models={"teacher": "org/model", "student": "org/model"}) == []
    (told,) = mistakes(**ema, models={"teacher": str(builtin.STUDENT_DIR)}, teacher={"engine": "sglang"})
    assert told.startswith("teacher.engine: got 'sglang'")
    (told,) = mistakes(learner={"ema": {"decay": 0.9, "pool": "other"}})
    assert told.startswith("learner.ema.pool: got 'other'")


def test_privileged_prompts_that_may_exceed_the_teachers_context_are_warned_of() -> None:
    told = {"privileged_tags": {"math": "{ground_truth}"}, "max_teacher_prompt_tokens": 1024}
    (warned,) = warnings(learner={"tasks": told})
    assert warned.startswith("models.teacher: its context of 1024 is less than")
    assert warnings(learner={"tasks": told | {"max_teacher_prompt_tokens": 900}}) == []
    assert warnings(learner={"tasks": told | {"privileged_tags": {}}}) == []


STUDENTS: dict[str, Any] = {"top_k": 16, "top_k_of": "student"}


def test_the_students_sets_need_engines_that_report_and_score_them() -> None:
    learner: dict[str, Any] = {"objective": {"divergence": "reverse_kl"}}
    assert mistakes(learner=learner, teacher=STUDENTS) == warnings(learner=learner, teacher=STUDENTS) == []
    plain: dict[str, Any] = {"learner": learner, "teacher": STUDENTS | {"engine": "unaware"}}
    (told,) = mistakes_with_engine(plain)
    assert told == (
        "teacher.engine: got 'unaware' with teacher.top_k_of = student, expected 'torch' or 'sglang', which scores "
        "given tokens: unaware cannot; or teacher.top_k_of = teacher"
    )
    plain = {"learner": learner, "teacher": STUDENTS, "actor": {"engine": "unaware"}}
    (told,) = mistakes_with_engine(plain)
    assert told.startswith("actor.engine: got 'unaware' with teacher.top_k_of = student, expected 'torch' or 'sglang'")
    assert mistakes_with_engine(plain | {"teacher": {"top_k": 16}}) == []


def packages(monkeypatch: pytest.MonkeyPatch, *there: str) -> None:
    """Let the checks find these packages, and no others."""

    def find(name: str) -> object:
        return object() if name in there else None

    monkeypatch.setattr(importlib.util, "find_spec", find)


def test_teachers_in_4_bits_are_embedded_and_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    in_4_bits = {"quantize": "nf4"}
    packages(monkeypatch, "accelerate")
    (told,) = mistakes(teacher=in_4_bits)
    assert told == "teacher.quantize: got nf4, and bitsandbytes is missing: pip install -e '.[bitsandbytes]'"
    packages(monkeypatch, "accelerate", "bitsandbytes")
    assert mistakes(teacher=in_4_bits) == []
    (told,) = mistakes(teacher={**in_4_bits, "engine": "sglang"})
    assert "it is of embedded teachers. For servers: --teacher.server.args=--quantization,fp8" in told
    average = {"ema": {"decay": 0.9, "pool": "default"}}
    assert [one for one in mistakes(teacher=in_4_bits, learner=average) if "become the student's average" in one]
    (told,) = mistakes(
        pools={"a": in_4_bits, "b": {"engine": "sglang", **in_4_bits}},
        teachers=2,
        learner={"tasks": {"routes": {"a": ["a"], "b": ["b"]}}},
    )
    assert told.startswith("pools.b.quantize: got nf4 with engine sglang")


def test_a_learner_in_4_bits_trains_adapters_on_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    in_4_bits: dict[str, Any] = {"lora": {"rank": 8, "quantize": "nf4"}}
    packages(monkeypatch, "peft", "accelerate")
    assert [one for one in mistakes(learner=in_4_bits) if "and bitsandbytes is missing" in one]
    packages(monkeypatch, "peft", "accelerate", "bitsandbytes")
    assert mistakes(learner=in_4_bits) == []
    for more, told in (({"ranks": 2}, "cannot be divided"), ({"ema": {"decay": 0.9}}, "is of whole weights")):
        assert [one for one in mistakes(learner={**in_4_bits, **more}) if told in one]
    with pytest.raises(ConfigError, match="would train weights in 4 bits"):
        build(RunConfig, {"learner": {"lora": {"quantize": "nf4"}}})
    run = build(RunConfig, {"learner": in_4_bits, "weights": {"adapters": "on"}, "actor": {"engine": "sglang"}})
    assert "not to those that the learner has in 4 bits" in choose_adapters(run, ()).mistakes[0]


def test_a_student_that_is_quantised_already_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "awq"}}', encoding="utf-8")
    found = check_consistency(build(RunConfig, {}), tmp_path).mistakes
    assert [one for one in found if one.startswith("models.student: ") and "is quantized already" in one]


def mistakes_with_engine(plain: dict[str, Any]) -> list[str]:
    """With an engine of another package, which knows nothing of the student's sets."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(registry.BUILT_IN, "unaware", f"{__name__}:UNAWARE")
        registry.find_engine.cache_clear()
        try:
            return mistakes(**plain)
        finally:
            registry.find_engine.cache_clear()


class Unaware(EngineProvider):
    name = "unaware"


UNAWARE = Unaware()


@pytest.mark.parametrize("name", ["forward_kl", "mixed", "jsd"])
def test_the_students_sets_with_a_divergence_of_the_teachers_likely_tokens_are_warned_of(name: str) -> None:
    (told,) = warnings(learner={"objective": {"divergence": name}}, teacher=STUDENTS)
    assert told.startswith(f"teacher.top_k_of: student with learner.objective.divergence = {name!r}")


@pytest.mark.parametrize("fields", [{"top_k": 8}, {"top_mass": 0.5}])
def test_a_pool_has_no_sets_of_its_own_where_all_score_the_students(fields: dict[str, Any]) -> None:
    plain: dict[str, Any] = {
        "learner": {"tasks": {"routes": {"math": ["m"], "style": []}}},
        "pools": {"math": fields, "style": {}},
        "teachers": 2,
    }
    assert build(RunConfig, plain | {"teacher": {"top_k": 16}}).top_ids is None
    with pytest.raises(ConfigError, match=f"pools.math.{next(iter(fields))}: got a value with teacher.top_k_of"):
        build(RunConfig, plain | {"teacher": STUDENTS})
    both = build(RunConfig, plain | {"teacher": STUDENTS, "pools": {"math": {}, "style": {}}})
    assert both.top_ids == TopIdsWanted(16, 0.999)


@pytest.mark.parametrize(
    ("lr", "bound", "objective", "top_k", "warned"),
    [
        (3e-4, 1, {}, 0, False),
        (3e-4, 4, {}, 0, True),
        (1e-3, 1, {}, 0, True),
        (1e-3, 1, {"divergence": "k3"}, 0, True),
        (1e-3, 1, {"divergence": "reverse_kl"}, 256, False),
        (1e-3, 1, {"divergence": "null"}, 0, False),
        (1e-3, 1, {"coef": 0.0, "advantage": "grpo"}, 0, False),
    ],
)
def test_a_rate_too_high_for_the_bound_gets_a_warning(
    lr: float, bound: int, objective: dict[str, Any], top_k: int, warned: bool
) -> None:
    found = [
        one
        for one in warnings(
            learner={"lr": lr, "objective": objective},
            buffer={"max_staleness": bound, "release": "rollout"},
            teacher={"top_k": top_k},
        )
        if "collapsed" in one
    ]
    assert bool(found) == warned
    assert all(f"lr: {lr:g} with buffer.max_staleness = {bound}" in one for one in found)


def test_nothing_is_known_of_the_rate_of_other_students() -> None:
    given = {"learner": {"lr": 1e-3}, "models": {"student": str(builtin.STUDENT_DIR)}}
    assert not [one for one in warnings(**given) if "collapsed" in one]


def test_memory_is_shared_with_nobody_but_the_launchers_own_processes() -> None:
    ipc: dict[str, Any] = {"weights": {"transport": "ipc"}}
    urls = {"actor": {"engine": "sglang", "urls": ["http://127.0.0.1:1"]}, "actors": 1}
    assert any("got ipc with actor.urls; expected actors on this machine" in told for told in mistakes(**ipc, **urls))
    elsewhere = {"weights": {"transport": "ipc", "host": "203.0.113.9", "allow_plain_network": True}}
    assert any("got ipc with weights.host = 203.0.113.9" in told for told in mistakes(**elsewhere))
    assert mistakes(**ipc) == []


def test_a_transport_that_nobody_has_is_told_before_anything_loads() -> None:
    (told,) = mistakes(weights={"transport": "carrier_pigeon"})
    assert told.startswith("weights.transport: got 'carrier_pigeon', expected one of auto, collective, wire, ipc")
    for known in ("auto", "wire", "stillhouse.weights.transports.wire:WireTransport"):
        assert mistakes(weights={"transport": known}) == []


def test_a_teacher_with_another_tokenizer_is_refused_where_single_tokens_are_compared() -> None:
    other = {"tokenizer": "other"}
    assert mistakes(teacher=other) == []
    (told,) = mistakes(teacher=other, learner={"objective": {"divergence": "reverse_kl"}})
    assert told.startswith("teacher.tokenizer: got other with learner.objective.divergence = 'reverse_kl' and teacher.")
    assert "k1 without a baseline" in told
    sets = {**other, "top_k": 8}
    for able in ("reverse_kl", "multi_sample"):
        assert mistakes(teacher=sets, learner={"objective": {"divergence": able}}) == []
    for unable in ("jsd", {"name": "k1", "baseline": "expected_cost"}):
        (told,) = mistakes(teacher=sets, learner={"objective": {"divergence": unable}})
        assert "top_k = 8, expected learner.objective.divergence = reverse_kl" in told
    for key, value in (("payload", "hidden"), ("top_k_of", "student"), ("tail", "each")):
        with pytest.raises(ConfigError, match=f"tokenizer: got other with {key} = {value}, expected"):
            mistakes(teacher={**sets, key: value})
    for key, value in (("domain_scale", "rms"), ("prefix_gain", 0.5), ("cost_discount", 0.5)):
        (told,) = mistakes(teacher=other, learner={"objective": {key: value}})
        assert told.startswith(f"learner.objective.{key}: got {value} with teacher.tokenizer = other, expected ")


def test_a_pool_with_another_tokenizer_has_tags_of_its_own() -> None:
    pools = {"one": {}, "far": {"tokenizer": "other"}}
    apart = {"tasks": {"routes": {"one": ["a"], "far": ["b"]}}}
    assert mistakes(pools=pools, learner=apart, teachers=2) == []
    for routes in ({"one": ["a"], "far": ["b", "a"]}, {"one": [], "far": ["a"]}):
        (told,) = mistakes(pools=pools, learner={"tasks": {"routes": routes}}, teachers=2)
        assert told.startswith("pools.far.tokenizer: got other, and other pools score its tags (a), expected tags of ")


@pytest.mark.parametrize(
    ("plain", "told"),
    [
        ({"learner": {"ranks": 2}}, "learner.ranks = 2; expected 1"),
        ({"launch": {"backend": "ray"}}, "workers on several hosts; expected launch.backend = local"),
        ({"cluster": {"actors": {"each": 1}}}, "workers on several hosts; expected launch.backend = local"),
        ({"teacher": {"engine": "sglang", "urls": ["http://127.0.0.1:1"]}}, "teacher.urls; expected servers that the"),
        ({"teacher": {"engine": "sglang"}, "actor": {"engine": "sglang"}}, ""),
        ({"actor": {"engine": "tests.integration.scripted_engine:PROVIDER"}}, ""),
        ({}, ""),
    ],
)
def test_turns_are_refused_where_they_cannot_be(plain: dict[str, Any], told: str) -> None:
    found = mistakes(**{**plain, "launch": {"share": "turns", **plain.get("launch", {})}})
    assert [one for one in found if told and told in one] or not told
    assert bool([one for one in found if "got turns" in one]) == bool(told), found
    assert not [one for one in mistakes(**plain) if "got turns" in one]
