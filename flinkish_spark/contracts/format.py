"""The interface of formats: how the bytes of a key or a value become columns, and back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import types as T

from flinkish_spark.contracts.source import JobPlace
from flinkish_spark.core.changelogs import ChangelogMode
from flinkish_spark.core.formats import BadRecordPolicy
from flinkish_spark.types.schemas import PREFIX

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclass(frozen=True)
class PartReader(ABC):
    """Reads the keys or the values of records; pickled into the plan."""

    #: ``key`` or ``value``: the column with the bytes.
    name: str
    #: The columns that it reads.
    fields: T.StructType

    @property
    def column(self) -> str:
        return f"{PREFIX}read_{self.name}"

    @abstractmethod
    def read(self, values: pa.Array, time_zone: str) -> tuple[pa.Array, pa.Array]:
        """Return a struct for each value, and the reasons of bad values; both are null for a null.

        In the struct, year-month intervals are numbers of months, see `restore_intervals`.
        """


@dataclass(frozen=True)
class EncodedColumn:
    #: The encoded bytes; undefined for rows with a misfit.
    data: pa.Array
    #: The reason why a row cannot be encoded, null if it was; None if every row was.
    misfit: pa.Array | None = None


@dataclass(frozen=True)
class PartWriter(ABC):
    """Writes the keys or the values of records; pickled into tasks."""

    #: The fields that :meth:`write` reads.
    fields: T.StructType

    @property
    def may_misfit(self) -> bool:
        return False

    def spark_columns(self) -> dict[str, Column]:
        """Return the columns that Spark computes before Python encodes."""
        return {}

    def spark_column_types(self) -> dict[str, T.DataType]:
        return {}

    @abstractmethod
    def write(self, records: pa.RecordBatch) -> EncodedColumn: ...

    def columns(self, records: pa.RecordBatch) -> list[pa.Array]:
        return [records.column(name) for name in self.fields.names]


class Format(ABC):
    """The format of the keys or the values of records."""

    __slots__ = ()
    #: None if every record can be read.
    on_bad_record: BadRecordPolicy | None

    @abstractmethod
    def make_reader(self, part: str) -> PartReader | None:
        """Return the reader of a key or a value; None if a registry's subject says the columns."""

    def find_reader(self, part: str, uid: str, place: JobPlace, topics: Sequence[str]) -> PartReader:
        """Return the reader; if a registry says the columns, its answer is recorded."""
        found = self.make_reader(part)
        assert found is not None
        return found

    def check_fields(self, schema: T.StructType, whose: str) -> None:
        """Refuse a stream whose fields cannot be written."""

    def check_start(self, spark: SparkSession, schema: T.StructType, whose: str) -> None:
        """Make the checks that need Spark or a library; called before anything starts."""

    @abstractmethod
    def make_writer(self, schema: T.StructType, topics: Sequence[str], part: str) -> PartWriter:
        """Return the writer of a stream's keys or values; with a registry this registers the schema."""


#: What to do about something that is no format.
FORMATS = 'use Json("field TYPE, ..."), Csv(...), String(), Avro(...), Protobuf(...), JsonSchema() or Raw()'


class Changelog(ABC):
    """Turns values of records into rows with a row kind."""

    #: The columns of a row.
    fields: T.StructType
    #: Names of the metadata columns.
    names: Sequence[str]
    #: The reason for a value that is no change.
    why: str

    @abstractmethod
    def find_misfits(self, frame: DataFrame, value: Column, time_zone: str) -> tuple[DataFrame, Column]:
        """Return the frame with the columns that the condition needs, and the condition: a value is bad."""

    @abstractmethod
    def rows(
        self, frame: DataFrame, value: Column, kept: Sequence[str], passes: Column | None, time_zone: str
    ) -> DataFrame:
        """Return the rows of values, with row kinds; a bad value ends the task."""


class Changes(ABC):
    """The format of values that are changes to the rows of a table."""

    on_bad_record: BadRecordPolicy
    mode: ChangelogMode

    def check_keyless(self) -> None:
        """Refuse a source without a key if a deletion may have nothing but the key."""

    @abstractmethod
    def make_format(self, metadata: Sequence[str]) -> Format:
        """Return the format of the values, which has the members that changes and metadata are in."""

    @abstractmethod
    def make_changelog(self, fields: T.StructType, metadata: Sequence[str]) -> Changelog:
        """Return what makes rows of values with these fields."""


def name_schema_fact(uid: str, part: str) -> str:
    """Return the name of the fact that records the registry's schema of a source's key or value."""
    return f"schema-{uid}-{part}"


def name_metadata_column(name: str) -> str:
    return "_" + name.replace(".", "_").replace("-", "_")
