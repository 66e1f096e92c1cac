"""A misspelt word suggests the one that was meant: an imported name, a member of an enum, an option."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

import flinkish_spark
from flinkish_spark import (
    CheckpointConfig,
    CheckpointingMode,
    Csv,
    DebeziumJson,
    Json,
    KafkaSink,
    OnBadRecord,
    SchemaRegistry,
    StateTtl,
)
from flinkish_spark.core.errors import ConfigError
from flinkish_spark.core.suggestions import closest
from flinkish_spark.joins import JoinType


@pytest.mark.parametrize(
    ("word", "known", "says"),
    [
        ("KafkaSorce", ["KafkaSource", "KafkaSink"], "Did you mean 'KafkaSource'?"),
        ("compresion.type", ["compression.type", "linger.ms"], "Did you mean 'compression.type'?"),
        ("FALTEN", ["FLATTEN", "TEXT"], "Did you mean 'FLATTEN'?"),
        ("flatten", ["FLATTEN", "TEXT"], "Did you mean 'FLATTEN'?"),
        ("", ["a"], ""),
        ("banana", ["FLATTEN"], ""),
        ("banana", [], ""),
    ],
)
def test_the_nearest_known_word_is_suggested(word: str, known: list[str], says: str) -> None:
    assert closest(word, known) == says


@pytest.mark.parametrize(
    ("statement", "says"),
    [
        (
            "from flinkish_spark import KafkaSorce",
            "flinkish_spark has no KafkaSorce. Did you mean 'KafkaSource'? To do: correct the name; "
            "dir(flinkish_spark) lists all.",
        ),
        (
            "from flinkish_spark import TimeWindow",
            "flinkish_spark has no TimeWindow. It is in flinkish_spark.windows. To do: write "
            "`from flinkish_spark.windows import TimeWindow`.",
        ),
        (
            "from flinkish_spark import ConfigError",
            "flinkish_spark has no ConfigError. It is in flinkish_spark.core.errors. To do: write "
            "`from flinkish_spark.core.errors import ConfigError`.",
        ),
        (
            "from flinkish_spark.sources import FielSource",
            "flinkish_spark.sources has no FielSource. Did you mean 'FileSource'? To do: correct the name; "
            "dir(flinkish_spark.sources) lists all.",
        ),
        (
            "from flinkish_spark.windows import TumblngEventTimeWindows",
            "flinkish_spark.windows has no TumblngEventTimeWindows. Did you mean 'TumblingEventTimeWindows'? "
            "To do: correct the name; dir(flinkish_spark.windows) lists all.",
        ),
        (
            "from flinkish_spark.windoes import TumblingEventTimeWindows",
            "flinkish_spark has no windoes. Did you mean 'windows'? To do: correct the name; "
            "dir(flinkish_spark) lists all.",
        ),
    ],
)
def test_a_misspelt_import_says_which_name_was_meant(statement: str, says: str) -> None:
    with pytest.raises(ImportError) as failed:
        exec(statement, {})
    assert str(failed.value) == says


def test_what_is_like_no_name_fails_as_python_says_it() -> None:
    with pytest.raises(ImportError, match="cannot import name 'banana'"):
        exec("from flinkish_spark import banana", {})
    assert importlib.util.find_spec("flinkish_spark.banana") is None
    assert not hasattr(flinkish_spark, "KafkaSorce")


def test_a_misspelt_member_of_an_enum_says_which_was_meant() -> None:
    enum: Any = OnBadRecord
    with pytest.raises(AttributeError) as failed:
        _ = enum.DORP
    assert str(failed.value) == "OnBadRecord has no DORP. Did you mean 'DROP'? To do: choose from FAIL, DROP."
    with pytest.raises(AttributeError) as failed:
        _ = enum.banana
    assert str(failed.value) == "OnBadRecord has no banana. To do: choose from FAIL, DROP."
    with pytest.raises(AttributeError):
        _ = enum._nothing
    assert enum.DROP is OnBadRecord("drop") is OnBadRecord["DROP"]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (
            lambda: Json("a INT", on_bad_record="DORP"),  # type: ignore[arg-type]
            "on_bad_record is 'DORP' (str). It must be one of OnBadRecord.FAIL, OnBadRecord.DROP, or an "
            "instance of DeadLetter. Did you mean 'DROP'? To do: give one of these, without quotes, "
            "or leave it "
            "out.",
        ),
        (
            lambda: Csv("a INT", on_bad_record="OnBadRecord.DROP"),  # type: ignore[arg-type]
            "on_bad_record is 'OnBadRecord.DROP' (str). It must be one of OnBadRecord.FAIL, "
            "OnBadRecord.DROP, or an "
            "instance of DeadLetter. Did you mean 'DROP'? To do: give one of these, without quotes, "
            "or leave it "
            "out.",
        ),
        (
            lambda: DebeziumJson("a INT", on_bad_record="drop"),  # type: ignore[arg-type]
            "on_bad_record is 'drop' (str). It must be one of OnBadRecord.FAIL, OnBadRecord.DROP, or an "
            "instance of DeadLetter. Did you mean 'DROP'? To do: give one of these, without quotes, "
            "or leave it "
            "out.",
        ),
        (
            lambda: KafkaSink("b:9092", "t", delivery="exactly-once"),  # type: ignore[arg-type]
            "delivery is 'exactly-once' (str). It must be one of DeliveryGuarantee.EXACTLY_ONCE, "
            "DeliveryGuarantee.AT_LEAST_ONCE, DeliveryGuarantee.NONE. Did you mean 'EXACTLY_ONCE'? "
            "To do: give one "
            "of these, without quotes, or leave it out.",
        ),
        (
            lambda: CheckpointConfig(mode="AT_LEST_ONCE"),  # type: ignore[arg-type]
            "mode is 'AT_LEST_ONCE' (str). It must be one of CheckpointingMode.EXACTLY_ONCE, "
            "CheckpointingMode.AT_LEAST_ONCE. Did you mean 'AT_LEAST_ONCE'? To do: give "
            "CheckpointConfig such a value, or leave it out for its default.",
        ),
        (
            lambda: SchemaRegistry("http://r:1", registration="REQUIERD"),  # type: ignore[arg-type]
            "registration is 'REQUIERD' (str). It must be one of Registration.AUTOMATIC, "
            "Registration.REQUIRED. Did you mean 'REQUIRED'? To do: give one of these, without "
            "quotes, or leave it "
            "out.",
        ),
        (
            lambda: StateTtl(1_000, update="ON_WRITE"),  # type: ignore[arg-type]
            "update is 'ON_WRITE' (str). It must be one of TtlUpdate.ON_CREATE_AND_WRITE, "
            "TtlUpdate.ON_READ_AND_WRITE. Did you mean 'ON_READ_AND_WRITE'? To do: give one of "
            "these, without "
            "quotes, or leave it out.",
        ),
    ],
)
def test_a_text_in_place_of_an_enum_says_which_member_was_meant(make: Any, says: str) -> None:
    with pytest.raises(ConfigError) as failed:
        make()
    assert str(failed.value) == says


def test_members_are_taken_as_before() -> None:
    assert CheckpointConfig(mode=CheckpointingMode.AT_LEAST_ONCE).mode is CheckpointingMode.AT_LEAST_ONCE
    assert JoinType["LEFT"] is JoinType.LEFT and isinstance(JoinType.LEFT.name, str)
