"""Prompt sources: rows of a JSONL file, of Parquet files, or of a `datasets` folder or name, read one at a time.

Rows are not kept as Python objects: JSONL keeps one byte offset per row, Parquet the last row groups, `datasets` its
memory map. `open_prompts` reads many rows before it returns, so that a bad file fails in the first seconds.
"""

from __future__ import annotations

import difflib
import hashlib
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from stillhouse.learner.prompts.known_sets import HUB, named_set
from stillhouse.learner.prompts.records import (
    NO_COLUMNS,
    DataError,
    PromptRecord,
    RowError,
    check_columns,
    document_record,
    expect_known_environment,
    json_columns,
    record_from_columns,
    record_from_json,
)

NEEDS_DATASETS: Final = "reading it needs: pip install -e '.[data]'"
CACHED_BLOCKS = 8
"""Parquet row groups held in memory; a shuffle mixes the rows of this many at a time (`learner.prompts.order`)."""
FAULTS_SAID: Final = 5
"""Invalid rows of a JSONL file that are named when it is refused."""
_CHUNK_BYTES = 16 << 20
_ENDS_BYTES = 64 << 10


class PromptSource(Protocol):
    """Rows 0..len-1, in the order of the file."""

    @property
    def path(self) -> str: ...

    @property
    def fingerprint(self) -> str:
        """Changes when the files change in size, in number of rows, or at either end."""
        ...

    @property
    def blocks(self) -> tuple[int, ...]:
        """Number of rows of each block that is read as a whole; empty if single rows are cheap to read."""
        ...

    def __len__(self) -> int: ...

    def read(self, row: int) -> PromptRecord:
        """Raises RowError for an invalid row, DataError for files that have changed or cannot be read."""
        ...

    def read_all(self) -> Iterator[PromptRecord | RowError]:
        """All rows, faster than one by one. Raises DataError."""
        ...

    def where(self, row: int) -> str:
        """For messages: the file, and the row's line in it, from 1, or in a table its index, from 0."""
        ...


class Reading(NamedTuple):
    """How rows are read."""

    environments: Collection[str] | None = None
    """Those that rows may name; None: any."""
    columns: Mapping[str, str] = NO_COLUMNS
    """Field -> the column that has it."""
    answers: bool = False
    """Rows have the answers too (learner.prompts.answers)."""
    tag: str = ""
    """Tag of a table's rows that name none."""


def open_prompts(
    path: str,
    environments: Collection[str] | None = None,
    columns: Mapping[str, str] = NO_COLUMNS,
    *,
    answers: bool = False,
) -> PromptSource:
    """Open the source at `path`; its format is recognised by its contents. See Reading. Raises DataError, or RowError
    for a bad row."""
    reading = Reading(environments, columns, answers)
    if path.startswith(HUB):
        return _open_named(path, reading)
    if not path:
        raise DataError("no prompts given: expected a JSONL or Parquet file, a datasets folder or hf:NAME")
    file = Path(path).expanduser()
    if file.is_dir():
        return _open_folder(file, reading)
    if not file.is_file():
        raise DataError(
            f"no file {path!r}{_nearest(file)}; expected a JSONL or Parquet file, a datasets folder or hf:NAME"
        )
    if answers and file.suffix == ".txt":
        return TextSource(file)
    with file.open("rb") as stream:
        head = stream.read(256)
    if head.startswith(b"PAR1"):
        return ParquetSource((file,), reading)
    _refuse_other_formats(file, head)
    return JsonlSource(file, reading)


class JsonlSource:
    """One JSON object per line, UTF-8. Memory: 8 bytes per row. No file stays open between two reads."""

    blocks: tuple[int, ...] = ()

    def __init__(self, file: Path, reading: Reading) -> None:
        self.path = str(file)
        self._reading = reading
        self._file = file
        self._stamp = _stamp(file)
        self._starts_N, self._blanks_N = _line_starts(file)
        if len(self._starts_N) == 0:
            raise DataError(f"{self.path}: no rows: expected one JSON object per line")
        self.fingerprint = _fingerprint(len(self), (file,))
        if reading.columns:
            with suppress(msgspec.DecodeError):  # which the row's own check says better
                self._check_columns()
        _refuse_faults(self._read_many(_rows_to_check(len(self), first=100_000)))
        self._check_columns()

    def __len__(self) -> int:
        return len(self._starts_N)

    def read(self, row: int) -> PromptRecord:
        return _raise_fault(next(self._read_many((row,))))

    def read_all(self) -> Iterator[PromptRecord | RowError]:
        return self._read_many(range(len(self)))

    def _read_many(self, rows: Iterable[int]) -> Iterator[PromptRecord | RowError]:
        if _stamp(self._file) != self._stamp:
            raise DataError(
                f"{self.path}: the file has changed since it was opened; it must stay as it is during a run"
            )
        with self._file.open("rb") as stream:
            for row in rows:
                stream.seek(int(self._starts_N[row]))
                try:
                    yield self._record(stream.readline(), row)
                except RowError as error:
                    yield error

    def _record(self, line: bytes, row: int) -> PromptRecord:
        reading = self._reading
        record = record_from_json(line, row, lambda: self.where(row), reading.columns, answers=reading.answers)
        if reading.environments is not None:
            expect_known_environment(record.env, reading.environments, lambda: self.where(row))
        return record

    def _check_columns(self) -> None:
        with self._file.open("rb") as stream:
            stream.seek(int(self._starts_N[0]))
            found = json_columns(stream.readline())
        check_columns(found, self.path, self._reading.columns, answers=self._reading.answers)

    def where(self, row: int) -> str:
        return f"{self.path}, line {row + 1 + int(np.searchsorted(self._blanks_N, row, side='right'))}"


class TextSource:
    """A file of plain text in UTF-8: one document."""

    blocks: tuple[int, ...] = ()

    def __init__(self, file: Path) -> None:
        self.path, self._file, self.fingerprint = str(file), file, _fingerprint(1, (file,))
        self.read(0)

    def __len__(self) -> int:
        return 1

    def read(self, row: int) -> PromptRecord:
        try:
            text = self._file.read_text(encoding="utf-8-sig")
        except UnicodeDecodeError as error:
            raise DataError(f"{self.path}: not UTF-8 ({error.reason}); save the file as UTF-8") from error
        return document_record(text, row, lambda: self.path)

    def read_all(self) -> Iterator[PromptRecord | RowError]:
        yield self.read(0)

    def where(self, row: int) -> str:
        return self.path


class ParquetSource:
    """One or more Parquet files, one after another, read by row group through pyarrow."""

    def __init__(self, files: Sequence[Path], reading: Reading) -> None:
        self._reading = reading
        self.path = str(files[0] if len(files) == 1 else files[0].parent)
        self._files = tuple(files)
        self._stamps = [_stamp(file) for file in files]
        self._groups: list[tuple[int, int]] = []  # (file, row group in it), in order
        rows: list[int] = []
        for i, file in enumerate(files):
            for group, n_rows in enumerate(_row_groups(file, reading)):
                self._groups.append((i, group))
                rows.append(n_rows)
        self.blocks = tuple(rows)
        self._ends_N = np.cumsum(rows, dtype=np.int64)
        self._cache: OrderedDict[int, Any] = OrderedDict()
        if len(self) == 0:
            raise DataError(f"{self.path}: no rows")
        self.fingerprint = _fingerprint(len(self), files)
        for row in range(min(len(self), 1_000)):  # finds nulls and blanks; the schema was checked
            self.read(row)

    def __len__(self) -> int:
        return int(self._ends_N[-1]) if len(self._ends_N) else 0

    def read(self, row: int) -> PromptRecord:
        block = int(np.searchsorted(self._ends_N, row, side="right"))
        offset = row - (int(self._ends_N[block - 1]) if block else 0)
        columns: dict[str, Any] = self._table(block).slice(offset, 1).to_pylist()[0]
        return _checked(columns, row, self.path, self._reading)

    def read_all(self) -> Iterator[PromptRecord | RowError]:
        tables = (self._table(block) for block in range(len(self.blocks)))
        batches = (batch for table in tables for batch in table.to_batches(max_chunksize=1_000))
        rows = (columns for batch in batches for columns in batch.to_pylist())
        return _each_checked(rows, self.path, self._reading)

    def where(self, row: int) -> str:
        return f"{self.path}, row {row}"

    def _table(self, block: int) -> Any:
        if block in self._cache:
            self._cache.move_to_end(block)
            return self._cache[block]
        i, group = self._groups[block]
        file = self._files[i]
        if _stamp(file) != self._stamps[i]:
            raise DataError(f"{file}: the file has changed since it was opened; it must stay as it is during a run")
        with _parquet_file(file) as parquet:
            table = parquet.read_row_group(group, use_threads=False)
        self._cache[block] = table
        while len(self._cache) > CACHED_BLOCKS:
            self._cache.popitem(last=False)
        return table


class DatasetsSource:
    """A data set of the library `datasets`, memory-mapped by it."""

    blocks: tuple[int, ...] = ()

    def __init__(self, path: str, dataset: Any, files: Sequence[Path], reading: Reading) -> None:
        """`files` tell it from others."""
        self._reading = reading
        self.path = path
        check_columns(dataset.column_names, self.path, reading.columns, answers=reading.answers)
        self._rows: Any = dataset
        if len(self) == 0:
            raise DataError(f"{self.path}: no rows")
        self.fingerprint = _fingerprint(len(self), files)
        for row in _rows_to_check(len(self), first=2_000):
            self.read(row)

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, row: int) -> PromptRecord:
        return _checked(self._rows[row], row, self.path, self._reading)

    def read_all(self) -> Iterator[PromptRecord | RowError]:
        return _each_checked(self._rows, self.path, self._reading)

    def where(self, row: int) -> str:
        return f"{self.path}, row {row}"


def _raise_fault(record: PromptRecord | RowError) -> PromptRecord:
    if isinstance(record, RowError):
        raise record
    return record


def _refuse_faults(records: Iterable[PromptRecord | RowError]) -> None:
    """Raises RowError that says what is wrong with the first invalid rows, and how many there are."""
    faults = [record for record in records if isinstance(record, RowError)]
    if len(faults) > 1:
        first = "; ".join(map(str, faults[:FAULTS_SAID]))
        raise RowError(f"{first}{f'; and {len(faults) - FAULTS_SAID} more rows' * (len(faults) > FAULTS_SAID)}")
    if faults:
        raise faults[0]


def _each_checked(rows: Iterable[Mapping[str, Any]], path: str, reading: Reading) -> Iterator[PromptRecord | RowError]:
    for row, columns in enumerate(rows):
        try:
            yield _checked(columns, row, path, reading)
        except RowError as error:
            yield error


def _checked(columns: Mapping[str, Any], row: int, path: str, reading: Reading) -> PromptRecord:
    """A row of a table. Raises RowError."""
    record = record_from_columns(columns, row, lambda: f"{path}, row {row}", reading.columns, answers=reading.answers)
    if reading.environments is not None:
        expect_known_environment(record.env, reading.environments, lambda: f"{path}, row {row}")
    return msgspec.structs.replace(record, tag=reading.tag) if reading.tag and not record.tag else record


def _open_saved(folder: Path, reading: Reading) -> PromptSource:
    """A folder written by `datasets.Dataset.save_to_disk`."""
    try:
        from datasets import load_from_disk
    except ImportError as error:
        raise DataError(f"{folder} is a datasets folder; {NEEDS_DATASETS}") from error
    try:
        dataset: Any = load_from_disk(str(folder))
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{folder}: datasets cannot load it: {error}") from error
    return DatasetsSource(str(folder), dataset, (folder / "state.json",), reading)


def _open_named(path: str, reading: Reading) -> PromptSource:
    """What `datasets.load_dataset` reads: a name of the Hugging Face hub, or a folder of files in one format."""
    named = named_set(path)
    if named is None:
        raise DataError(
            f"{path!r}: expected hf:NAME, hf:NAME:SPLIT or hf:NAME:CONFIG:SPLIT, e.g. hf:openai/gsm8k:main:train"
        )
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise DataError(f"{path} is a name of a data set; {NEEDS_DATASETS}") from error
    try:
        dataset: Any = load_dataset(named.name, named.config, split=named.split)
    except Exception as error:  # its readers and the network raise anything
        reason = str(error).strip().splitlines()
        raise DataError(
            f"{path}: datasets cannot load it: {type(error).__name__}: {reason[0] if reason else ''}"
        ) from error
    if named.known is not None:
        columns = named.known.columns_for(reading.columns, dataset.column_names)
        reading = reading._replace(columns=columns, tag=named.known.tag)
    return DatasetsSource(path, dataset, [Path(file["filename"]) for file in dataset.cache_files], reading)


def _open_folder(folder: Path, reading: Reading) -> PromptSource:
    if (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file():
        return _open_saved(folder, reading)
    if (folder / "dataset_dict.json").is_file():
        splits = sorted(entry.name for entry in folder.iterdir() if (entry / "state.json").is_file())
        if len(splits) == 1:
            return _open_saved(folder / splits[0], reading)
        raise DataError(
            f"{folder} holds the splits {splits}: name one of them, e.g. {folder / (splits or ['train'])[0]}"
        )
    if files := sorted(folder.glob("*.parquet")):
        return ParquetSource(files, reading)
    found = sorted(entry.name for entry in folder.iterdir())[:12]
    raise DataError(
        f"{folder}: expected a folder written by datasets' save_to_disk (state.json, dataset_info.json) or one of "
        f"*.parquet files, found {found or 'nothing'}"
    )


def _refuse_other_formats(file: Path, head: bytes) -> None:
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if file.suffix in (".parquet", ".pq"):
        raise DataError(f"{file}: not a Parquet file: it begins with {head[:8]!r}, expected b'PAR1'")
    if not text:
        raise DataError(f"{file}: no rows: expected one JSON object per line")
    if head.startswith((b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"PK")):
        raise DataError(f"{file}: compressed; unpack it first (rows are read by their place in the file)")
    if text.startswith(b"["):
        raise DataError(f"{file}: one JSON array; expected one JSON object per line (convert: jq -c '.[]' FILE)")
    if not text.startswith(b"{"):
        raise DataError(
            f"{file}: neither JSONL nor Parquet: it begins with {head[:24]!r}; expected one JSON object per line, "
            "in UTF-8, or a Parquet file"
        )


def _line_starts(file: Path) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Byte offsets [n] of the lines that are not blank, and for each blank line the number of others before it."""
    size = file.stat().st_size
    pieces = [np.zeros(1, dtype=np.int64)]
    at = 0
    with file.open("rb", buffering=0) as stream:
        has_mark = stream.read(3) == b"\xef\xbb\xbf"
        stream.seek(0)
        while chunk := stream.read(_CHUNK_BYTES):
            pieces.append(np.flatnonzero(np.frombuffer(chunk, dtype=np.uint8) == ord("\n")) + (at + 1))
            at += len(chunk)
        starts_N = np.concatenate(pieces)
        starts_N = starts_N[starts_N < size]
        if has_mark:
            starts_N[0] = 3  # a byte-order mark is not part of the first object
        lengths_N = np.diff(starts_N, append=size)
        keep_N = np.ones(len(starts_N), dtype=bool)
        for i in np.flatnonzero(lengths_N < 14):  # shorter than {"prompt":"a"}: blank or an invalid row
            stream.seek(int(starts_N[i]))
            keep_N[i] = bool(stream.read(int(lengths_N[i])).strip())
    blank_N = np.flatnonzero(~keep_N)
    return starts_N[keep_N], blank_N - np.arange(len(blank_N))


def _rows_to_check(n_rows: int, *, first: int, spread: int = 2_000) -> Iterable[int]:
    """The first rows, and some at equal distances over all the others."""
    yield from range(min(first, n_rows))
    if n_rows > first:
        yield from np.unique(np.linspace(first, n_rows - 1, spread, dtype=np.int64)).tolist()


def _row_groups(file: Path, reading: Reading) -> list[int]:
    """Rows of each row group. Raises DataError for a broken file or missing columns."""
    with _parquet_file(file) as parquet:
        check_columns(parquet.schema_arrow.names, str(file), reading.columns, answers=reading.answers)
        metadata = parquet.metadata
        return [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]


def _parquet_file(file: Path) -> Any:
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError as error:
        raise DataError(f"{file} is a Parquet file; reading it needs: pip install -e '.[data]'") from error
    try:
        return parquet.ParquetFile(file)
    except pa.ArrowInvalid as error:
        raise DataError(f"{file}: not a whole Parquet file: {error}") from error


def _stamp(file: Path) -> tuple[int, int]:
    stat = file.stat()
    return stat.st_size, stat.st_mtime_ns


def _fingerprint(n_rows: int, files: Sequence[Path]) -> str:
    digest = hashlib.sha256(f"rows {n_rows}".encode())
    for file in files:
        size = file.stat().st_size
        with file.open("rb") as stream:
            digest.update(f"size {size}".encode() + stream.read(_ENDS_BYTES))
            stream.seek(max(0, size - _ENDS_BYTES))
            digest.update(stream.read(_ENDS_BYTES))
    return digest.hexdigest()[:16]


def _nearest(file: Path) -> str:
    if not file.parent.is_dir():
        return f" (and no folder {str(file.parent)!r})"
    close = difflib.get_close_matches(file.name, [entry.name for entry in file.parent.iterdir()], n=1)
    return f"; did you mean {str(file.parent / close[0])!r}?" if close else ""
