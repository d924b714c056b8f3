"""Checks a prompts file without torch, in a moment: the columns and the environments that its first rows name, and the
options that any row sets. The learner reads and checks more of it (learner.prompts.data), and so does `--check`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, cast

from stillhouse.actors.config import EnvConfig
from stillhouse.actors.envs.registry import UnknownEnvironment, check_options, lacking_options, options_of_row
from stillhouse.launch.checks.model_files import nearest_path
from stillhouse.learner.prompts.data import open_prompts
from stillhouse.learner.prompts.known_sets import HUB
from stillhouse.learner.prompts.records import (
    NO_COLUMNS,
    DataError,
    RowError,
    check_columns,
    expect_known_environment,
    unique_keys,
)

ROWS_CHECKED: Final = 1_000
NEEDED: Final = ("prompt", "messages")
Json = Mapping[str, object]


def check_prompts(
    key: str, given: str | Path, environments: Mapping[str, EnvConfig], columns: Mapping[str, str] = NO_COLUMNS
) -> list[str]:
    """Check the first rows of a prompts file, and the `env_options` of all. `environments`: those of the run.
    `columns`: field -> the column that has it. A data set with a name is loaded, and with that in the cache of its
    library before the learner needs it."""
    check, given = EnvironmentCheck(key, environments, columns), str(given)
    if given.startswith(HUB):
        return _check_data_set(key, given, check)
    path = Path(given).expanduser()
    if not path.exists():
        return [f"{key}: no file {str(path)!r}{nearest_path(path)}"]
    try:
        if path.is_dir():
            return _check_folder(key, path, check)
        if path.suffix == ".parquet":
            return _check_parquet(key, path, check)
        if path.suffix in (".jsonl", ".json"):
            return next((mistakes for row in _first_rows(key, path, check) if (mistakes := row)), [])
    except (OSError, ValueError, ImportError) as error:
        return [f"{key}: {path}: {error}"]
    return [f"{key}: {path} is a {path.suffix or 'suffixless'} file, expected .jsonl, .parquet or a datasets folder"]


def absolute_prompts(given: str) -> str:
    """A path of prompts from the root on, so that it means the same in every worker."""
    name, *rest = given.removeprefix(HUB).split(":") if given.startswith(HUB) else (given,)
    if not given or (given.startswith(HUB) and not Path(name).expanduser().exists()):
        return given  # none, or a name of the hub
    path = str(Path(name).expanduser().absolute())
    return HUB + ":".join([path, *rest]) if given.startswith(HUB) else path


def _first_rows(key: str, path: Path, check: EnvironmentCheck) -> Iterator[list[str]]:
    seen = 0
    # As JSON may write it: with escapes for its letters too.
    options = re.compile(re.escape(check.columns.get("env_options", "env_options")) + r"|\\u00[2-7]")
    with path.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip() or (seen >= ROWS_CHECKED and not options.search(line)):
                continue
            try:
                row: object = json.loads(line, object_pairs_hook=unique_keys)
            except ValueError as error:
                yield [f"{key}: {path}:{number} cannot be read: {error}"]
                return
            if not isinstance(row, dict):
                yield [f"{key}: {path}:{number}: got {type(row).__name__}, expected an object with prompt or messages"]
                return
            fields = cast(Json, row)
            where = f"{path}:{number}"
            # As everywhere in JSONL, a later row may leave out what is optional.
            needed = {field: name for field, name in check.columns.items() if seen == 0 or field in NEEDED}
            columns = _check_columns(key, where, list(fields), needed) if seen < ROWS_CHECKED else []
            yield columns or check(where, fields, names_only=seen >= ROWS_CHECKED)
            seen += 1
    if seen == 0:
        yield [f"{key}: {path} holds no prompts"]


def _check_columns(key: str, where: object, found: list[str], columns: Mapping[str, str]) -> list[str]:
    if {"prompt", "messages"} & ({*found} | {*columns}):
        try:
            check_columns(found, str(where), columns)
        except DataError as error:
            return [f"{key}: {error}"]
        return []
    return [
        f"{key}: {where}: got the fields {', '.join(found) or '(none)'}; expected prompt (text) or messages "
        "(--learner.tasks.columns.prompt NAME, if it has another name)"
    ]


def _check_folder(key: str, path: Path, check: EnvironmentCheck) -> list[str]:
    if (path / "dataset_info.json").is_file():
        features: object = json.loads((path / "dataset_info.json").read_text(encoding="utf-8")).get("features")
        names = list(cast(Json, features)) if isinstance(features, Mapping) else []
        if names and (mistakes := _check_columns(key, path, names, check.columns)):
            return mistakes
        wanted = check.columns.get("env_options", "env_options") in names
        return _check_data_set(key, str(path), check) if wanted else []
    if parquet := sorted(path.rglob("*.parquet")):
        return next((mistakes for file in parquet if (mistakes := _check_parquet(key, file, check))), [])
    if (path / "dataset_dict.json").is_file():
        splits = cast(Json, json.loads((path / "dataset_dict.json").read_text(encoding="utf-8"))).get("splits")
        return [f"{key}: {path} holds the splits {splits}; name one of them, e.g. {path}/train"]
    return [f"{key}: the folder {path} holds neither a saved dataset (dataset_info.json) nor .parquet files"]


def _check_data_set(key: str, given: str, check: EnvironmentCheck) -> list[str]:
    """What the library `datasets` reads."""
    try:
        source = open_prompts(given, check.environments, check.columns)
        for row in range(len(source)):
            fields = cast("dict[str, object]", json.loads(source.read(row).columns or b"{}"))
            if row == 0 and "env_options" not in fields:
                return []  # a table has the same columns in all rows
            named = fields.get("env"), fields.get("env_options")
            if mistakes := check.of_fields(f"{given}, row {row}", *named, names_only=row >= ROWS_CHECKED):
                return mistakes
    except DataError as error:
        return [f"{key}: {error}"]
    return []


def _check_parquet(key: str, path: Path, check: EnvironmentCheck) -> list[str]:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise ImportError("reading Parquet needs pyarrow: pip install -e '.[data]'") from error
    with parquet.ParquetFile(path) as file:
        names: list[str] = list(file.schema_arrow.names)
        if mistakes := _check_columns(key, path, names, check.columns):
            return mistakes
        wanted = [check.columns.get(field, field) for field in ("env", "env_options")]
        columns = [name for name in wanted if name in names]
        if not columns:
            return []
        number = 0
        for batch in file.iter_batches(batch_size=ROWS_CHECKED, columns=columns):
            for row in cast(Any, batch).to_pylist():
                if mistakes := check(f"{path}, row {number}", row, names_only=number >= ROWS_CHECKED):
                    return mistakes
                number += 1
            if wanted[1] not in names:
                break
    return []


class EnvironmentCheck:
    """Checks the environments that rows name, and the options that they give. Each combination is checked once."""

    def __init__(
        self, key: str, environments: Mapping[str, EnvConfig], columns: Mapping[str, str] = NO_COLUMNS
    ) -> None:
        """`environments`: those of the run; the first one is that of rows that name none. `columns`: field -> the
        column that has it."""
        self._key = key
        self.columns = columns
        self.environments = environments
        self._fine: set[str] = set()

    def __call__(self, where: str, row: Json, *, names_only: bool = False) -> list[str]:
        """`names_only`: whether a row may set such options, and not whether their values are fine."""
        named = (row.get(self.columns.get(field, field)) for field in ("env", "env_options"))
        return self.of_fields(where, *named, names_only=names_only)

    def of_fields(self, where: str, env: object, options: object, *, names_only: bool) -> list[str]:
        """The same for the fields `env` and `env_options` of a row."""
        asked = repr((env, options))
        if asked in self._fine:
            return []
        if not isinstance(env, str | None) or not isinstance(options, dict | None):
            return [
                f"{self._key}: {where}: got env {env!r} and env_options {options!r}, expected the name of an "
                "environment and a table of its options"
            ]
        try:
            expect_known_environment(env or "", self.environments, lambda: where)
            self._check_options(env, cast("dict[str, Any]", options or {}), names_only)
        except RowError as error:
            return [f"{self._key}: {error}"]
        except ValueError as error:
            place = f"actor.environments.{env}.options" if env else "options of the environment"
            return [f"{self._key}: {where}: env_options, together with the {place}: {error}"]
        if not names_only:
            self._fine.add(asked)
        return []

    def _check_options(self, env: str | None, of_row: Mapping[str, Any], names_only: bool) -> None:
        """Raises ValueError. What is wrong without the row's options, launch.config.consistency says once."""
        config = self.environments[env] if env else next(iter(self.environments.values()))
        try:
            options = options_of_row(config.options, of_row, config.name)
            if not names_only and (of_row or lacking_options(config.name, options)):
                check_options(config.name, options)
        except UnknownEnvironment:
            return
        except ValueError:
            raise
        except Exception as error:  # a user's class may raise anything for a value
            raise ValueError(f"{config.name!r} raises {type(error).__name__}: {error}") from error
