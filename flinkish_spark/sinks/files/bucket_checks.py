"""What is looked at before a start about the columns that bucket assigners make, a user's own among them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from flinkish_spark.errors import FlinkishError, SchemaError, UserFunctionError
from flinkish_spark.sinks.files.buckets import BucketAssigner, refuse_taken
from flinkish_spark.sinks.partition_values import why_no_partition

if TYPE_CHECKING:
    from pyspark.sql import Column, SparkSession
    from pyspark.sql import types as T

#: Zones whose wall clock is an instant.
_UTC = frozenset({"UTC", "Etc/UTC", "GMT", "Z", "+00:00"})


def check_folders(
    assigners: Sequence[BucketAssigner], schema: T.StructType, spark: SparkSession, uid: str
) -> None:
    """Make the folders' columns on an empty frame.

    Parameters
    ----------
    schema
        Of the stream.
    uid
        Of the sink, for messages.

    Raises
    ------
    UserFunctionError
        An assigner raises.
    SchemaError
        A folder has no column, Spark does not take it, or its values cannot be part of a name.
    """
    if not assigners:
        return
    added: dict[str, Column] = {}
    for one in assigners:
        added.update(_columns_of(one, uid))
    refuse_taken(tuple(added), schema, uid)
    found = _fields_with(added, schema, spark, uid)
    for name in (name for one in assigners for name in one.names):
        if name not in found.names:
            raise SchemaError(
                f"the bucket folder '{name}' of sink '{uid}' has no column",
                why="its assigner names it in `names`, and neither `columns` nor the stream has it",
                what_to_do=f"return it from columns(), or choose from {', '.join(schema.names)}",
                uid=uid,
            )
        why = why_no_name(found[name].dataType) or _why_other_time(found[name].dataType, spark)
        if why:
            raise SchemaError(
                f"the column '{name}' cannot give sink '{uid}' its buckets",
                why=why,
                what_to_do="choose strings, numbers or dates; for instants use DateTimeBuckets(column=...)",
                uid=uid,
            )


def _columns_of(one: BucketAssigner, uid: str) -> dict[str, Column]:
    try:
        return dict(one.columns(0))
    except FlinkishError:
        raise
    except Exception as error:
        raise UserFunctionError(
            f"columns() of the {type(one).__name__} of sink '{uid}' failed",
            why=f"{type(error).__name__}: {error}".split("\n")[0],
            what_to_do="correct the assigner",
            uid=uid,
        ) from error


def _fields_with(
    added: dict[str, Column], schema: T.StructType, spark: SparkSession, uid: str
) -> T.StructType:
    """Return the stream's fields and those that are added, as Spark sees them."""
    from pyspark.errors import PySparkException

    empty = spark.createDataFrame([], schema)
    try:
        # Beside all fields of the stream: an aggregate alone would be taken.
        return empty.select("*", *(column.alias(name) for name, column in added.items())).schema
    except (PySparkException, TypeError, AttributeError) as error:
        raise SchemaError(
            f"the bucket columns {', '.join(added)} of sink '{uid}' do not fit its stream",
            why=str(error).split("\n")[0],
            what_to_do=f"use only the fields {', '.join(schema.names)}, one row at a time",
            uid=uid,
        ) from error


def why_no_name(kind: T.DataType) -> str:
    """Return why values of a type cannot be in a folder's name; empty if they can."""
    from pyspark.sql import types as T

    if not isinstance(kind, T.AtomicType) or isinstance(kind, T.BinaryType | T.VariantType):
        return f"a {kind.simpleString()} cannot be part of a folder's name"
    return why_no_partition(kind)


def _why_other_time(kind: T.DataType, spark: SparkSession) -> str:
    from pyspark.sql import types as T

    zone = str(spark.conf.get("spark.sql.session.timeZone"))
    if not isinstance(kind, T.TimestampType) or zone in _UTC:
        return ""
    return (
        f"it would be a time of the session's zone, {zone}: not of its readers', and hours come twice in many"
    )
