"""Checks of model folders: the files are there and whole, and teachers have the student's vocabulary. No torch.

The header of a safetensors file says how long it must be; a copy or download that was cut short is shorter.

Token-to-id maps of student and teacher must be equal. Sizes prove nothing: models pad their embedding rows past the
vocabulary, and two vocabularies of one size may order their tokens differently. tokenizer.json is read here; where a
model has none, the handshake with the buffer compares fingerprints (protocol.handshake).
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple, cast

from stillhouse import builtin
from stillhouse.launch.config.run import BUILTIN
from stillhouse.launch.errors import ConfigError
from stillhouse.models.description import known_vocabulary_size
from stillhouse.models.safetensors_header import (
    INDEX_FILE,
    SINGLE_FILE,
    coded_weights,
    indexed_files,
    known_header,
    weight_files,
)
from stillhouse.protocol.handshake import vocab_fingerprint, vocab_tokens

ADAPTER: Final = "adapter_config.json"
_MODELOPT: Final = "hf_quant_config.json"
"""Where ModelOpt says how it quantized, for servers."""
_SAYS_HOW: Final = ("quantization_config", "compression_config")
"""Where config.json says it."""
NAMED: Final = 3
"""Number of differing tokens that a message names."""
Json = Mapping[str, object]
Vocabulary = Mapping[str, int]


def has_no_weights(folder: Path) -> bool:
    return not any(folder.glob("*.safetensors")) and not any(folder.glob("*.bin"))


def find_model(key: str, named: str, *, weights: bool = True) -> Path:
    """Find a model's folder and check that its files are there, its `weights` among them. A name that is not a
    folder is downloaded from the model hub, or found in its cache. Raises ConfigError."""
    if named == BUILTIN:
        folder = builtin.STUDENT_DIR if key.endswith("student") else builtin.TEACHER_DIR
        if not folder.is_dir():
            raise ConfigError(f"{key}: the built-in model {folder} is missing; make it with `stillhouse builtin build`")
    else:
        folder = Path(named).expanduser()
    if not folder.exists() and _looks_like_hub_name(named):
        folder = _from_hub(key, named)
    if not folder.is_dir():
        raise ConfigError(f"{key}: no folder {named!r}{nearest_path(folder)}")
    missing = [name for name in ("config.json",) if not (folder / name).is_file()]
    if weights and has_no_weights(folder):
        missing.append("*.safetensors")
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        missing.append("tokenizer.json")
    if missing:
        raise ConfigError(f"{key}: {folder} is not a Hugging Face model folder, it lacks {', '.join(missing)}")
    model_type(folder)
    return folder.absolute()


def model_type(folder: Path) -> str:
    """`model_type` of config.json. Raises ConfigError."""
    file = folder / "config.json"
    try:
        named = cast(Json, json.loads(file.read_text(encoding="utf-8"))).get("model_type")
    except (json.JSONDecodeError, UnicodeDecodeError, AttributeError) as error:
        raise ConfigError(f"{file} is not a JSON object: {error}") from error
    if not isinstance(named, str):
        raise ConfigError(f"{file}: model_type is {named!r}, expected a name like qwen3")
    return named


def _looks_like_hub_name(named: str) -> bool:
    return named.count("/") <= 1 and not named.startswith((".", "/", "~")) and not named.endswith("/")


def _from_hub(key: str, name: str) -> Path:
    """The local snapshot of a model on the hub; files that are not in the cache are downloaded."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    wanted = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.py"]  # code is not run, but exported
    try:
        HfApi().model_info(name, timeout=5.0)
    except (HFValidationError, RepositoryNotFoundError):
        raise ConfigError(
            f"{key}: {name!r} is neither a folder nor a model on the hub{nearest_path(Path(name))}"
        ) from None
    except Exception as unreachable:  # connection errors; their classes differ between versions of the hub client
        try:
            return Path(snapshot_download(name, local_files_only=True, allow_patterns=wanted))
        except OSError:
            raise ConfigError(
                f"{key}: no folder {name!r}, it is not in the model hub's cache, and the hub cannot be reached "
                f"({type(unreachable).__name__}){nearest_path(Path(name))}"
            ) from None
    return Path(snapshot_download(name, allow_patterns=wanted))


def nearest_path(path: Path) -> str:
    """`; did you mean ...?` with the nearest name in the same folder, or nothing."""
    if not path.parent.is_dir():
        return f"; nor is there {str(path.parent)!r}"
    near = difflib.get_close_matches(path.name, [entry.name for entry in path.parent.iterdir()], n=1)
    return f"; did you mean {str(path.parent / near[0])!r}?" if near else ""


class WeightFiles(NamedTuple):
    """Findings about the weights of one model folder."""

    mistakes: list[str]
    parameters: int
    """Number of parameters in all complete safetensors files; 0 if there are none."""


def check_weights(key: str, folder: Path) -> WeightFiles:
    """Check the safetensors files of a folder; other formats are not checked. Mistakes begin with `key`, a key of the
    configuration."""
    mistakes, parameters = [f"{key}: {found}" for found in _wrong_files(folder)], 0
    texts = [
        file.read_text(encoding="utf-8", errors="replace")
        for name in ("config.json", _MODELOPT)
        if (file := folder / name).is_file()
    ]
    says_how = len(texts) > 1 or any(name in text for text in texts for name in _SAYS_HOW)
    for file in weight_files(folder) if not mistakes else ():
        try:
            header = known_header(file)
            parameters += header.parameters
            if not says_how and (codes := coded_weights(header)):
                mistakes.append(
                    f"{key}: {file} holds {len(codes)} weights as codes of one byte ({codes[0]}, ...), and config.json "
                    "has no quantization_config: their scales would not be used; expected one, or bfloat16 or float32"
                )
        except (OSError, ValueError) as error:
            mistakes.append(f"{key}: {file}: {error}; copy or download it again")
    return WeightFiles(mistakes, parameters)


def _wrong_files(folder: Path) -> Iterator[str]:
    try:
        names = indexed_files(folder)
    except (OSError, ValueError) as error:
        yield str(error)
        return
    if names and SINGLE_FILE not in names and (folder / SINGLE_FILE).is_file():
        yield (
            f"{folder} holds {SINGLE_FILE} and a {INDEX_FILE} of other files ({names[0]}, ...): transformers reads the "
            "first, SGLang and vLLM the others; move what is old out of the folder"
        )
    elif lacking := [name for name in names if not (folder / name).is_file()]:
        yield f"{folder} lacks {len(lacking)} of the {len(names)} files that {INDEX_FILE} names: {lacking[0]}"
    if (folder / ADAPTER).is_file():
        yield (
            f"{folder} holds {ADAPTER} beside whole weights: transformers reads the adapters, and the weights that "
            "they name, in place of those; move them out of the folder, or merge them first"
        )


def check_teachers(student: Path, teachers: Mapping[str, Path]) -> list[str]:
    """Return the mistakes. `teachers`: key of the configuration -> model folder."""
    ours = read_vocabulary(student / "tokenizer.json")
    return [mistake for key, folder in teachers.items() for mistake in _check(key, student, ours, folder)]


def _check(key: str, student: Path, ours: Vocabulary | None, teacher: Path) -> Iterator[str]:
    theirs = read_vocabulary(teacher / "tokenizer.json")
    if ours is None or theirs is None:
        return
    if vocab_fingerprint(ours) != vocab_fingerprint(theirs):
        yield (
            f"{key}: its tokenizer differs from the student's ({len(ours)} tokens in {student}, {len(theirs)} in "
            f"{teacher}): {differences(ours, theirs)}; a teacher scores the student's token ids, so it needs the same "
            "token-to-id map"
        )
        return
    rows, student_rows = known_vocabulary_size(teacher), known_vocabulary_size(student)
    # Rows past the vocabulary are padding, and models differ in how many they have.
    if rows is not None and student_rows is not None and rows < min(student_rows, vocab_tokens(ours)):
        yield (
            f"{key}: got {rows} embedding rows (vocab_size in {teacher / 'config.json'}), expected at least "
            f"{min(student_rows, vocab_tokens(ours))}, the ids that the student can sample; it could not score the rest"
        )


def differences(ours: Vocabulary, theirs: Vocabulary) -> str:
    """Describe how many tokens differ, with the first ones by id."""
    other_id = sorted((i, token) for token, i in ours.items() if token in theirs and theirs[token] != i)
    only_ours = sorted((i, token) for token, i in ours.items() if token not in theirs)
    only_theirs = sorted((i, token) for token, i in theirs.items() if token not in ours)
    parts: list[str] = []
    if other_id:
        named = ", ".join(
            f"{token!r} is {i} for the student and {theirs[token]} for the teacher" for i, token in other_id[:NAMED]
        )
        parts.append(f"{len(other_id)} with another id, first {named}")
    for whose, tokens in (("the student's", only_ours), ("the teacher's", only_theirs)):
        if tokens:
            named = ", ".join(f"{token!r} ({i})" for i, token in tokens[:NAMED])
            parts.append(f"{len(tokens)} in {whose} only, first {named}")
    return "; ".join(parts)


def read_vocabulary(file: Path) -> dict[str, int] | None:
    """Token -> id, with added tokens; None if the file does not exist or is of a kind without a readable map."""
    if not file.is_file():
        return None
    try:
        content = cast(Json, json.loads(file.read_text(encoding="utf-8")))
        listed = cast(Json, content["model"])["vocab"]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ConfigError(f"{file} is not a tokenizer file: {error!r}") from error
    if isinstance(listed, Mapping):
        vocab = dict(cast(Mapping[str, int], listed))
    else:  # Unigram: [[token, score], ...], the id is the position
        vocab = {token: i for i, (token, _) in enumerate(cast(list[tuple[str, float]], listed))}
    for added in cast(list[dict[str, object]], content.get("added_tokens") or []):
        vocab[str(added["content"])] = int(str(added["id"]))
    return vocab
