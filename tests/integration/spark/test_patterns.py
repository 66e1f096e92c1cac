"""Patterns in a running job: readings by geohash, conditions as SQL text, a restart in the middle."""

from __future__ import annotations

import json
from typing import Any

import pytest

from flinkish_spark import OutputTag, RestoreSettings, WatermarkStrategy
from flinkish_spark.cep import (
    CEP,
    PATTERN_RULES,
    REFUSED_RULES,
    AfterMatchSkip,
    Pattern,
    PatternProcessFunction,
    PatternsFromStream,
)
from flinkish_spark.cep.compiler import compile_pattern
from flinkish_spark.cep.pattern_operator import LookedFor
from flinkish_spark.core.errors import PatternError, UserError
from flinkish_spark.savepoints.reader import read_state
from flinkish_spark.sources import Discovery, FileSource, JsonLines
from tests.integration.spark.test_keyed_functions import feed, memory
from tests.support.jobs import await_that, environment, rows

pytestmark = pytest.mark.timeout(600)
READING = "cell STRING, value DOUBLE, at LONG"
MINUTE = 60_000
CALM = OutputTag("calm", "cell STRING, at LONG")
LATE = OutputTag("late", f"{READING}, difference DOUBLE")


class Alarm(PatternProcessFunction):
    def process_match(self, match, ctx):
        yield (
            ctx.get_current_key(),
            match["first"][0].at,
            match["second"][0].at,
            match["second"][0].difference,
        )

    def process_timed_out_match(self, match, ctx):
        ctx.output(CALM, (ctx.get_current_key(), match["first"][0].at))


def steeper(event: Any, ctx: Any) -> bool:
    return event.difference > ctx.events_for("first")[0].difference


#: A rise, right behind it a steeper one, within 15 minutes.
RISING = (
    Pattern.begin("first", AfterMatchSkip.past_last_event())
    .where("difference > 0")
    .next("second")
    .where("difference > 0 AND cell <> 'u1x'")
    .where(steeper)
    .within(15 * MINUTE)
)


#: Events that are neither never come to the operator.
PEAK = Pattern.begin("low").where("value < 2").followed_by("high").where("value >= 4").within(15 * MINUTE)


class Difference:
    """Of the last two readings of a cell: what `count_window(2, 1)` gives to a function."""

    def open(self, context):
        pass

    def process(self, key, context, readings):
        if len(readings) == 2:
            before, last = readings
            yield last.cell, last.value, last.at, last.value - before.value

    def clear(self, context):
        pass

    def close(self):
        pass


def started(spark: Any, tmp_path: Any) -> Any:
    env = environment(spark, tmp_path / "job", trigger_interval_ms=100)
    frame = spark.readStream.schema(READING).json(str(tmp_path / "in"))
    timed = env.from_dataframe(frame, uid="readings").assign_timestamps_and_watermarks(
        WatermarkStrategy.for_bounded_out_of_orderness(MINUTE).with_timestamp_assigner("at")
    )
    steps = timed.key_by("cell").count_window(2, 1)
    differences = steps.process(Difference(), output=f"{READING}, difference DOUBLE", uid="differences")
    alarms = (
        CEP.pattern(differences.key_by("cell"), RISING)
        .in_event_time("at")
        .side_output_late_data(LATE)
        .process(Alarm(), output="cell STRING, first LONG, second LONG, difference DOUBLE", uid="alarms")
    )
    rises = timed.match_recognize(
        "PARTITION BY cell ORDER BY at MEASURES A.value AS low, FINAL LAST(B.value) AS high "
        "PATTERN (A B+) WITHIN INTERVAL '15' MINUTE DEFINE B AS value > PREV(value)",
        uid="rises",
    )
    peaks = CEP.pattern(timed.key_by("cell"), PEAK).select(
        lambda match: (match["low"][0].cell, match["high"][0].value),
        output="cell STRING, high DOUBLE",
        uid="peaks",
    )
    sinks = {name: memory(tmp_path, name) for name in ("alarms", "calm", "differences", "rises", "peaks")}
    peaks.sink_to(sinks["peaks"], uid="peaks-out")
    rises.sink_to(sinks["rises"], uid="rises-out")
    alarms.sink_to(sinks["alarms"], uid="out")
    alarms.get_side_output(CALM).sink_to(sinks["calm"], uid="calm")
    differences.sink_to(sinks["differences"], uid="differences-out")
    return env.execute_async(), sinks


def readings(*given: tuple[str, float, int]) -> list[dict[str, Any]]:
    return [{"cell": cell, "value": value, "at": minute * MINUTE} for cell, value, minute in given]


def test_alarms_over_a_restart_in_the_middle_of_a_pattern(spark: Any, tmp_path: Any) -> None:
    """Behaviour 167."""
    first = readings(
        ("u0a", 1, 0),
        ("u0a", 2, 1),
        ("u0b", 5, 0),
        ("u0b", 6, 2),
        ("u1x", 1, 0),
        ("u1x", 2, 1),
        ("u1x", 9, 3),
    )
    feed(tmp_path / "in", "0", first)
    client, sinks = started(spark, tmp_path)
    await_that(lambda: rows(client, "differences-out") == 4, client)
    client.stop_with_checkpoint()
    client.wait()
    assert [row for sink in ("alarms", "calm") for row in sinks[sink].rows()] == []
    before = client.progress.counts.get("alarms", {})
    assert open_in_state(spark, tmp_path) == still_open(before) == before.get("partial_matches_open", 0)

    client, sinks = started(spark, tmp_path)
    # u0a rises more steeply in time, u0b too late, u1x never (its cell is left out).
    feed(tmp_path / "in", "1", readings(("u0a", 4, 5), ("u0b", 9, 40), ("u2", 0, 90)))
    await_that(lambda: rows(client, "calm") >= 3, client)
    client.stop_with_checkpoint()
    client.wait()
    alarms = [tuple(row) for row in sinks["alarms"].rows()]
    assert alarms == [("u0a", 1 * MINUTE, 5 * MINUTE, 2.0)]
    calm = sorted(tuple(row) for row in sinks["calm"].rows())
    assert calm == [("u0b", 2 * MINUTE), ("u0b", 40 * MINUTE), ("u1x", 3 * MINUTE)]
    rises = sorted(tuple(row) for row in sinks["rises"].rows())
    assert rises == [("u0a", 1.0, 4.0), ("u0b", 5.0, 6.0), ("u1x", 1.0, 9.0)]
    assert sorted(tuple(row) for row in sinks["peaks"].rows()) == [("u0a", 4.0), ("u1x", 9.0)]
    assert client.progress.counts["alarms"]["matches"] == 1
    assert client.progress.counts["rises"] == {"matches": 3}
    counts = client.progress.counts["alarms"]
    # A level goes on where the first life of the job has left it.
    assert open_in_state(spark, tmp_path) == still_open(before, counts) == counts["partial_matches_open"]
    newest = client.statistics.entries[-1]
    (alarms,) = [one for one in newest.participants if one.uid == "alarms"]
    assert alarms.counts["partial_matches_open"] == counts["partial_matches_open"]


def still_open(*counts: dict[str, int]) -> int:
    opened, closed = (
        sum(one.get(f"partial_matches_{how}", 0) for one in counts) for how in ("opened", "closed")
    )
    return opened - closed


def open_in_state(spark: Any, tmp_path: Any) -> int:
    """Return how many partial matches the newest checkpoint has, over all lives of the job."""
    mark = LookedFor("", compile_pattern(RISING), RISING.skip).fingerprint
    try:
        matches = read_state(spark, tmp_path / "job", "alarms", f"pattern/matches of {mark}")
    except UserError:
        return 0
    is_open = "size(filter(value, one -> one.chain IS NOT NULL AND NOT one.is_held))"
    return matches.selectExpr(f"sum({is_open}) AS n").first().n


RULES = "id STRING, version LONG, rule STRING"


class Peaks(PatternProcessFunction):
    def process_match(self, match, ctx):
        yield ctx.get_current_key(), ctx.pattern_name(), ctx.pattern_version(), match["high"][0].value


def rule(version: int, least: float) -> dict[str, Any]:
    """A low reading, and behind it a high one: a rule that is data."""
    conditions = {"low": "value < 2", "high": f"value >= {least}"}
    nodes = [
        {"name": name, "type": "ATOMIC", "condition": {"type": "SQL", "expression": text}}
        for name, text in conditions.items()
    ]
    edge = {"source": "low", "target": "high", "type": "SKIP_TILL_NEXT"}
    return {"id": "peak", "version": version, "rule": json.dumps({"nodes": nodes, "edges": [edge]})}


def watched(spark: Any, tmp_path: Any, name: str, restore: Any = None) -> Any:
    env = environment(spark, tmp_path / name, trigger_interval_ms=100, restore=restore)
    found = {
        uid: env.from_source(
            FileSource(
                str(tmp_path / folder),
                JsonLines(),
                fields,
                discovery=Discovery.CONTINUOUS,
                discover_every_ms=100,
            ),
            uid=uid,
        )
        for uid, folder, fields in (("readings", "in", READING), ("rules", "rules", RULES))
    }
    timed = found["readings"].assign_timestamps_and_watermarks(
        WatermarkStrategy.for_bounded_out_of_orderness(0).with_timestamp_assigner("at")
    )
    peaks = (
        timed.key_by("cell")
        .connect(found["rules"].broadcast(PATTERN_RULES))
        .process(
            PatternsFromStream(READING, Peaks()),
            output="cell STRING, id STRING, version LONG, high DOUBLE",
            uid="peaks",
        )
    )
    sinks = {uid: memory(tmp_path, f"{name}-{uid}") for uid in ("peaks", "refused")}
    peaks.sink_to(sinks["peaks"], uid="peaks-out")
    peaks.get_side_output(REFUSED_RULES).sink_to(sinks["refused"], uid="refused")
    return env.execute_async(), sinks


def test_rules_come_while_a_job_runs_and_go_on_behind_a_savepoint(spark: Any, tmp_path: Any) -> None:
    """A rule that cannot be stands behind each that can: it shows that both were read."""
    wrong = {"id": "wrong", "version": 1, "rule": "{"}
    (tmp_path / "in").mkdir()
    feed(tmp_path / "rules", "0", [rule(1, 4), wrong])
    client, sinks = watched(spark, tmp_path, "first")
    await_that(lambda: rows(client, "refused") > 0, client)
    feed(tmp_path / "in", "0", readings(("u0a", 1, 0), ("u0b", 1, 0), ("u0a", 5, 1), ("u0c", 1, 1)))
    feed(tmp_path / "in", "1", readings(("u9", 9, 2)))
    await_that(lambda: rows(client, "peaks-out") == 1, client)
    client.stop_with_savepoint(str(tmp_path / "savepoint"))
    client.wait()
    assert [tuple(row) for row in sinks["peaks"].rows()] == [("u0a", "peak", 1, 5.0)]
    assert client.progress.counts["peaks"]["partial_matches_open"] == 2

    before = spark.conf.get("spark.sql.shuffle.partitions")
    spark.conf.set("spark.sql.shuffle.partitions", str(int(before) + 1))
    try:
        feed(tmp_path / "rules", "1", [rule(2, 3), wrong])
        restore = RestoreSettings(str(tmp_path / "savepoint"))
        client, sinks = watched(spark, tmp_path, "second", restore)
        await_that(lambda: rows(client, "refused") > 0, client)
        feed(tmp_path / "in", "2", readings(("u0b", 3, 4), ("u9", 9, 9)))
        await_that(lambda: rows(client, "peaks-out") == 1, client)
        client.stop_with_checkpoint()
        client.wait()
    finally:
        spark.conf.set("spark.sql.shuffle.partitions", before)
    assert [tuple(row) for row in sinks["peaks"].rows()] == [("u0b", "peak", 2, 3.0)]
    # Of u0c it is open since the first job.
    counts = client.progress.counts["peaks"]
    assert (counts["partial_matches_restored"], counts["partial_matches_open"]) == (2, 1)
    (told, *_) = {tuple(row)[:3] for row in sinks["refused"].rows()}
    assert told == ("wrong", 1, "{")


@pytest.mark.parametrize("text", ["nothing > 1", "cell >"])
def test_a_condition_that_spark_cannot_evaluate_is_refused(spark: Any, tmp_path: Any, text: str) -> None:
    env = environment(spark, tmp_path / "job")
    readings = env.from_collection([("u", 1.0, 0)], READING, uid="readings")
    searched = CEP.pattern(readings.key_by("cell"), Pattern.begin("a").where(text)).in_processing_time()
    found = searched.select(lambda match: (1,), output="n INT", uid="found")
    found.sink_to(memory(tmp_path, "found"), uid="out")
    with pytest.raises(PatternError, match="Spark cannot evaluate the condition"):
        env.execute()
