"""The model card of an exported student: README.md with the front matter that the Hugging Face hub reads.

It is made of the run's configuration and figures, as of the checkpoint. Names from files are shown as code, so that no
text of others is read as Markdown. Paths are shown by their last name, and no addresses of servers at all.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar, cast

import msgspec
import yaml
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from stillhouse.launch.config.files import read_config
from stillhouse.launch.config.run import RunConfig
from stillhouse.launch.errors import ConfigError
from stillhouse.launch.report.summary import LearnerAccount, Staleness
from stillhouse.learner.checkpoints.files import TRAINER, read_manifest
from stillhouse.learner.evaluation.figures import EvalPoint
from stillhouse.learner.reports.settings import all_settings
from stillhouse.protocol.messages import Ledger
from stillhouse.protocol.printable import printable

SUMMARY: Final = "summary.json"
CARD: Final = "README.md"
PACKAGES: Final = ("stillhouse", "torch", "transformers", "tokenizers", "safetensors", "peft")
SETTINGS: Final = (
    *("learner.objective.divergence.name", "learner.objective.importance.name", "learner.objective.coef"),
    *("learner.lr", "learner.schedule", "learner.updates_per_batch", "learner.lora.rank", "seed"),
    *("learner.tasks.group_size", "learner.tasks.max_new_tokens", "learner.tasks.temperature"),
    *("learner.offline.student_fraction", "buffer.batch_rollouts", "buffer.max_staleness", "teacher.top_k"),
)
"""Shown whatever they are; of learner.objective what differs from its default, too."""
FIGURES: Final = ("accuracy_greedy", "accuracy_sampled", "reward_greedy", "reward_sampled", "reverse_kl")
_MOST_CARD_BYTES: Final = 1 << 20
_MOST_CHARS: Final = 120
_LICENCE: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9.\-]{0,60}")
"""What may be a licence's identifier on the hub."""
_FRONT_MATTER: Final = re.compile(r"\ufeff?---[ \t]*\r?\n(.*?)^---[ \t]*\r?$", re.DOTALL | re.MULTILINE)
_CACHED: Final = re.compile(r"models--([^/]+?)--([^/]+)")
StructT = TypeVar("StructT", bound=msgspec.Struct)


class _Account(LearnerAccount, frozen=True, kw_only=True):
    """summary.json, or learner.json, which has no staleness."""

    staleness: Staleness | None = None


class _Trainer(msgspec.Struct, frozen=True):
    """Parts of trainer.json."""

    ledger: Ledger | None = None
    metrics: dict[str, float | None] = {}


class Model(NamedTuple):
    """A model that a run names."""

    name: str
    hub_id: str | None
    """Only if it surely came from the hub: it is in the hub's cache."""
    licence: str | None


def model_card(checkpoint: Path, run: Path | None, name: str) -> str:
    """Without `run`, and where its files cannot be read, which is reported, the card says less. Raises CheckpointError
    for no checkpoint."""
    step = read_manifest(checkpoint).version.step
    config = _config(run)
    trainer = _read(checkpoint / TRAINER, _Trainer) or _Trainer()
    files = () if run is None else (run / SUMMARY, run / "learner.json")
    account = next((found for file in files if (found := _read(file, _Account)) is not None), None)
    student = model_named(config.models.student) if config is not None else None
    teachers = {pool: model_named(model) for pool, model in _teachers(config).items()}
    sections = (
        f"# {_text(name)}",
        "Trained by on-policy distillation with Stillhouse: the student wrote, teachers scored each of its tokens, "
        "and it learnt from the scores.",
        _table(("", ""), _facts(config, student, teachers, step)),
        "## Figures",
        _figures(account, trainer, step) or "None are known.",
        *(("## Settings", _table(("key", "value"), _settings(config))) if config is not None else ()),
        "## Use",
        "`AutoModelForCausalLM.from_pretrained` and `AutoTokenizer.from_pretrained` load this folder, and so do "
        "servers such as SGLang. The chat template belongs to the tokenizer.",
        "## Packages",
        _table(("package", "version"), _versions()),
    )
    return f"---\n{_front_matter(student)}---\n\n" + "\n\n".join(sections) + "\n"


def _front_matter(student: Model | None) -> str:
    """YAML as the hub reads it."""
    data: dict[str, Any] = {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["on-policy-distillation", "stillhouse"],
    }
    if student is not None and student.hub_id is not None:
        data["base_model"] = student.hub_id
    if student is not None and student.licence is not None:
        data["license"] = student.licence
    return yaml.safe_dump(data, sort_keys=False)


def _facts(
    config: RunConfig | None, student: Model | None, teachers: Mapping[str, Model], step: int
) -> Iterator[tuple[str, str]]:
    models = {"student before": student} if student is not None else {}
    models |= {"teacher" if pool == "" else f"teacher {_code(pool)}": model for pool, model in teachers.items()}
    for label, model in models.items():
        licence = f"licence {_code(model.licence)}" if model.licence else "its licence is not known here"
        yield label, f"{_code(model.name)}, {licence}"
    if config is not None:
        tasks = config.learner.tasks
        yield "prompts", _code(_base_name(tasks.prompts))
        if tasks.eval_prompts:
            yield "evaluation prompts", _code(_base_name(tasks.eval_prompts))
        yield "environment", _code(_base_name(tasks.env))
        yield "objective", _code(str(all_settings(config).get("learner.objective.divergence.name", "none")))
    else:
        yield "run", "its configuration is not known here"
    yield "optimizer steps", str(step) if config is None else f"{step} of {config.steps}"


def _teachers(config: RunConfig | None) -> dict[str, str]:
    """Pool -> model; the pool is empty if there is only one."""
    if config is None or not config.learner.objective.has_divergence:
        return {}
    if not config.pools:
        api = config.teacher.api
        return {"": (api.model or "behind an API") if api.url else config.models.teacher}
    return {
        name: (pool.api.model or "behind an API") if pool.api.url else pool.model or config.models.teacher
        for name, pool in config.pools.items()
    }


def _figures(account: _Account | None, trainer: _Trainer, step: int) -> str:
    parts: list[str] = []
    rows: list[tuple[str, str]] = []
    if account is not None:
        points = [one for one in (*account.eval, *account.eval_sets) if one.step <= step]
        for name in dict.fromkeys(one.name for one in points):
            of_set = sorted((one for one in points if one.name == name), key=lambda one: one.step)
            parts.append(_evaluation(name, of_set))
    if (kl := trainer.metrics.get("reverse_kl")) is not None:
        rows.append(("reverse KL per token of the last batch, nats", f"{kl:.4g}"))
    if trainer.ledger is not None:
        tokens = trainer.ledger.tokens
        rows.append(("tokens trained, of those accepted", f"{tokens.trained:,} of {tokens.accepted:,}"))
    if account is not None and account.staleness is not None and account.steps == step:
        late = account.staleness
        rows.append(("staleness, optimizer steps", f"mean {late.mean:.2f}, max {late.max}, bound {late.bound}"))
    return "\n\n".join((*parts, *((_table(("training", ""), rows),) if rows else ())))


def _evaluation(name: str, points: Sequence[EvalPoint]) -> str:
    shown = [points[0]] if len(points) == 1 else [points[0], points[-1]]
    rows: list[tuple[str, ...]] = []
    for figure in FIGURES:
        values = [getattr(point, figure) for point in shown]
        if any(value is not None for value in values):
            label = "reverse KL per token, nats" if figure == "reverse_kl" else figure.replace("_", ", ")
            rows.append((label, *("-" if value is None else f"{value:.4g}" for value in values)))
    rows.append(("answers, greedy and sampled", *(f"{one.n_greedy} and {one.n_sampled}" for one in shown)))
    title = f"evaluation {_code(name)}" if name else "evaluation"
    return _table((title, *(f"step {point.step}" for point in shown)), rows)


def _settings(config: RunConfig) -> Iterator[tuple[str, str]]:
    settings, defaults = all_settings(config), all_settings(RunConfig())
    for key, value in settings.items():
        changed = key.startswith("learner.objective.") and defaults.get(key) != value
        if key in SETTINGS or changed:
            yield _code(key), _code(_base_name(str(value)))


def _versions() -> Iterator[tuple[str, str]]:
    for package in PACKAGES:
        try:
            yield package, _code(version(package))
        except PackageNotFoundError:
            continue


def model_named(model: str) -> Model:
    """What can be known of a model without asking the network."""
    folder = Path(model).expanduser()
    cached = next((found for part in folder.parts if (found := _CACHED.fullmatch(part))), None)
    if folder.is_absolute() or folder.is_dir():
        hub_id = f"{cached[1]}/{cached[2]}" if cached else None
        return Model(hub_id or _base_name(str(folder.resolve())), hub_id, _licence(folder / CARD))
    try:
        known = isinstance(try_to_load_from_cache(model, "config.json"), str)
        card = try_to_load_from_cache(model, CARD)
    except HFValidationError:
        return Model(_base_name(model), None, None)
    return Model(model, model if known else None, _licence(Path(card)) if isinstance(card, str) else None)


def _licence(card: Path) -> str | None:
    """The licence of a model card's front matter; None for whatever else is there."""
    try:
        with card.open("rb") as file:
            text = file.read(_MOST_CARD_BYTES).decode("utf-8", errors="replace")
        found = _FRONT_MATTER.match(text)
        data: object = yaml.safe_load(found[1]) if found else None
    except (OSError, yaml.YAMLError, ValueError, RecursionError):
        return None
    if not isinstance(data, dict):
        return None
    fields = cast(dict[object, object], data)
    licence = fields.get("license_name") if fields.get("license") == "other" else fields.get("license")
    return licence if isinstance(licence, str) and _LICENCE.fullmatch(licence) else None


def _config(run: Path | None) -> RunConfig | None:
    file = None if run is None else run / "config.yaml"
    if file is None or not file.is_file():
        return None
    try:
        return read_config(file)
    except ConfigError as error:
        print(f"stillhouse: the model card says less: {error}", file=sys.stderr)
        return None


def _read(file: Path, kind: type[StructT]) -> StructT | None:
    """None without the file, and for one that cannot be read."""
    if not file.is_file():
        return None
    try:
        return msgspec.json.decode(file.read_bytes(), type=kind)
    except (OSError, msgspec.MsgspecError) as error:
        print(f"stillhouse: the model card says less: {file}: {error}", file=sys.stderr)
        return None


def _base_name(text: str) -> str:
    """The last name of a path or URL; a name of the hub (OWNER/NAME), and what is no path, as it is."""
    if "://" in text or text.startswith(("/", "~", ".")) or "\\" in text or text.count("/") > 1:
        return re.split(r"[/\\]", text.rstrip("/\\"))[-1]
    return text


def _text(text: str) -> str:
    """For Markdown outside of code."""
    return re.sub(r"([\\`*_\[\]<>#|~&])", r"\\\1", printable(text)[:_MOST_CHARS])


def _code(text: str) -> str:
    """As code in a cell of a table, in which nothing is read as Markdown or HTML."""
    shown = printable(text)[:_MOST_CHARS].replace("`", "'").replace("|", "\\|").strip()
    return f"`{shown}`" if shown else "(empty)"


def _table(heads: Sequence[str], rows: Iterator[tuple[str, ...]] | Sequence[tuple[str, ...]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
