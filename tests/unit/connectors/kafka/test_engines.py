"""The reader and the writer of a job for which nobody chose them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flinkish_spark import Json, KafkaSink, KafkaSource, StreamExecutionEnvironment
from flinkish_spark.connectors.kafka import sink as sinks
from flinkish_spark.connectors.kafka import source as sources
from flinkish_spark.core.errors import EnvironmentFault
from flinkish_spark.core.formats import Engine
from flinkish_spark.core.job_dir import JobDir
from flinkish_spark.core.store import LocalStore

PYTHON, JVM = Engine.PYTHON, Engine.JVM


class Session:
    """As much of a session as declaring a job asks of it."""

    readStream = None  # noqa: N815 - Spark's name
    sparkContext = None  # noqa: N815 - Spark's name
    _jvm = object()


def session(monkeypatch: pytest.MonkeyPatch, *, has_jars: bool) -> Any:
    monkeypatch.setattr(sources, "has_kafka_source", lambda spark: has_jars)
    monkeypatch.setattr(sinks, "has_shim", lambda spark: has_jars)
    return Session()


def declared(spark: Any, job_dir: Path, **chosen: Any) -> tuple[Engine, str | Engine | None]:
    env = StreamExecutionEnvironment(spark, "orders", str(job_dir))
    source = KafkaSource("b:9092", ["orders"], value=Json("n LONG"), **chosen)
    stream = env.from_source(source, uid="orders")
    stream.sink_to(KafkaSink("b:9092", "copies", writer=chosen.get("reader")), uid="copies")
    (read,), (written,) = env.graph.sources, env.graph.sinks
    return read.source.reader, written.sink.writer  # type: ignore[attr-defined]


def begin(job_dir: Path, source: str) -> None:
    JobDir(LocalStore(job_dir)).read_or_create_job({"job": "orders", "sources": [source]})


@pytest.mark.parametrize(
    ("has_jars", "chosen", "expected"),
    [
        (True, {}, (JVM, JVM)),
        (False, {}, (PYTHON, PYTHON)),
        (True, {"reader": "python"}, (PYTHON, PYTHON)),
        # Refused later, by the preflight, as it was: it was asked for by name.
        (False, {"reader": "jvm"}, (JVM, JVM)),
    ],
)
def test_a_new_job_takes_what_its_session_has_unless_somebody_chose(
    has_jars: bool, chosen: Any, expected: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert declared(session(monkeypatch, has_jars=has_jars), tmp_path, **chosen) == expected


@pytest.mark.parametrize("has_jars", [True, False])
def test_a_job_that_python_began_is_read_in_python_when_the_jars_have_come(
    has_jars: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    begin(tmp_path, "orders kafka-python")
    writer = JVM if has_jars else PYTHON
    assert declared(session(monkeypatch, has_jars=has_jars), tmp_path) == (PYTHON, writer)


def test_a_job_that_sparks_source_began_is_refused_by_name_when_the_jars_are_gone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    begin(tmp_path, "orders")
    assert declared(session(monkeypatch, has_jars=True), tmp_path) == (JVM, JVM)
    with pytest.raises(EnvironmentFault, match="'orders' was begun with Spark's Kafka source"):
        declared(session(monkeypatch, has_jars=False), tmp_path)
