"""Where the state of one operator is read: a savepoint, or a retained checkpoint of a job directory."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql import functions as F
from pyspark.sql import types as T
from pyspark.sql.pandas.types import from_arrow_type

from flinkish_spark.arguments import instance_of
from flinkish_spark.bridge import said
from flinkish_spark.bridge.session import in_session
from flinkish_spark.errors import ConfigError
from flinkish_spark.graph.partitioning import shuffle_partitions
from flinkish_spark.operators.frames import FrameError
from flinkish_spark.operators.group_state import STATE
from flinkish_spark.operators.state_evolution import StateMismatch
from flinkish_spark.operators.stored_groups import BROADCAST, LISTS
from flinkish_spark.protocol.savepoints import SavepointMetadata, StateFile
from flinkish_spark.runtime.query import session_of_its_own
from flinkish_spark.runtime.state_files import BASES
from flinkish_spark.runtime.state_files import STATE as STATE_OF_SPARK
from flinkish_spark.savepoints.entries import (
    FOUND,
    FindSections,
    SavepointValues,
    Section,
    StoreValues,
    Values,
    common_columns,
    common_schema,
    sections_of,
    state_names,
)
from flinkish_spark.savepoints.errors import SavepointDamaged, SavepointFailed, SavepointMisfit
from flinkish_spark.savepoints.files import METADATA_KEY, SavepointDir
from flinkish_spark.savepoints.retained import is_job_dir, retained_state

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

#: Who reads states without keys, by what opens the names of their sections.
_WITHOUT_KEYS = {BROADCAST: "read_broadcast_state", LISTS: "read_list_state"}
#: Names of errors, in Spark's text, that say that what is stored cannot be trusted.
_DAMAGE = (SavepointDamaged.__name__, FrameError.__name__, StateMismatch.__name__)


@dataclass(frozen=True)
class StoredState:
    """The state of one operator in one chain, somewhere.

    Parameters
    ----------
    place
        What it is stored in, for messages.
    rows
        What tasks make values of.
    known
        Names of its states, if that is known without reading it.
    """

    place: str
    uid: str
    rows: DataFrame
    values: Values
    known: frozenset[str] | None = None

    def expect(self, name: str) -> None:
        """Raise SavepointMisfit if it is known that there is no such state."""
        if self.known is not None and name not in self.known:
            raise _missing(self.place, f"state of '{self.uid}'", name, self.known)

    def sections(self) -> Mapping[str, list[pa.Schema]]:
        """Return what is stored, by section; a Spark job that looks at all values.

        Raises
        ------
        SavepointDamaged, SavepointFailed
            A value is damaged, or Spark fails.
        """
        try:
            found = self.rows.mapInArrow(FindSections(self.values), FOUND).collect()
        except Exception as error:
            is_damaged = any(name in str(error) for name in _DAMAGE)
            raise (SavepointDamaged if is_damaged else SavepointFailed)(
                f"the state of '{self.uid}' in {self.place} cannot be read",
                why=said(error),
                what_to_do="read another savepoint or checkpoint; nothing was changed",
            ) from error
        return sections_of((row["section"], bytes(row["schema"])) for row in found)

    def section(self, name: str) -> Section:
        """Return the section of a state.

        Raises
        ------
        SavepointMisfit
            There is no such state, or its key groups have nothing in common.
        """
        sections = self.sections()
        for prefix, reader in _WITHOUT_KEYS.items():
            if prefix + name in sections and STATE + name not in sections:
                raise SavepointMisfit(
                    f"the state '{name}' of '{self.uid}' in {self.place} belongs to no key",
                    what_to_do=f"use {reader}()",
                )
        if STATE + name not in sections:
            raise _missing(self.place, f"entry of the state of '{self.uid}'", name, state_names(sections))
        try:
            return Section(STATE + name, common_schema(name, sections[STATE + name]))
        except StateMismatch as error:
            raise self._nothing_in_common(name, "keys", error) from error

    def without_keys(self, prefix: str, name: str) -> tuple[str, pa.Schema, T.StructType]:
        """Return the section of a state without keys, and its columns.

        Raises
        ------
        SavepointMisfit
            There is no such state, or its partitions have nothing in common.
        """
        sections = self.sections()
        found = sections.get(prefix + name, [])
        if not found:
            there = [one.removeprefix(prefix) for one in sections if one.startswith(prefix)]
            raise _missing(self.place, f"state without keys of '{self.uid}'", name, there)
        try:
            schema = common_columns(name, found)
        except StateMismatch as error:
            raise self._nothing_in_common(name, "partitions", error) from error
        columns = [T.StructField(one.name, from_arrow_type(one.type)) for one in schema]
        return prefix + name, schema, T.StructType(columns)

    def _nothing_in_common(self, name: str, who: str, error: StateMismatch) -> SavepointMisfit:
        return SavepointMisfit(
            f"the state '{name}' of '{self.uid}' in {self.place} has no columns of its own",
            why=str(error),
            what_to_do=f"let the job touch all {who} with its present declaration, and read it then",
        )


def stored_state(
    spark: SparkSession,
    path: str | Path,
    uid: str,
    *,
    checkpoint: int | None,
    chain: str | None,
    scratch: str | Path | None,
) -> StoredState:
    """Return where the state of an operator is to be read; see :func:`read_state`."""
    place, checkpoint = _place(path, checkpoint)
    if checkpoint is None and ((place / METADATA_KEY).is_file() or not is_job_dir(place)):
        return _in_savepoint(spark, place, uid, chain)
    return _in_checkpoint(spark, place, checkpoint, uid, chain, None if scratch is None else Path(scratch))


def _place(path: str | Path, checkpoint: int | None) -> tuple[Path, int | None]:
    """Return a savepoint's or job's directory, and the checkpoint that is meant."""
    place = Path(str(path).removeprefix("file://")).absolute()
    if place.parent.name == "checkpoints" and place.name.isdecimal() and is_job_dir(place.parent.parent):
        own = int(place.name)
        if checkpoint not in (None, own):
            raise ConfigError(
                f"the path {place} means checkpoint {own}, and checkpoint={checkpoint} was given",
                what_to_do="give one of them",
            )
        return place.parent.parent, own
    if checkpoint is not None:
        instance_of("checkpoint", checkpoint, int, what_to_do="give the id of a checkpoint, such as 41")
        if not is_job_dir(place):
            raise ConfigError(
                f"checkpoint={checkpoint} was given, and {place} is no job directory",
                what_to_do="give the job directory, or leave the checkpoint out to read a savepoint",
            )
    return place, checkpoint


# -- savepoints -------------------------------------------------------------------------------------
def _in_savepoint(spark: SparkSession, path: Path, uid: str, chain: str | None) -> StoredState:
    place = SavepointDir(path)
    metadata = place.metadata()
    files = files_of(metadata, uid, chain)
    place.check_files(files)
    described = [(json.dumps(file.to_json()),) for file in files]
    listed = spark.createDataFrame(described, "file STRING").repartition(max(len(files), 1))
    known = frozenset(metadata.operators[uid].states)
    return StoredState(f"the savepoint {path}", uid, listed, SavepointValues(str(path)), known)


def files_of(metadata: SavepointMetadata, uid: str, chain: str | None) -> list[StateFile]:
    """Return the state files of an operator in one chain.

    Raises
    ------
    SavepointMisfit
        The savepoint has no such operator or chain, or several chains and it is not said which.
    """
    if uid not in metadata.operators:
        raise _missing("the savepoint", "operator", uid, metadata.operators)
    files = [file for file in metadata.files if file.operator == uid]
    wanted = _chain(uid, chain, {file.chain for file in files})
    return [file for file in files if file.chain == wanted]


def _chain(uid: str, chain: str | None, there: Iterable[str]) -> str | None:
    """Return the chain that is meant; None where there is none."""
    known = sorted(there)
    if chain is not None and chain not in known:
        raise _missing("the savepoint", f"chain of '{uid}'", chain, known)
    if chain is None and len(known) > 1:
        raise SavepointMisfit(
            f"operator '{uid}' has state in several chains",
            what_to_do=f"say which: chain={' or '.join(repr(one) for one in known)}",
        )
    return chain or next(iter(known), None)


def _missing(place: str, what: str, name: str, there: Iterable[str]) -> SavepointMisfit:
    known = ", ".join(sorted(there)) or "none"
    return SavepointMisfit(f"{place} has no {what} '{name}'", what_to_do=f"choose from: {known}")


# -- checkpoints ------------------------------------------------------------------------------------
def _in_checkpoint(
    spark: SparkSession, root: Path, checkpoint: int | None, uid: str, chain: str | None, scratch: Path | None
) -> StoredState:
    _check_scratch(spark, root, scratch)
    retained = retained_state(root, checkpoint)
    number = retained.manifest.checkpoint
    place = f"checkpoint {number} of {root}"
    numbers = retained.operators(uid)
    if not numbers:
        raise _missing(place, "operator", uid, {one.uid for one in retained.layout.operators})
    operator = numbers[str(_chain(uid, chain, numbers))]
    view = retained.view(operator, scratch)
    try:
        # Spark makes up its mind about the store's format while it loads.
        own = session_of_its_own(spark, shuffle_partitions(spark))
        state = own.read.format("statestore").option("batchId", str(retained.manifest.batch))
        frame = in_session(state.option("operatorId", str(operator)).load(str(view)), spark)
    except Exception as error:
        raise SavepointFailed(
            f"Spark cannot read the state of {place}",
            why=said(error),
            what_to_do="run the Spark version that wrote it; the job is not affected",
        ) from error
    values = frame.select(F.col("value.groupState.value").alias("value"))
    return StoredState(place, uid, values, StoreValues(str(view / STATE_OF_SPARK / BASES / uid), uid))


def _check_scratch(spark: SparkSession, root: Path, scratch: Path | None) -> None:
    if scratch is None:
        if not (spark.sparkContext.master or "").startswith("local"):
            raise ConfigError(
                "to read a checkpoint on a cluster a scratch directory is needed",
                why="links to the checkpoint's files are made there, which executors have to see",
                what_to_do="give scratch=, on a file system that driver and executors share; "
                "or read a savepoint",
            )
        return
    if not scratch.is_absolute() or scratch.resolve().is_relative_to(root.resolve()):
        raise ConfigError(
            f"scratch={str(scratch)!r} cannot be used",
            why="executors have other working directories, and the job directory is never changed",
            what_to_do="give an absolute path outside of the job directory",
        )
