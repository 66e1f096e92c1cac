"""Parquet files of one operator's state: rows of key group and state value, in the stored form."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from flinkish_spark.core.errors import StoreError
from flinkish_spark.core.store import ObjectMissing
from flinkish_spark.core.store_spec import StoreSpec
from flinkish_spark.protocol.savepoints import StateFile

#: Large offsets: one file may hold more than 2 GiB of values.
STATE_SCHEMA = pa.schema([("key_group", pa.int32()), ("value", pa.large_binary())])
#: Rows per row group and per read batch. A state value holds a whole key group, so a few rows may have many
#: megabytes.
ROWS_AT_ONCE = 16
_CHUNK = 1 << 20


class StateFileWriter:
    """Writes one file; made by a task when it has its first row."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._begin(path)

    def _begin(self, target: Any) -> None:
        self._writer = pq.ParquetWriter(target, STATE_SCHEMA, compression="zstd")
        self.rows = 0

    def write(self, groups: list[int], values: list[bytes]) -> None:
        batch = pa.record_batch(
            [pa.array(groups, pa.int32()), pa.array(values, pa.large_binary())], STATE_SCHEMA
        )
        self._writer.write_batch(batch, row_group_size=ROWS_AT_ONCE)
        self.rows += len(groups)

    def close(self) -> tuple[int, str]:
        self._writer.close()
        with open(self._path, "rb") as file:
            os.fsync(file.fileno())
        return self._path.stat().st_size, sha256_of(self._path)


class _BucketWriter(StateFileWriter):
    def __init__(self, place: StoreSpec, path: str) -> None:
        self._place, self._key, self._content = place, path, io.BytesIO()
        self._begin(self._content)

    def close(self) -> tuple[int, str]:
        self._writer.close()
        data = self._content.getvalue()
        self._place.open().put(self._key, data)
        return len(data), hashlib.sha256(data).hexdigest()


def new_state_file(place: StoreSpec, path: str) -> StateFileWriter:
    return StateFileWriter(place.folder / path) if place.is_local else _BucketWriter(place, path)


def state_in(place: StoreSpec, file: StateFile) -> Iterator[pa.RecordBatch]:
    if place.is_local:
        path = place.folder / file.path
        yield from _rows(path, path.stat().st_size, file)
        return
    data = _read(place, file)
    yield from _rows(pa.BufferReader(data), len(data), file)


def has_checksum(place: StoreSpec, file: StateFile) -> bool:
    if place.is_local:
        return sha256_of(place.folder / file.path) == file.sha256
    return hashlib.sha256(_read(place, file)).hexdigest() == file.sha256


def _read(place: StoreSpec, file: StateFile) -> bytes:
    try:
        return place.open().read(file.path)
    except (ObjectMissing, StoreError) as error:
        raise OSError(f"{file.path} cannot be read from {place.url}: {error}") from error


def _rows(source: Any, size: int, file: StateFile) -> Iterator[pa.RecordBatch]:
    if size != file.size_bytes:
        raise ValueError(f"{file.path} has {size} bytes instead of {file.size_bytes}")
    rows = 0
    try:
        with pq.ParquetFile(source) as parquet:
            if not parquet.schema_arrow.equals(STATE_SCHEMA):
                raise ValueError(f"{file.path} has other columns than key_group and value")
            for batch in parquet.iter_batches(batch_size=ROWS_AT_ONCE):
                rows += batch.num_rows
                yield batch
    except pa.ArrowException as error:
        raise ValueError(f"{file.path} is torn or altered: {error}") from error
    if rows != file.rows:
        raise ValueError(f"{file.path} has {rows} rows instead of {file.rows}")


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
