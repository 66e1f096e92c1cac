"""Commits that replace rows of an Iceberg table: upserts by copy on write, overwritten partitions."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyiceberg.conversions import from_bytes
from pyiceberg.manifest import DataFile, ManifestContent, ManifestEntry
from pyiceberg.table import Table
from pyiceberg.types import NestedField, PrimitiveType

from flinkish_spark.connectors.iceberg.data_files import (
    SEQUENCE,
    DataFileWriter,
    file_from_json,
    show_record,
    store_of,
)
from flinkish_spark.connectors.iceberg.live_files import (
    EQUALITY_DELETES,
    LiveFiles,
    TableChange,
    TableRefusal,
    check_readable,
    find_deleted,
    read_rows,
)
from flinkish_spark.connectors.iceberg.partitions import find_overflow, partition_to_json
from flinkish_spark.connectors.staged_rows import BATCH, DELETED, ORDER, newest_per_key
from flinkish_spark.connectors.write_modes import (
    Append,
    OverwritePartitions,
    Upsert,
    WriteMode,
    mode_from_json,
)

Staged = Sequence[Mapping[str, Any]]
_OLDER_PARTITIONS = (
    "it has files of an older partitioning, which may hold rows of the partitions: rewrite them"
)


def mode_of(staged: Mapping[str, Any]) -> WriteMode:
    # Appended files were staged before there was another mode.
    return mode_from_json(staged.get("mode", {"kind": "APPEND"}))


def plan_change(table: Table, staged: Staged) -> TableChange:
    """Return what the commit of a checkpoint changes in a branch as it is in `table`."""
    mode, branch = mode_of(staged[0]), str(staged[0]["branch"])
    if isinstance(mode, Upsert):
        return Merge(table, branch, staged, mode).run()
    files = [file for one in staged for file in one["files"]]
    added = _data_files(table, files)
    if not isinstance(mode, OverwritePartitions):
        return TableChange(added)
    live = LiveFiles.read(table, table.metadata.snapshot_by_name(branch))
    spec, wanted = table.spec(), {tuple(one["partition"]) for one in files}
    kind, removed = spec.partition_type(table.schema()), set[str]()
    for entry in live.data():
        file = entry.data_file
        if file.spec_id != spec.spec_id:
            raise TableRefusal(_OLDER_PARTITIONS)
        values = [file.partition[at] for at in range(len(spec.fields))]
        if tuple(partition_to_json(kind, values)) in wanted:
            removed.add(file.file_path)
    return TableChange(added, frozenset(removed), live)


def why_no_change(table: Table, branch: str, mode: WriteMode) -> str:
    snapshot = table.metadata.snapshot_by_name(branch)
    if snapshot is None or isinstance(mode, Append):
        return ""
    if isinstance(mode, Upsert):
        known = {} if snapshot.summary is None else snapshot.summary.additional_properties
        return EQUALITY_DELETES if known.get("total-equality-deletes", "0") != "0" else ""
    for one in snapshot.manifests(table.io):
        is_live = one.has_added_files() or one.has_existing_files()
        if is_live and one.content == ManifestContent.DATA and one.partition_spec_id != table.spec().spec_id:
            return _OLDER_PARTITIONS
    return ""


def _data_files(table: Table, files: Sequence[Mapping[str, Any]]) -> list[DataFile]:
    kind = table.spec().partition_type(table.schema())
    return [file_from_json(one, kind, table.spec().spec_id) for one in files]


class Merge:
    """One merge of staged rows into a branch: files that hold keys of them are written anew."""

    def __init__(self, table: Table, branch: str, staged: Staged, mode: Upsert) -> None:
        self._table, self._staged, self._io = table, staged, store_of(table)
        self._fields, first = table.schema().fields, staged[0]
        self._keys = [table.schema().find_field(at) for at in first["keys"]]
        self._sequence = None if first["sequence"] is None else table.schema().find_field(first["sequence"])
        order = (
            None if mode.sequence_by is None else SEQUENCE if self._sequence is None else self._sequence.name
        )
        self._rows = self._read_staged(Upsert(tuple(one.name for one in self._keys), order))
        self._live = LiveFiles.read(table, table.metadata.snapshot_by_name(branch))
        folder = str(first["files"][0]["path"]).rpartition("/")[0]
        self._writer = DataFileWriter(table.metadata, folder, self._io)
        #: Staged rows that are older than the table's.
        self._older = np.zeros(len(self._rows), bool)
        given = {at for one in staged for at in one["columns"]}
        #: Fields that the stream lacks keep their values, which are taken from the rows that are replaced.
        self._others = [one for one in self._fields if one.field_id not in given]
        self._replaced: list[tuple[np.ndarray[Any, Any], pa.Table]] = []

    def _read_staged(self, mode: Upsert) -> pa.Table:
        control = [BATCH, ORDER, DELETED, *([SEQUENCE] if mode.sequence_by == SEQUENCE else [])]
        paths = [str(file["path"]) for one in self._staged for file in one["files"]]
        return newest_per_key(
            pa.concat_tables(self._read(path, self._fields, control) for path in paths), mode
        )

    def _read(self, path: str, fields: Sequence[NestedField], *more: Any) -> pa.Table:
        return pa.Table.from_batches(read_rows(self._io, path, fields, *more))

    def run(self) -> TableChange:
        removed = set[str]()
        for entry in self._live.data():
            file = entry.data_file
            if file.record_count and self._may_match(file) and self._replace_in(entry):
                removed.add(file.file_path)
        self._write(self._new_rows())
        files = _data_files(self._table, self._writer.finish())
        return TableChange(files, frozenset(removed), self._live)

    def _write(self, rows: pa.Table) -> None:
        for batch in rows.to_batches() if len(rows) else ():
            # Rows of others, or those of a table that was partitioned anew since a task has checked them.
            if (found := find_overflow(batch, self._table.spec(), self._table.schema())) is not None:
                why, row = found
                raise TableRefusal(f"it has no partition for {show_record(batch, row)}: {why}")
            self._writer.add(batch)

    @cached_property
    def _sorted_keys(self) -> list[tuple[NestedField, list[Any]]]:
        """Return the staged values of each key as bounds of files have them."""
        return [(one, sorted(set(_as_bounds(self._rows.column(one.name))))) for one in self._keys]

    def _may_match(self, file: DataFile) -> bool:
        for key, values in self._sorted_keys:
            least, most = ((of or {}).get(key.field_id) for of in (file.lower_bounds, file.upper_bounds))
            if least is None or most is None:
                continue
            assert isinstance(key.field_type, PrimitiveType)
            at = bisect_left(values, from_bytes(key.field_type, least))
            if at == len(values) or values[at] > from_bytes(key.field_type, most):
                return False
        return True

    def _replace_in(self, entry: ManifestEntry) -> bool:
        """Write the rows of a file that no staged row replaces; return False if it replaces none."""
        file = entry.data_file
        asked = [*self._keys, *([] if self._sequence is None else [self._sequence])]
        known = self._read(file.file_path, asked, (), check_readable(self._table, file))
        own = [one.name for one in self._keys]
        at = find_places([known.column(name) for name in own], [self._rows.column(name) for name in own])
        is_there = np.ones(len(known), bool)
        is_there[find_deleted(self._io, file.file_path, self._live.deletes_of(entry))] = False
        places = np.flatnonzero(is_there & (at >= 0))
        if self._sequence is not None and len(places):
            ours, theirs = (
                rows.column(self._sequence.name).take(pa.array(chosen))
                for rows, chosen in ((self._rows, at[places]), (known, places))
            )
            is_newer = _is_newer(ours, theirs)
            self._older[at[places[~is_newer]]] = True
            places = places[is_newer]
        if not len(places):
            return False
        rows = self._read(file.file_path, self._fields)
        if self._others:
            names = [one.name for one in self._others]
            self._replaced.append((at[places], rows.select(names).take(pa.array(places))))
        is_there[places] = False
        self._write(rows.filter(pa.array(is_there)))
        return True

    def _new_rows(self) -> pa.Table:
        """Return the staged rows that the table gets, with values of replaced rows where they have none."""
        rows = self._rows.select([one.name for one in self._fields])
        if self._replaced:
            old = pa.concat_tables(one for _, one in self._replaced)
            of = np.full(len(rows), -1)
            of[np.concatenate([one for one, _ in self._replaced])] = np.arange(len(old))
            taken = old.take(pa.array(of, mask=of < 0))
            for one in self._others:
                at = rows.schema.get_field_index(one.name)
                rows = rows.set_column(at, rows.schema.field(at), taken.column(one.name))
        deleted = self._rows.column(DELETED).to_numpy()
        return rows.filter(pa.array(~deleted.astype(bool) & ~self._older))


def find_places(columns: Sequence[pa.ChunkedArray], keys: Sequence[pa.ChunkedArray]) -> np.ndarray[Any, Any]:
    """Return for each row of columns the place of the same values among the keys, which differ; -1: none."""
    at, own = (pa.array(np.zeros(len(one[0]), np.int64)) for one in (columns, keys))
    for column, key in zip(columns, keys, strict=True):
        values = pc.unique(key)
        at, own = (
            pc.add(pc.multiply(before, len(values)), pc.index_in(one, values).cast(pa.int64()))
            for before, one in ((at, column), (own, key))
        )
        # As small numbers again, so that many keys do not overflow.
        pairs = pc.unique(own)
        at, own = (pc.index_in(one, pairs).cast(pa.int64()) for one in (at, own))
    found = pc.index_in(at, own)
    return np.asarray(pc.fill_null(found, -1).to_numpy())


def _is_newer(ours: pa.ChunkedArray, theirs: pa.ChunkedArray) -> np.ndarray[Any, Any]:
    """Compare sequences: equal ones are newer, null is older than every value, NaN newer."""
    found = pc.or_(pc.fill_null(pc.greater_equal(ours, theirs), False), pc.is_null(theirs))
    if pa.types.is_floating(ours.type):
        found = pc.or_(found, pc.fill_null(pc.is_nan(ours), False))
    return np.asarray(found.to_numpy())


def _as_bounds(column: pa.ChunkedArray) -> list[Any]:
    if pa.types.is_date(column.type):
        column = column.cast(pa.int32())
    elif pa.types.is_timestamp(column.type):
        column = column.cast(pa.int64())
    return list(column.to_pylist())
