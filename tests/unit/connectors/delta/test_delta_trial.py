"""A table's store is tried before a sink starts: it must not write anew what may only be made."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flinkish_spark import CheckpointConfig, DeltaManifest, DeltaSink
from flinkish_spark.connectors.delta import manifest, sink, sink_settings
from flinkish_spark.connectors.delta.sink_settings import check_creates
from flinkish_spark.core.errors import ConfigError, EnvironmentFault, StoreError
from flinkish_spark.protocol.ids import JobUuid, OwnerEpoch
from flinkish_spark.types.ddl import parse_ddl
from tests.support.misbehaving_s3 import Answer, MisbehavingS3
from tests.support.sinks import sink_context_of


def tried(server: MisbehavingS3, google: bool = False) -> None:
    spec = server.google_spec if google else server.spec
    check_creates(f"{spec.url}/t", dict(spec.options), "sink 'table'")


@pytest.mark.parametrize("google", [False, True])
def test_a_store_that_passes_over_conditions_is_refused(google: bool) -> None:
    with MisbehavingS3(obeys_conditions=False) as server:
        with pytest.raises(EnvironmentFault, match="/job/t cannot be committed to by sink 'table'"):
            tried(server, google)
        assert server.requests["create"] == 2 and not server.objects


@pytest.mark.parametrize("google", [False, True])
@pytest.mark.parametrize("keeps_metadata", [False, True])
def test_a_store_that_refuses_the_second_is_taken(keeps_metadata: bool, google: bool) -> None:
    with MisbehavingS3(keeps_metadata=keeps_metadata) as server:
        tried(server, google)
        assert server.requests["create"] == 2 and not server.objects


@pytest.mark.parametrize("obeys", [False, True])
@pytest.mark.parametrize("answer", [Answer.STORES_THEN_DROPS, Answer.DROPS, Answer.SAYS_503])
@pytest.mark.parametrize("at", [0, 1])
def test_a_lost_answer_says_nothing(answer: Answer, at: int, obeys: bool) -> None:
    with MisbehavingS3(obeys_conditions=obeys) as server:
        server.creates.extend([*[Answer.OBEYS] * at, answer])
        if obeys:
            tried(server)
        else:
            with pytest.raises(EnvironmentFault, match="cannot be committed to"):
                tried(server)
        assert not server.objects


@pytest.mark.parametrize("answer", [Answer.SAYS_503, Answer.SAYS_403])
def test_a_store_that_cannot_be_tried_is_not_taken(answer: Answer) -> None:
    with MisbehavingS3() as server:
        server.always_create = answer
        with pytest.raises(StoreError):
            tried(server)


def test_options_that_only_delta_rs_has_are_left_out() -> None:
    with MisbehavingS3() as server:
        options = {**dict(server.spec.options), "AWS_S3_ALLOW_UNSAFE_RENAME": "true", "max_retries": "3"}
        check_creates("s3a://bucket/t", options, "a manifest")
        assert server.requests["create"] == 2


def test_which_tables_are_tried(tmp_path: Path) -> None:
    """A disk and HDFS make no file that is there; a store that nobody here knows cannot be tried."""
    for path in (str(tmp_path), f"file://{tmp_path}", "hdfs://nobody.invalid:8020/t"):
        check_creates(path, {}, "sink 'table'")
    assert not list(tmp_path.iterdir())
    with pytest.raises(ConfigError, match="here is no store for lakefs:"):
        check_creates("lakefs://repo/main/t", {}, "sink 'table'")


def test_sinks_and_manifests_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []

    def stands_in(module: Any) -> Callable[..., None]:
        assert module.check_creates is sink_settings.check_creates
        return lambda *given: asked.append(given)

    for module in (sink, manifest):
        monkeypatch.setattr(module, "check_creates", stands_in(module))
    monkeypatch.setattr(sink, "check_sink", lambda *given: None)
    monkeypatch.setattr(manifest.DeltaTables, "info", lambda *given: None)
    schema, nobody = parse_ddl("id BIGINT"), None
    context = sink_context_of(JobUuid("a" * 32), OwnerEpoch(1), "table", schema, CheckpointConfig())
    DeltaSink("s3://bucket/t", store_options={"region": "x"}).preflight(nobody, context)  # type: ignore[arg-type]
    DeltaManifest("s3://bucket/m").preflight(nobody, nobody)  # type: ignore[arg-type]
    assert asked == [("s3://bucket/t", {"region": "x"}, "sink 'table'"), ("s3://bucket/m", {}, "a manifest")]
