"""Finds the files of a model: a folder, or a name on the model hub. No torch, no transformers, and no client of the hub
(0.5 s to import) where no name is asked for."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Final, cast

_TOKENIZER_FILES: Final = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
_HUB_TIMEOUT_S: Final = 5.0


class TokenizerError(ValueError):
    """A tokenizer cannot be loaded, or cannot render this prompt. The message says what to change."""


def model_source(path: str | Path) -> tuple[str, bool]:
    """(name for from_pretrained, local files only). Raises TokenizerError where there is no model: wrong path (with the
    nearest name), a folder without tokenizer files, a hub name that is neither cached nor reachable."""
    folder = Path(path).expanduser()
    name = str(path)
    if folder.is_dir():
        if not any((folder / file).is_file() for file in _TOKENIZER_FILES):
            found = sorted(entry.name for entry in folder.iterdir())[:12]
            raise TokenizerError(
                f"no tokenizer in {name!r}: expected one of {', '.join(_TOKENIZER_FILES)}, found {found or 'nothing'}"
            )
        return str(folder), True
    if folder.exists():
        raise TokenizerError(f"{name!r} is a file, expected a Hugging Face model folder; its parent, perhaps?")
    nearest = _nearest_sibling(folder)
    hint = f"; did you mean {nearest!r}?" if nearest else ""
    if folder.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise TokenizerError(f"no folder {name!r}: expected a Hugging Face model folder{hint}")
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    try:
        HfApi().model_info(name, timeout=_HUB_TIMEOUT_S)
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise TokenizerError(f"{name!r} is neither a local folder nor a model on the hub{hint}") from error
    except Exception as error:  # connection errors: their classes differ between versions of the hub's client
        return _cached_only(name, hint, error)
    return name, False


def model_file(path: str | Path, filename: str) -> Path | None:
    """This file of the model, downloaded if needed; None if the model has none. Raises TokenizerError as `model_source`
    does, and when the download fails."""
    name, local_only = model_source(path)
    if Path(name).is_dir():
        file = Path(name) / filename
        return file if file.is_file() else None
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError

    try:
        return Path(hf_hub_download(name, filename, local_files_only=local_only))
    except EntryNotFoundError:
        return None
    except (OSError, HfHubHTTPError) as error:
        raise TokenizerError(f"{filename} of {name!r} cannot be downloaded: {first_line(error)}") from error


def stop_ids(path: str | Path, *found: object) -> tuple[int, ...]:
    """All ids in `found`, each an id, a list of ids or None, ascending. Raises TokenizerError when there is none: every
    rollout would run into its length limit."""
    ids: set[int] = set()
    for value in found:
        listed = cast("list[object]", value if isinstance(value, list | tuple) else [] if value is None else [value])
        if not all(isinstance(item, int) for item in listed):
            raise TokenizerError(f"eos_token_id must be an id or a list of ids, got {value!r}")
        ids.update(cast("list[int]", listed))
    if not ids:
        raise TokenizerError(
            f"{str(path)!r} names no end-of-sequence token: expected eos_token_id in generation_config.json or "
            "config.json, or an eos_token in tokenizer_config.json"
        )
    return tuple(sorted(ids))


def first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _cached_only(name: str, hint: str, error: Exception) -> tuple[str, bool]:
    """The hub does not answer: use what was downloaded before, else raise TokenizerError without retries."""
    from huggingface_hub import try_to_load_from_cache

    if not isinstance(try_to_load_from_cache(name, "config.json"), str):
        raise TokenizerError(
            f"{name!r} is not a local folder, is not in the hub's cache, and the hub cannot be reached "
            f"({first_line(error)}){hint}"
        ) from error
    return name, True


def _nearest_sibling(folder: Path) -> str | None:
    parent = folder.parent
    if not parent.is_dir():
        return None
    names = [entry.name for entry in parent.iterdir() if entry.is_dir()]
    close = difflib.get_close_matches(folder.name, names, n=1)
    return str(parent / close[0]) if close else None
