"""Checks of what a user declares about a stream: field names, output types, key groups."""

from __future__ import annotations

from collections.abc import Iterable

from pyspark.sql import types as T

from flinkish_spark.core.elements import OutputType
from flinkish_spark.core.errors import SchemaError
from flinkish_spark.types.hints import NoSuchType, same_names, to_data_type


def output_schema(output: OutputType, uid: str) -> T.StructType:
    what_to_do = 'write it like "user STRING, total LONG", or give a StructType, a dataclass or a NamedTuple'
    try:
        schema = to_data_type(output)
    except NoSuchType as error:
        raise SchemaError(
            f"the output of '{uid}' cannot be read", why=str(error), what_to_do=what_to_do
        ) from None
    if not isinstance(schema, T.StructType) or not schema.fields:
        raise SchemaError(f"the output of '{uid}' is not a list of fields: {output!r}", what_to_do=what_to_do)
    check_field_names(schema, f"the output of '{uid}'")
    if (why := same_names(schema)) is not None:
        raise SchemaError(f"the output of '{uid}' cannot be read", why=why, what_to_do="rename one of them")
    return schema


def nullable(fields: Iterable[T.StructField]) -> T.StructType:
    """Return the fields as nullable: rows that belong to another input have nulls in them."""
    return T.StructType([T.StructField(field.name, field.dataType) for field in fields])


def check_field_names(schema: T.StructType, what: str, what_to_do: str = "rename one of them") -> None:
    """Raise SchemaError for names that are empty, reserved or used twice (Spark ignores case)."""
    seen: dict[str, str] = {}
    for name in schema.names:
        if not name:
            raise SchemaError(f"{what} has a field without a name", what_to_do="name the field")
        if name.lower().startswith(PREFIX):
            raise SchemaError(
                f"{what} has a field '{name}'",
                why=f"names that start with {PREFIX} are control columns",
                what_to_do="rename the field",
            )
        # Java's case-insensitive comparison, which Spark uses.
        folded = name.upper().lower()
        if folded in seen:
            raise SchemaError(
                f"{what} has the field '{name}' twice",
                why="" if seen[folded] == name else f"for Spark it is the same as '{seen[folded]}'",
                what_to_do=what_to_do,
            )
        seen[folded] = name


#: Prefix of every control column; a user's schema may not use it.
PREFIX = "_fs_"
