"""Keyed state of a savepoint or a retained checkpoint as a DataFrame: for people, tests and other jobs.

The files are read in tasks, each value is checked, and reading runs no code of the job's. Nothing is changed;
the job may run meanwhile, or not.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from flinkish_spark.operators.group_state import STATE, TIMERS
from flinkish_spark.operators.stored_groups import BROADCAST, LISTS
from flinkish_spark.savepoints.entries import (
    COPY,
    CopyValues,
    FirstCopy,
    ReadEntries,
    ReadSection,
    ReadTimers,
    reader_columns,
    timer_columns,
)
from flinkish_spark.savepoints.errors import SavepointMisfit
from flinkish_spark.savepoints.stored_state import stored_state

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def read_state(
    spark: SparkSession,
    path: str | Path,
    uid: str,
    name: str,
    *,
    checkpoint: int | None = None,
    chain: str | None = None,
    scratch: str | Path | None = None,
) -> DataFrame:
    """Return a keyed state of a savepoint or a retained checkpoint: one row per key, or per key and window.

    Nothing is changed. A savepoint may be in use; the job of a checkpoint may run or not.

    Parameters
    ----------
    spark
        Any session; the state is read where its tasks run.
    path
        The savepoint's directory; or a job directory, or ``<job directory>/checkpoints/<id>``.
    uid, name
        Of the operator, and of its state.
    checkpoint
        Which checkpoint of a job directory; None for the newest that is retained.
    chain
        Which chain's, where several chains have the operator; see `SavepointMetadata.chains`.
    scratch
        Where links to a checkpoint's files are made: outside of the job directory, on a file system that
        driver and executors share. They are deleted when this process ends. Local sessions can do without,
        and use the system's folder of temporary files then.

    Returns
    -------
    DataFrame
        Columns: `key` (or `key_0`, `key_1`, ... for several key columns); `window_start` and `window_end`
        for states of windows; `touched_at` where the state has a time to live (expired entries that were
        not cleaned up yet are there, too), and of lists and maps `each_touched_at`, the times of their
        elements, of which `touched_at` is the latest; then `value`, or the declared fields of the value. A
        field by the name of one of these columns is `value_key`, `value_touched_at` or the like.
        Where the declaration has changed, all fields that are still stored for any key.

    Raises
    ------
    SavepointNotFound, SavepointDamaged
        The savepoint is not there, or not whole.
    CheckpointNotRetained
        The job directory has no such checkpoint any more; says which there are.
    SavepointMisfit
        There is no such operator, state or chain; says which there are.

    Examples
    --------
    >>> read_state(spark, "/data/savepoints/7", "totals", "total").where("key = 'anna'")  # doctest: +SKIP
    >>> read_state(spark, "/data/jobs/orders", "totals", "total", checkpoint=41)  # doctest: +SKIP
    """
    stored = stored_state(spark, path, uid, checkpoint=checkpoint, chain=chain, scratch=scratch)
    stored.expect(name)
    section = stored.section(name)
    columns = reader_columns(section.schema)
    return stored.rows.mapInArrow(ReadEntries(stored.values, section, columns), columns)


def read_timers(
    spark: SparkSession,
    path: str | Path,
    uid: str,
    *,
    checkpoint: int | None = None,
    chain: str | None = None,
    scratch: str | Path | None = None,
) -> DataFrame:
    """Return the timers of an operator that wait in a savepoint or a retained checkpoint.

    Parameters are those of :func:`read_state`, and so are errors.

    Returns
    -------
    DataFrame
        Columns: `key` (or `key_0`, ...); `clock`, ``EVENT_TIME`` or ``PROCESSING_TIME``; `time_ms` LONG,
        when it is due; `window_start` and `window_end` of its window, null for a timer of a function.

    Examples
    --------
    >>> read_timers(spark, "/data/savepoints/7", "totals").groupBy("clock").count()  # doctest: +SKIP
    """
    stored = stored_state(spark, path, uid, checkpoint=checkpoint, chain=chain, scratch=scratch)
    sections = stored.sections()
    keyed = {one: schemas for one, schemas in sections.items() if one.startswith((STATE, TIMERS))}
    if not keyed:
        raise SavepointMisfit(
            f"operator '{uid}' of {stored.place} has stored nothing by key",
            what_to_do="choose another operator",
        )
    columns = timer_columns(next(iter(keyed.values()))[0])
    return stored.rows.mapInArrow(ReadTimers(stored.values, columns), columns)


def read_broadcast_state(
    spark: SparkSession,
    path: str | Path,
    uid: str,
    name: str,
    *,
    checkpoint: int | None = None,
    chain: str | None = None,
    scratch: str | Path | None = None,
) -> DataFrame:
    """Return a broadcast state of a savepoint or a retained checkpoint: one of its copies, which are equal.

    Parameters are those of :func:`read_state`, and so are errors.

    Returns
    -------
    DataFrame
        Columns: `key` and `value` of the map.

    Examples
    --------
    >>> read_broadcast_state(spark, "/data/savepoints/7", "limited", "limits").show()  # doctest: +SKIP
    """
    stored = stored_state(spark, path, uid, checkpoint=checkpoint, chain=chain, scratch=scratch)
    section, schema, columns = stored.without_keys(BROADCAST, name)
    copies = stored.rows.mapInArrow(FirstCopy(stored.values, section), COPY)
    return copies.limit(1).mapInArrow(ReadSection(CopyValues(), section, schema), columns)


def read_list_state(
    spark: SparkSession,
    path: str | Path,
    uid: str,
    name: str,
    *,
    checkpoint: int | None = None,
    chain: str | None = None,
    scratch: str | Path | None = None,
) -> DataFrame:
    """Return an operator list state of a savepoint or a retained checkpoint: the items of all partitions.

    Parameters are those of :func:`read_state`, and so are errors.

    Returns
    -------
    DataFrame
        Column: `item`. The items of a partition are in their order, partitions in none.

    Examples
    --------
    >>> read_list_state(spark, "/data/savepoints/7", "merged", "open").count()  # doctest: +SKIP
    """
    stored = stored_state(spark, path, uid, checkpoint=checkpoint, chain=chain, scratch=scratch)
    section, schema, columns = stored.without_keys(LISTS, name)
    return stored.rows.mapInArrow(ReadSection(stored.values, section, schema), columns)
