"""Where a record comes from, as columns beside its fields: for the audit, and for whoever needs it."""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import Column
from pyspark.sql import functions as F
from pyspark.sql import types as T

from flinkish_spark.errors import ConfigError, SchemaError
from flinkish_spark.runtime import columns as C

#: What can be asked for; the column is called the same with an underscore in front.
METADATA = ("topic", "partition", "offset", "timestamp")
#: What only the planner asks for: the record's timestamp as event time.
OWN_TIME = "event time"


def checked_metadata(metadata: Sequence[str]) -> tuple[str, ...]:
    """Return the names that a user asked for, each once.

    Raises
    ------
    ConfigError
        It is no list, or one of them is not known.

    Examples
    --------
    >>> checked_metadata(["topic", "offset"])
    ('topic', 'offset')
    """
    # A set is no list: columns have an order, the same in every process.
    is_list = isinstance(metadata, Sequence) and not isinstance(metadata, str)
    if not is_list or not all(name in METADATA for name in metadata):
        raise ConfigError(
            f"metadata is {metadata!r}",
            why=f"it must be a list of names among {', '.join(METADATA)}",
            what_to_do='give it like metadata=["topic", "partition", "offset"], or leave it out',
        )
    return tuple(dict.fromkeys(metadata))


def metadata_columns(metadata: Sequence[str]) -> list[Column]:
    """Return the columns, made from those of a Kafka reader."""
    columns = {name: F.col(name) for name in METADATA} | {OWN_TIME: F.unix_millis("timestamp")}
    return [columns[name].alias(column) for name, column in zip(metadata, names_of(metadata), strict=True)]


def names_of(metadata: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the columns."""
    return tuple(C.TIME if name == OWN_TIME else f"_{name}" for name in metadata)


def check_names(metadata: Sequence[str], fields: T.StructType) -> None:
    """Raise SchemaError if a field of the records has the name of a metadata column."""
    # Spark does not tell names apart by case.
    taken = {name.lower() for name in fields.names}
    both = [name for name in names_of(metadata) if name in taken]
    if both:
        raise SchemaError(
            f"the JSON schema has a field '{both[0]}', and metadata asks for a column of that name",
            what_to_do=f"leave '{both[0][1:]}' out of metadata, or rename the field",
        )
