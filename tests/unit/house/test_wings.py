"""Core and its wings: who may import whom, and what core gets by name."""

from __future__ import annotations

from typing import Any

import grimp
import pytest

from flinkish_spark.core import wings as parts
from tests.unit.house.test_public_api import loaded_after
from tools.wings import CORE, FACADE, Wings, WingsContract

OPTIONS: dict[str, Any] = {
    "facade": ["flinkish_spark"],
    "wings": ["stores: core.buckets", "ops: cli job.doctor"],
}


def check(*imports: tuple[str, str], **more: Any) -> list[tuple[str, str, str]]:
    """Return the importer, the imported module and the arrow between wings, for imports that are wrong."""
    graph = grimp.ImportGraph()
    for module in ("core", "core.buckets", "cli", "cli.app", "job.doctor", "job.doctors"):
        graph.add_module(f"flinkish_spark.{module}")
    for one, other in imports:
        importer = f"flinkish_spark.{one}".rstrip(".")
        graph.add_import(importer=importer, imported=f"flinkish_spark.{other}")
    found = WingsContract("wings", {}, {**OPTIONS, **more}).check(graph, verbose=False)
    wrong = found.metadata["wrong"]
    assert found.kept is not bool(wrong)
    return [tuple(text.removeprefix("flinkish_spark.") for text in one) for one in wrong]


def test_a_module_is_in_the_wing_that_names_it_or_its_package() -> None:
    wings = Wings("flinkish_spark", "ops: cli job.doctor")
    expected = {"cli": "ops", "cli.app": "ops", "job.doctor": "ops", "job.doctors": CORE}
    assert {one: wings.find(f"flinkish_spark.{one}") for one in expected} == expected
    assert wings.find("flinkish_spark") == FACADE


def test_core_and_other_wings_may_not_import_a_wing() -> None:
    assert check(("cli.app", "job.doctor"), ("cli", "core"), ("", "core.buckets")) == []
    assert check(("core", "core.buckets")) == [("core", "core.buckets", "core -> stores")]
    assert check(("job.doctors", "cli.app")) == [("job.doctors", "cli.app", "core -> ops")]
    assert check(("job.doctor", "core.buckets")) == [("job.doctor", "core.buckets", "ops -> stores")]
    assert check(("job.doctor", "core.buckets"), allowed=["ops -> stores"]) == []
    one = ["flinkish_spark.core -> flinkish_spark.cli"]
    assert check(("core", "cli"), ("core", "cli.app"), allowed=one) == [("core", "cli.app", "core -> ops")]


def test_a_wing_without_its_module_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no modules: flinkish_spark\.nothing"):
        check(wings=["ops: nothing"])


def test_every_part_is_where_core_looks_for_it() -> None:
    assert {"store s3", "store hdfs", "job face", "Kafka door"} <= parts._LOADERS.keys()
    for name in parts._LOADERS:
        assert parts.load_part(name) is not None, name


def test_a_program_loads_no_wing_that_it_does_not_use() -> None:
    """The environment and the connectors of core; streams import what begins a pattern."""
    loaded = loaded_after(
        "from flinkish_spark import DeltaSink, FileSink, KafkaSink, KafkaSource, StreamExecutionEnvironment"
    )
    wings = Wings.read()
    apart = wings.modules.keys() - {"cep"}
    assert [name for name in loaded if wings.find(name) in apart] == []
