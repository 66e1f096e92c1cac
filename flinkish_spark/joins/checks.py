"""Checks of what joins are told, at the call that tells it."""

from __future__ import annotations

import enum
from typing import Any

from pyspark.sql import types as T

from flinkish_spark.arguments import instance_of, refused_as_config_errors, unusable
from flinkish_spark.operators.elements import MAX_WATERMARK_MS, OutputTag
from flinkish_spark.protocol.limits import checked_whole
from flinkish_spark.runtime.ddl import DdlError, parse_ddl
from flinkish_spark.runtime.usable_types import first_required, unfit_for_rows

#: Bounds and times beyond this would leave 64 bits when they are added to a time.
_MOST_MS = MAX_WATERMARK_MS // 2


def bound_ms(name: str, value: int) -> int:
    """Return a distance in time, of either sign; raise ConfigError unless it is whole milliseconds."""
    with refused_as_config_errors(f"set {name} to a number of milliseconds, which may be negative"):
        checked_whole(name, value, least=-_MOST_MS, most=_MOST_MS)
    return value


def one_of(name: str, value: object, kind: type[enum.Enum]) -> None:
    """Raise ConfigError unless a value is a member of an enum."""
    members = ", ".join(f"{kind.__name__}.{member.name}" for member in kind)
    instance_of(name, value, kind, what_to_do=f"give one of {members}")


def tag_or_none(name: str, value: object) -> None:
    """Raise ConfigError unless a value is an OutputTag or None."""
    if value is not None:
        instance_of(name, value, OutputTag, what_to_do="give an OutputTag, or leave it out")


def element_ddl(name: str, value: Any) -> None:
    """Raise ConfigError unless a value is the DDL of a type or of fields."""
    instance_of(name, value, str, what_to_do='write the type as DDL, as "user STRING, amount LONG"')
    try:
        why = _unfit(parse_ddl(value))
    except DdlError as error:
        why = str(error)
    if why is not None:
        raise unusable(
            name,
            value,
            wanted=f"a type as DDL ({why})",
            what_to_do='write it as "user STRING, amount LONG", or as one type',
        )


def _unfit(kind: T.DataType) -> str | None:
    """Return why elements cannot be of a type."""
    if (name := first_required(kind)) is not None:
        return f"{name!r} is NOT NULL, which counts in what a function emits: leave it away"
    return unfit_for_rows(kind)
