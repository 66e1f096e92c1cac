"""DataFrame functions of users, as `transform()` takes them, and what is said when one fails."""

from __future__ import annotations

from collections.abc import Callable

from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame

from flinkish_spark.bridge import said
from flinkish_spark.errors import FlinkishError, GraphError, UserFunctionError
from flinkish_spark.runtime.columns import PREFIX

#: A stateless function from records to records.
Transform = Callable[[DataFrame], DataFrame]


def transformed(records: DataFrame, function: Transform) -> DataFrame:
    """Return what a function makes of records.

    Raises
    ------
    GraphError
        It returned no DataFrame, or Spark refuses what it asks for.
    UserFunctionError
        It raised.
    """
    try:
        found = function(records)
    except FlinkishError:
        raise
    except AnalysisException as error:
        raise GraphError(
            f"Spark refuses what {named(function)} of transform() does",
            why=str(error).partition("\n")[0],
            what_to_do=f"correct it; the records have {', '.join(_own(records))}",
        ) from error
    except Exception as error:
        raise UserFunctionError(
            f"{named(function)} of transform() failed: {said(error)}",
            what_to_do="it gets the records' DataFrame, and returns another; correct it",
        ) from error
    if not isinstance(found, DataFrame):
        raise GraphError(
            f"{named(function)} of transform() returned a {type(found).__name__}",
            what_to_do="return a DataFrame",
        )
    return found


def named(function: object) -> str:
    """Return what errors call a function."""
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"'{name}'"


def _own(records: DataFrame) -> list[str]:
    return [name for name in records.columns if not name.startswith(PREFIX)]
