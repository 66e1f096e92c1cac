"""Fields that are checked by their annotations: what a message may show, and whose fields are checked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
from pyspark.sql import SparkSession

from flinkish_spark import DeltaSink, KafkaSink, SchemaRegistry, StreamExecutionEnvironment
from flinkish_spark.core.errors import ConfigError


@pytest.mark.parametrize(
    "make",
    [
        lambda: DeltaSink("/x", store_options=[("aws_secret_access_key", "SECRET")]),  # type: ignore[arg-type]
        lambda: DeltaSink("/x", store_options={"one": "SECRET", 5: "SECRET"}),  # type: ignore[dict-item]
        lambda: SchemaRegistry(["https://u:SECRET@h"]),  # type: ignore[arg-type]
        lambda: SchemaRegistry("http://h", username=("u", "SECRET")),  # type: ignore[arg-type]
    ],
)
def test_what_may_hold_a_secret_is_not_in_the_message(make: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        make()
    assert "SECRET" not in str(caught.value) + repr(caught.value.facts)


def test_files_of_a_registry_may_be_paths_and_a_key_may_be_none() -> None:
    assert SchemaRegistry("http://h", ca_location=Path("/ca.pem")).ca_location == "/ca.pem"
    assert not KafkaSink("broker:9092", "totals", key=None).key


class Summing:
    """An aggregate by its methods alone."""

    def create_accumulator(self) -> int:
        return 0

    def add(self, value: Any, accumulator: int) -> int:
        return accumulator + int(value.amount)

    def get_result(self, accumulator: int) -> tuple[int]:
        return (accumulator,)


def test_an_aggregate_may_have_the_methods_without_the_class() -> None:
    env = StreamExecutionEnvironment(object.__new__(SparkSession), job="orders", job_dir="/jobs/a")
    orders: Any = env.from_collection([("ann", 1)], "user STRING, amount LONG", uid="orders").key_by("user")
    assert orders.aggregate(Summing(), accumulator="LONG", output="n LONG", uid="sums")
    with pytest.raises(ConfigError, match="ttl is 5"):
        orders.aggregate(Summing(), accumulator="LONG", output="n LONG", ttl=5, uid="more")


@dataclass(frozen=True)
class Labelled(DeltaSink):
    """A user's class with fields of its own, which nobody of ours can judge."""

    mood: Literal["calm", "wild"] = "calm"
    label: str = None  # type: ignore[assignment]


def test_fields_of_a_user_s_subclass_are_the_user_s() -> None:
    assert Labelled("/x", mood="wild").label is None
