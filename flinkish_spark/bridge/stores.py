"""How Spark and its executors reach a store outside of this host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from flinkish_spark.core.store import Store
from flinkish_spark.core.store_spec import StoreSpec
from flinkish_spark.core.wings import load_part

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class SparkStores(Protocol):
    def pass_on(self, spark: SparkSession, place: StoreSpec) -> None:
        """Pass the options of a store to Hadoop, unless the session has set them."""

    def check_bucket(self, spark: SparkSession, place: StoreSpec, store: Store) -> None:
        """Refuse a store that Spark, through Hadoop, does not see as this process does."""

    def check_bucket_in_tasks(self, spark: SparkSession, place: StoreSpec, store: Store) -> None:
        """Refuse a store that Python in tasks does not see as this process does."""

    def copy_in_tasks(self, spark: SparkSession, place: StoreSpec, names: Sequence[tuple[str, str]]) -> None:
        """Copy objects within a store without server-side copies, in tasks on all executors."""


def spark_stores() -> SparkStores:
    stores: SparkStores = load_part("stores in Spark")
    return stores
