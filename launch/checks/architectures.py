"""Checks of what workers would make of models, by their files alone: architecture, tokenizer, ids, heads, numbers.

`refusals` is what a run asks before it starts a process. transformers, which knows architectures, imports torch, which
takes seconds: so well-known types, whose config.json says nothing unusual, are not looked up.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, cast

import tokenizers

from stillhouse.launch.checks.model_files import read_vocabulary
from stillhouse.launch.config.pools import engine_of, teacher_pools
from stillhouse.launch.config.run import RunConfig
from stillhouse.models.description import known_vocabulary_size
from stillhouse.models.safetensors_header import head_beside_embedding, nonfinite_tensors, read_headers

PLAIN_TYPES: Final = frozenset({"gemma2", "gpt2", "llama", "mistral", "phi3", "qwen2", "qwen3", "qwen3_moe", "smollm3"})
"""Types of model that need no look by transformers."""
_STATIC_ROPES: Final = frozenset({None, "default", "linear", "llama3", "yarn"})
_SCANNED_BYTES: Final = 256 * 2**20
"""Weights of more bytes are not read before a worker loads them."""


def refusals(config: RunConfig) -> Iterator[str]:
    """Mistakes. `config` names folders. Well under a second where no architecture must be looked up."""
    seen: set[bytes] = set()
    for key, name, loads in _models(config):
        folder = Path(name)
        yield from _tokenizer(key, folder, seen)
        try:
            yield from _weights(key, folder, loads=loads)
        except (OSError, ValueError):
            continue  # told by `launch.checks.model_files.check_weights`
    run_here = [name for key, name, loads in _models(config) if loads or key == "models.student"]
    if _divides(config) or not all(_is_plain(Path(name)) for name in run_here):
        yield from architectures(config)


def architectures(config: RunConfig) -> Iterator[str]:
    """Mistakes in the architectures that torch runs in a worker, by transformers. A server checks its own when it
    starts."""
    from stillhouse.models import packed  # imports torch
    from stillhouse.models.loading import ModelError, load_config
    from stillhouse.models.rotary import moving_rope

    for key, name, loads in _models(config):
        if not loads and key != "models.student":
            continue
        try:
            packed.refuse_bidirectional(found := load_config(name))
            if key == "models.student" and _divides(config):
                packed.refuse_undividable(found)
        except (ModelError, packed.PackingError) as error:
            yield f"{key}: {error}"
            continue
        if key == "models.student" and loads and config.actors and (kind := moving_rope(found)):
            yield (
                f"{key}: {name} has rope_type {kind!r}, whose frequencies change with the length of the batch; the "
                "embedded engine cannot generate with it: expected another student, or actor.engine = sglang"
            )


def _models(config: RunConfig) -> Iterator[tuple[str, str, bool]]:
    """(key, folder, whether actors or teachers run it with torch)."""
    yield "models.student", config.models.student, engine_of(config, "actor").loads_model
    for pool in teacher_pools(config):
        yield pool.model_key, pool.config.models.teacher, engine_of(pool.config, "teacher").loads_model


def _divides(config: RunConfig) -> bool:
    return config.learner.context_parallel > 1


def _is_plain(folder: Path) -> bool:
    """Whether config.json says nothing that transformers would have to be asked about."""
    try:
        said = cast("dict[str, Any]", json.loads((folder / "config.json").read_text(encoding="utf-8")))
        ropes = [said.get(name) or {} for name in ("rope_scaling", "rope_parameters")]
        kinds = {one.get("rope_type", one.get("type")) for one in ropes}
        made_for = cast("list[str]", said.get("architectures") or [])
        layers = set(cast("list[str]", said.get("layer_types") or []))
    except (OSError, ValueError, AttributeError, TypeError):
        return False
    return (
        said.get("model_type") in PLAIN_TYPES
        and all(name.endswith(("ForCausalLM", "LMHeadModel")) for name in made_for)
        and layers <= {"full_attention", "sliding_attention"}
        and kinds <= _STATIC_ROPES
        and said.get("is_causal", True) is True
    )


def _tokenizer(key: str, folder: Path, seen: set[bytes]) -> Iterator[str]:
    """`seen`: files that were read before, which are the same for most teachers."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        return
    vocabulary, rows = read_vocabulary(file) or {}, known_vocabulary_size(folder)
    token, largest = max(vocabulary.items(), key=lambda item: item[1], default=("", -1))
    if rows is not None and largest >= rows:
        yield (
            f"{key}: {file} has the id {largest} ({token!r}), past the {rows} rows of the embedding (config.json's "
            "vocab_size); the tokenizer belongs to another model, or resize_token_embeddings was forgotten"
        )
    if (content := file.read_bytes()) not in seen:
        seen.add(content)
        try:
            tokenizers.Tokenizer.from_buffer(content)
        except Exception as error:  # the library raises Exception itself
            yield (
                f"{key}: {file} does not load: {error}; it may have been written by a newer release of tokenizers than "
                f"{tokenizers.__version__}, which is installed here"
            )


def _weights(key: str, folder: Path, *, loads: bool) -> Iterator[str]:
    headers = read_headers(folder)
    if sum(file.stat().st_size for file in headers) <= _SCANNED_BYTES:
        for file, header in headers.items():
            if names := nonfinite_tensors(file, header):
                yield f"{key}: {file}: {len(names)} tensors have NaN or infinity in them, e.g. {names[:3]}"
    if not loads and _says_tied(folder) and (name := head_beside_embedding(headers)):
        yield (
            f"{key}: {folder} has an output head of its own ({name}), which torch uses, while its config.json says "
            "tie_word_embeddings, by which a server would use the embedding; set it to false, or take the head out"
        )


def _says_tied(folder: Path) -> bool:
    said = cast(Mapping[str, Any], json.loads((folder / "config.json").read_text(encoding="utf-8")))
    return bool({**said, **(said.get("text_config") or {})}.get("tie_word_embeddings", False))
