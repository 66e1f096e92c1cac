"""The place of a session in a process that has none: it answers with defaults, and refuses all else."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

import pyspark

from flinkish_spark.core.errors import ConfigError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class _Defaults:
    """Settings of which none is set."""

    getAll: Mapping[str, str] = MappingProxyType({})  # noqa: N815  # Spark's name

    @staticmethod
    def get(name: str, default: str | None = None) -> str | None:
        return default


class NoSession:
    """Stands for the session in a process that Spark starts for a data source."""

    _jvm = None
    version = pyspark.__version__
    conf = _Defaults()

    def __getattr__(self, name: str) -> Any:
        raise ConfigError(
            f"a sink needs the query's session ({name}), and where this format commits there is none",
            what_to_do="write with foreachBatch(SinkGroup({...})), whose sinks have the session",
        )


def is_pretended(spark: object) -> bool:
    return isinstance(spark, NoSession)


def pretend_session() -> SparkSession:
    """Return what stands for a session where there is none."""
    return cast("SparkSession", NoSession())
