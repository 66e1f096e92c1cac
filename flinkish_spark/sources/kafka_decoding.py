"""JSON values of a source of Kafka records: the columns that decoding needs, and what comes of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark.sql import types as T

from flinkish_spark.arguments import unusable
from flinkish_spark.errors import ConfigError
from flinkish_spark.formats import Json, OnBadRecord
from flinkish_spark.runtime import columns as C
from flinkish_spark.sources.json_records import decoded, json_schema
from flinkish_spark.sources.kafka_metadata import check_names, checked_metadata, metadata_columns, names_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

#: What the decoder looks at, and what metadata and event times are made of.
_NEEDED = T.StructType(
    [
        T.StructField("key", T.BinaryType()),
        T.StructField("value", T.BinaryType()),
        T.StructField("topic", T.StringType()),
        T.StructField("partition", T.IntegerType()),
        T.StructField("offset", T.LongType()),
        T.StructField("timestamp", T.TimestampType()),
    ]
)


@dataclass(frozen=True)
class Decoding:
    """What becomes of the records of a source.

    Parameters
    ----------
    value
        Fields of the JSON objects, and what is done with values that are none.
    metadata
        As for a :class:`~flinkish_spark.sources.kafka.KafkaSource`.
    """

    value: Json
    metadata: tuple[str, ...]

    @classmethod
    def of(cls, value: object, metadata: Sequence[str]) -> Decoding | None:
        """Return what a user asked for; None if records come as they are.

        Raises
        ------
        ConfigError, SchemaError
            It cannot be.
        """
        names = checked_metadata(metadata)
        if value is None:
            if names:
                raise ConfigError(
                    "metadata is asked for, and nothing is decoded",
                    what_to_do='name the fields: schema="value STRING, topic STRING, offset LONG"',
                )
            return None
        if not isinstance(value, Json):
            to_do = 'give Json("field TYPE, ..."), or leave it out and name fields with schema='
            raise unusable("value", value, wanted="a Json(...)", what_to_do=to_do)
        check_names(names, json_schema(value))
        return cls(value, names)

    @property
    def needed(self) -> T.StructType:
        """The fields that are read."""
        return _NEEDED

    @property
    def drops_records(self) -> bool:
        """Whether bad records are left out and counted."""
        return self.value.on_bad_record is OnBadRecord.DROP

    def applied(self, raw: DataFrame, counted_as: Sequence[str]) -> DataFrame:
        """Return the records' fields, metadata and what stands beside them.

        Parameters
        ----------
        raw
            Has the fields :attr:`needed`, and control columns.
        counted_as
            Tells what is counted from what others count.
        """
        control = [column for column in raw.columns if column.startswith(C.PREFIX)]
        with_metadata = raw.select("*", *metadata_columns(self.metadata))
        return decoded(with_metadata, self.value, counted_as, [*names_of(self.metadata), *control])
