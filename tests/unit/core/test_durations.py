"""A length of time is milliseconds, a timedelta or a text, a path a text or a Path, wherever one is taken."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from flinkish_spark import (
    AlignmentMode,
    AsyncRetryStrategy,
    CancellationConfig,
    CheckpointConfig,
    CircuitBreaker,
    DeadLetter,
    DeltaManifest,
    DeltaSink,
    ExponentialDelay,
    FailureRate,
    FileSecret,
    FileSink,
    FixedDelay,
    JdbcSink,
    KafkaSink,
    PartitionTime,
    ProcessTime,
    RestoreSettings,
    RollingPolicy,
    SchemaRegistry,
    StateTtl,
    UiConfig,
    UpstreamJob,
    WatermarkStrategy,
)
from flinkish_spark.cep import Pattern
from flinkish_spark.core.errors import ConfigError
from flinkish_spark.core.job_dir import job_place
from flinkish_spark.core.validation import to_ms
from flinkish_spark.joins import IntervalJoin, LookupCache
from flinkish_spark.sources import FileSource, JsonLines, SocketTextSource, Times
from flinkish_spark.windows import (
    ContinuousEventTimeTrigger,
    ContinuousProcessingTimeTrigger,
    EventTimeSessionWindows,
    GlobalWindows,
    ProcessingTimeSessionWindows,
    SlidingEventTimeWindows,
    SlidingProcessingTimeWindows,
    TimeEvictor,
    TumblingEventTimeWindows,
    TumblingProcessingTimeWindows,
    WindowSpec,
)


@pytest.mark.parametrize(
    ("given", "ms"),
    [
        (10, 10),
        (timedelta(minutes=2, milliseconds=7), 120_007),
        (timedelta(seconds=-1), -1_000),
        ("10 seconds", 10_000),
        ("5 min", 300_000),
        ("1h", 3_600_000),
        ("500 ms", 500),
        ("1h 30 min", 5_400_000),
        ("1.5 s", 1_500),
        ("-5 min", -300_000),
        ("2 DAYS", 172_800_000),
        (" 3 Hours ", 10_800_000),
    ],
)
def test_lengths_of_time(given: Any, ms: int) -> None:
    assert to_ms("timeout_ms", given) == ms


WANTED = (
    'It must be a whole number of milliseconds, a timedelta, or a text like "10 seconds", "5 min" or "500 ms"'
)
TO_DO = 'To do: give milliseconds, or a length of time as text: "10 seconds".'


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("10 secnds", f"timeout_ms is '10 secnds' (str). {WANTED}. Did you mean 'seconds'? {TO_DO}"),
        ("10", f"timeout_ms is '10' (str). {WANTED}. {TO_DO}"),
        ("", f"timeout_ms is '' (str). {WANTED}. {TO_DO}"),
        ("ten seconds", f"timeout_ms is 'ten seconds' (str). {WANTED}. {TO_DO}"),
        ("9" * 20 + " s", f"timeout_ms is '{'9' * 20} s' (str). {WANTED}. {TO_DO}"),
        ("0.5 ms", f"timeout_ms is '0.5 ms' (str). It must be a length of whole milliseconds. {TO_DO}"),
        (
            timedelta(microseconds=5),
            "timeout_ms is datetime.timedelta(microseconds=5) (timedelta). It must be a length of whole "
            f"milliseconds. {TO_DO}",
        ),
    ],
)
def test_what_is_no_length_of_time_is_refused(given: Any, says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        to_ms("timeout_ms", given)
    assert str(refused.value) == says


def test_anything_else_is_refused_as_before() -> None:
    for wrong in (None, True, 5.0, 0):
        with pytest.raises(ConfigError, match=r"interval_ms is .*It must be a whole number from 1 to"):
            CheckpointConfig(interval_ms=wrong)


def of_fields(kind: Any, *names: str, **more: Any) -> Iterator[tuple[str, Callable[[Any], int]]]:
    for name in names:
        yield f"{kind.__name__}.{name}", lambda given, name=name: getattr(kind(**{name: given}, **more), name)


BOUNDED = WatermarkStrategy.for_bounded_out_of_orderness
DURATIONS: dict[str, Callable[[Any], Any]] = {
    **dict(of_fields(CheckpointConfig, "interval_ms", "timeout_ms", "min_pause_ms", "restart_budget_ms")),
    **dict(of_fields(CheckpointConfig, "owner_lease_ms")),
    **dict(of_fields(FixedDelay, "delay_ms", attempts=3)),
    **dict(of_fields(ExponentialDelay, "initial_delay_ms", max_delay_ms=90_000)),
    **dict(of_fields(ExponentialDelay, "max_delay_ms", "reset_backoff_threshold_ms")),
    **dict(of_fields(FailureRate, "interval_ms", "delay_ms")),
    **dict(of_fields(CancellationConfig, "interval_ms", "timeout_ms")),
    **dict(of_fields(DeadLetter, "transaction_timeout_ms", topic="bad")),
    **dict(of_fields(SchemaRegistry, "timeout_ms", "retry_ms", url="http://registry:8081")),
    **dict(of_fields(JdbcSink, "timeout_ms", url="jdbc:postgresql://h:1/d", table="t")),
    **dict(of_fields(KafkaSink, "transaction_timeout_ms", bootstrap_servers="b:9092", topic="t")),
    **dict(of_fields(PartitionTime, "delay_ms")),
    **dict(of_fields(ProcessTime, "delay_ms")),
    **dict(of_fields(RollingPolicy, "rollover_ms", "inactivity_ms")),
    **dict(of_fields(StateTtl, "ttl_ms")),
    **dict(of_fields(LookupCache, "ttl_ms")),
    **dict(of_fields(Times, "step_ms", "jitter_ms", start=datetime(2026, 1, 1, tzinfo=UTC))),
    **dict(of_fields(AsyncRetryStrategy, "first_delay_ms", "longest_delay_ms", max_attempts=3)),
    **dict(of_fields(CircuitBreaker, "reset_ms")),
    **dict(of_fields(WindowSpec, "allowed_lateness_ms", assigner=GlobalWindows())),
    "IntervalJoin.lower_ms": lambda given: IntervalJoin("a INT", "a INT", given, 90_000).lower_ms,
    "IntervalJoin.upper_ms": lambda given: IntervalJoin("a INT", "a INT", 0, given).upper_ms,
    **dict(of_fields(UpstreamJob, "alignment_timeout_ms", mode=AlignmentMode.ALIGNED_WITH_TIMEOUT)),
    "WatermarkStrategy.for_bounded_out_of_orderness.max_out_of_orderness_ms": lambda given: (
        BOUNDED(given).generation.max_out_of_orderness_ms  # type: ignore[union-attr]
    ),
    "WatermarkStrategy.with_idleness.idleness_ms": lambda given: BOUNDED(0).with_idleness(given).idleness_ms,
    "WatermarkStrategy.with_watermark_alignment.max_drift_ms": lambda given: (
        BOUNDED(0).with_watermark_alignment("g", given).alignment.max_drift_ms  # type: ignore[union-attr]
    ),
    "AsyncRetryStrategy.fixed_delay": lambda given: AsyncRetryStrategy.fixed_delay(3, given).first_delay_ms,
    "AsyncRetryStrategy.exponential_backoff": lambda given: (
        AsyncRetryStrategy.exponential_backoff(3, given, given, 2.0).first_delay_ms
    ),
    "SocketTextSource.retry_delay_ms": lambda given: (
        SocketTextSource("h", 1, retry_delay_ms=given).peer.retry_delay_ms
    ),
    "TumblingEventTimeWindows.size_ms": lambda given: TumblingEventTimeWindows(given).periods_ms[0],
    "TumblingEventTimeWindows.offset_ms": lambda given: TumblingEventTimeWindows(90_000, given).periods_ms[2],
    "TumblingProcessingTimeWindows.size_ms": lambda given: TumblingProcessingTimeWindows(given).periods_ms[0],
    "SlidingEventTimeWindows.size_ms": lambda given: SlidingEventTimeWindows(given, 1_000).periods_ms[0],
    "SlidingEventTimeWindows.slide_ms": lambda given: SlidingEventTimeWindows(90_000, given).periods_ms[1],
    "SlidingProcessingTimeWindows.offset_ms": lambda given: SlidingProcessingTimeWindows(
        90_000, 80_000, given
    ).periods_ms[2],
    "EventTimeSessionWindows.gap_ms": lambda given: EventTimeSessionWindows(given).gap_ms,
    "ProcessingTimeSessionWindows.gap_ms": lambda given: ProcessingTimeSessionWindows(given).gap_ms,
    "ContinuousEventTimeTrigger.interval_ms": lambda given: ContinuousEventTimeTrigger(given)._interval_ms,
    "ContinuousProcessingTimeTrigger.interval_ms": lambda given: (
        ContinuousProcessingTimeTrigger(given)._interval_ms
    ),
    "TimeEvictor.keep_ms": lambda given: TimeEvictor(given)._keep_ms,
    "Pattern.within.window_ms": lambda given: Pattern.begin("a").within(given)._last.first_to_last_ms,
    "Pattern.one_or_more.window_ms": lambda given: (
        Pattern.begin("a").one_or_more(given)._last.times.window_ms  # type: ignore[union-attr]
    ),
}


@pytest.mark.parametrize("name", DURATIONS)
def test_a_duration_is_held_in_milliseconds(name: str) -> None:
    for given in (60_000, timedelta(minutes=1), "1 min", "60s", "60000 ms"):
        assert DURATIONS[name](given) == 60_000


#: Points in time, and what the package itself hands to a function or shows: nobody gives a length there.
NO_LENGTHS = frozenset(
    {
        *("at_ms", "decided_at_ms", "end_ms", "now_ms", "processing_time_ms", "restored_at_ms", "since_ms"),
        *("start_ms", "starting_at_ms", "time_ms", "times_ms", "timestamp_ms", "touched_ms", "trigger_at_ms"),
        *("watermark_ms", "for_ms", "needed_ms", "net_runtime_ms", "watermark_lag_ms"),
    }
)
SHOWN = ("ChannelStatistics", "CheckpointDurations", "LatencyHistogram", "ParticipantStatistics")
FACES = ("", ".sources", ".sinks", ".windows", ".cep", ".testing", ".state_processor", ".joins", ".state")


def public_parameters() -> Iterator[tuple[str, inspect.Parameter]]:
    """Yield the parameters of all public functions, classes and methods, with the names of these."""
    for face in FACES:
        module = importlib.import_module(f"flinkish_spark{face}")
        for name in module.__all__:
            one = getattr(module, name)
            methods = inspect.getmembers(one, inspect.isroutine) if inspect.isclass(one) else []
            for label, function in [(name, one), *((f"{name}.{method}", of) for method, of in methods)]:
                if (label == name or not label.rpartition(".")[2].startswith("_")) and callable(function):
                    try:
                        signature = inspect.signature(function)
                    except (TypeError, ValueError):
                        continue
                    for parameter in signature.parameters.values():
                        yield label, parameter


def test_every_length_of_time_in_the_public_api_takes_all_forms() -> None:
    plain = {
        f"{label}({one.name})"
        for label, one in public_parameters()
        if one.name.endswith("_ms") and one.name not in NO_LENGTHS and label.partition(".")[0] not in SHOWN
        if "Duration" not in str(one.annotation) and "Milliseconds" not in str(one.annotation)
    }
    assert plain == set()


def test_every_path_in_the_public_api_takes_a_path() -> None:
    names = ("path", "job_dir", "target", "savepoint_dir", "directory", "file", "scratch", "jars_dir")
    plain = {
        f"{label}({one.name})"
        for label, one in public_parameters()
        if one.name in names or one.name.endswith("_path")
        if not any(form in str(one.annotation) for form in ("Path", "JobDir"))
    }
    # Files as a format is asked for them, and what the package shows.
    assert {one.partition("(")[0].partition(".")[2] or one for one in plain} <= {
        "batches",
        "batches_between",
        "parts",
        "RestoredCheckpoint(path)",
    }


@pytest.mark.parametrize(
    "make",
    [
        lambda path: FileSink(path).path,
        lambda path: DeltaSink(path).path,
        lambda path: DeltaManifest(path).path,
        lambda path: FileSecret(path).path,
        lambda path: RestoreSettings(path).path,
        lambda path: UiConfig(savepoint_dir=path).savepoint_dir,
        lambda path: FileSource(path, JsonLines(), "a INT").path,
        lambda path: str(job_place(path).folder),
    ],
)
def test_a_path_is_held_as_text(make: Callable[[Any], str], tmp_path: Path) -> None:
    for given in (tmp_path, str(tmp_path)):
        assert make(given) == str(tmp_path)
