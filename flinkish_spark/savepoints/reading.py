"""Keyed state of a savepoint as a DataFrame: for people, tests and jobs that begin with other jobs' state.

The files are read in tasks, each value is checked, and reading runs no code of the job's.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import types as T
from pyspark.sql.pandas.types import from_arrow_type

from flinkish_spark.operators.stored_groups import stored_table
from flinkish_spark.operators.table_codec import ALIVE, HASH, NAME, TIME, TOUCHED
from flinkish_spark.protocol.savepoints import SavepointMetadata, StateFile
from flinkish_spark.savepoints.errors import SavepointDamaged, SavepointMisfit
from flinkish_spark.savepoints.files import SavepointDir
from flinkish_spark.savepoints.state_files import read_state as read_file

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

#: Readers' names of columns whose stored names are short; of times, which are stored in milliseconds.
_TIMES = {TIME: "time", "from": "window_start", "to": "window_end", TOUCHED: "touched_at"}
_MILLISECOND_MICROS = 1_000


def read_state(
    spark: SparkSession, savepoint: str | Path, uid: str, name: str, *, chain: str | None = None
) -> DataFrame:
    """Return a keyed state of a savepoint, one row per key, or per key and window.

    Nothing is changed, and the savepoint may be in use.

    Parameters
    ----------
    spark
        Any session; the savepoint is read where its tasks run.
    savepoint
        The savepoint's directory.
    uid, name
        Of the operator, and of its state.
    chain
        Which chain's, where several chains have the operator; see `SavepointMetadata.chains`.

    Returns
    -------
    DataFrame
        Columns: `key` (or `key_0`, `key_1`, ... for several key columns); `window_start` and `window_end`
        for states of windows; `touched_at` where the state has a time to live (expired entries that were
        not cleaned up yet are there, too); then `value`, or the declared fields of the value.

    Raises
    ------
    SavepointNotFound, SavepointDamaged
        It is not there, or not whole.
    SavepointMisfit
        It has no such operator, state or chain; says which there are.

    Examples
    --------
    >>> read_state(spark, "/data/savepoints/7", "totals", "total").where("key = 'anna'")  # doctest: +SKIP
    """
    place = SavepointDir(Path(savepoint).absolute())
    metadata = place.metadata()
    files = _files(metadata, uid, name, chain)
    place.check_files(files)
    stored = _schema(place.path, files, name)
    columns = _columns(stored)
    described = [(json.dumps(file.to_json()),) for file in files]
    listed = spark.createDataFrame(described, "file STRING").repartition(max(len(files), 1))
    return listed.mapInArrow(_ReadTable(str(place.path), name, columns), columns)


def _files(metadata: SavepointMetadata, uid: str, name: str, chain: str | None) -> list[StateFile]:
    """Return the state files to read; refuse what the savepoint does not have."""
    operator = metadata.operators.get(uid)
    if operator is None:
        raise _missing("operator", uid, metadata.operators)
    if name not in operator.states:
        raise _missing(f"state of '{uid}'", name, operator.states)
    files = [file for file in metadata.files if file.operator == uid]
    chains = {file.chain for file in files}
    if chain is not None and chain not in chains:
        raise _missing(f"chain of '{uid}'", chain, chains)
    if chain is None and len(chains) > 1:
        raise SavepointMisfit(
            f"operator '{uid}' has state in several chains",
            what_to_do=f"say which: chain={' or '.join(repr(one) for one in sorted(chains))}",
        )
    return [file for file in files if chain in (None, file.chain)]


def _missing(what: str, name: str, there: Iterable[str]) -> SavepointMisfit:
    known = ", ".join(sorted(there)) or "none"
    return SavepointMisfit(f"the savepoint has no {what} '{name}'", what_to_do=f"choose from: {known}")


def _schema(folder: Path, files: Sequence[StateFile], name: str) -> pa.Schema:
    """Return the stored columns of a state, of the first key group that has it."""
    for file in files:
        for table in _tables(folder, file, name):
            return table.schema
    raise SavepointDamaged(
        f"the savepoint names the state '{name}' but holds no entry of it", what_to_do="use another savepoint"
    )


def _tables(folder: Path, file: StateFile, name: str) -> Iterator[pa.RecordBatch]:
    try:
        for batch in read_file(folder / file.path, file):
            for value in batch.column(1):
                table = stored_table(value.as_buffer(), name)
                if table is not None:
                    yield table
    except (OSError, ValueError) as error:
        raise SavepointDamaged(
            f"the file {file.path} of the savepoint {folder} cannot be used",
            why=str(error),
            what_to_do="restore the savepoint from a backup, or use another one",
            file=file.path,
        ) from error


def _columns(stored: pa.Schema) -> T.StructType:
    """Return the columns for readers."""
    fields = []
    keys = [field for field in stored if field.name.startswith("key_")]
    values = [field for field in stored if field.name.startswith("value_")]
    for field in stored:
        if field in keys:
            name = "key" if len(keys) == 1 else field.name
            fields.append(T.StructField(name, from_arrow_type(field.type)))
        elif field in values:
            named = (field.metadata or {}).get(NAME.encode(), b"value").decode()
            fields.append(T.StructField(named, from_arrow_type(field.type)))
        elif field.name in _TIMES:
            fields.append(T.StructField(_TIMES[field.name], T.TimestampType()))
    return T.StructType(fields)


@dataclass(frozen=True)
class _ReadTable:
    """Runs in tasks: state files in, entries out."""

    folder: str
    name: str
    columns: T.StructType

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for text in batch.column(0).to_pylist():
                file = StateFile.from_json(json.loads(text))
                for table in _tables(Path(self.folder), file, self.name):
                    yield self._entries(table)

    def _entries(self, table: pa.RecordBatch) -> pa.RecordBatch:
        arrays = []
        for field, column in zip(table.schema, table.columns, strict=True):
            if field.name in _TIMES:
                micros = pc.multiply(column, _MILLISECOND_MICROS)
                arrays.append(micros.cast(pa.timestamp("us", "UTC")))
            elif field.name not in (HASH, ALIVE):
                arrays.append(column)
        return pa.RecordBatch.from_arrays(arrays, names=self.columns.names)
