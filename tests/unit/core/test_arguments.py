"""What a user hands to a public call is checked there: nothing is converted, nothing counts as left out."""

from __future__ import annotations

import copy
import math
import pickle
import re
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession

from flinkish_spark import (
    UNLIMITED,
    AlignmentMode,
    CheckpointConfig,
    ClaimMode,
    ColumnBuckets,
    ExponentialDelay,
    FailureRate,
    FixedDelay,
    JdbcSink,
    JobListener,
    KafkaSink,
    MasterHook,
    NonRestoredState,
    NoRestart,
    PartitionCommit,
    PartitionPolicy,
    QuietListener,
    RestoreSettings,
    Standby,
    StreamExecutionEnvironment,
    SuccessFile,
    UnknownHookState,
    UnpositionedSources,
    UpstreamJob,
)
from flinkish_spark.contracts.sink import Sink
from flinkish_spark.contracts.source import Source
from flinkish_spark.core.errors import ConfigError, GraphError
from flinkish_spark.core.steps import SilentObserver
from flinkish_spark.protocol import restart as rules
from flinkish_spark.sources import Counting, CsvFiles, DataGeneratorSource
from tests.support.jobs import RunningTotal

#: A session without a JVM: nothing of it is used before `execute`.
SESSION = SparkSession.__new__(SparkSession)
#: What a text must be where a length of time is wanted; "5" says no unit.
OF_TEXT = 'a whole number of milliseconds, a timedelta, or a text like "10 seconds", "5 min" or "500 ms"'
NUMBERS = [True, False, None, math.nan, math.inf, -math.inf, 1.5, 0.0, -1, "5", 10**30, [1]]


def environment(**settings) -> StreamExecutionEnvironment:
    return StreamExecutionEnvironment(**{"spark": SESSION, "job": "orders", "job_dir": "/jobs/a", **settings})


def refused(make) -> ConfigError:
    """Return the error, which must have its three parts."""
    with pytest.raises(ConfigError) as caught:
        make()
    assert caught.value.what and caught.value.why and caught.value.what_to_do
    return caught.value


# -- the environment --------------------------------------------------------------------------------
def test_what_is_left_out_has_its_default() -> None:
    env = environment(checkpoint=None, restart_strategy=None, restore=None)
    assert env.checkpoint == CheckpointConfig() and env.restart_strategy == ExponentialDelay()
    assert (env.restore, env.standby, env.trigger_interval_ms) == (None, Standby.REFUSE, 0)
    assert env.latency_tracking_interval_ms is None


@pytest.mark.parametrize(
    ("argument", "value", "wanted"),
    [
        *(("unknown_hook_state", one, "UnknownHookState.REFUSE") for one in (True, False, None, "IGNORE")),
        *(("standby", one, "Standby.WAIT") for one in (True, None, "WAIT", UnknownHookState.REFUSE)),
        *(("restore", one, "RestoreSettings") for one in ("/sp", "", Path("/sp"), False, 0, RestoreSettings)),
        *(("checkpoint", one, "CheckpointConfig") for one in (5, 0, False, "", {}, CheckpointConfig)),
        *(
            ("restart_strategy", one, "an object with the methods decide()")
            for one in (NoRestart, FixedDelay, 3, 0, False, "none", rules.RestartStrategy)
        ),
        *(
            ("tries_without_progress", one, "a whole number >= 1, or UNLIMITED")
            for one in (0, -1, True, 2.5, None, "3")
        ),
        *(
            ("trigger_interval_ms", one, "a whole number from 0 to 31536000000 (milliseconds)")
            for one in NUMBERS
        ),
        *(
            (
                "latency_tracking_interval_ms",
                one,
                "a whole number from 1 to 31536000000 (milliseconds)",
            )
            for one in (0, *(number for number in NUMBERS if number is not None))
        ),
        *(
            ("max_parallelism", one, "a whole number from 1 to 32768")
            for one in (True, None, 0, 1.0, "128", 32_769)
        ),
        *(("spark", one, "a SparkSession") for one in (None, "spark", SparkSession.builder, SparkSession)),
        *(("job", one, "str") for one in (None, 5, True, b"orders")),
        *(("job_dir", one, "str") for one in (None, 5, b"/jobs/a")),
    ],
)
def test_an_environment_refuses_what_it_cannot_use(argument, value, wanted) -> None:
    error = refused(lambda: environment(**{argument: value}))
    wanted = OF_TEXT if argument.endswith("_ms") and isinstance(value, str) else wanted
    assert wanted in error.why and error.facts["setting"] == argument
    if not isinstance(value, dict | list):
        # These may have secrets in them.
        assert error.what == f"{argument} is {value!r} ({type(value).__name__})"


@pytest.mark.parametrize("value", ["", "a/b", "..", "a" * 129])
def test_a_job_needs_a_name(value) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"job name {value!r}")):
        environment(job=value)


@pytest.mark.parametrize("value", ["", "jobs/a", "ftp://jobs/a", "file://jobs/a", "/jobs/\0a"])
def test_a_job_dir_is_an_absolute_path(value) -> None:
    assert "absolute path" in refused(lambda: environment(job_dir=value)).what_to_do


def test_a_path_in_place_of_restore_settings_is_told_what_to_write() -> None:
    error = refused(lambda: environment(restore="/savepoints/7"))
    assert 'RestoreSettings("/absolute/path")' in error.what_to_do


def test_a_strategy_of_one_s_own_needs_only_decide() -> None:
    class Never:
        def decide(self, history, random=0.5):
            return rules.GiveUp("never")

    strategy = Never()
    assert environment(restart_strategy=strategy).restart_strategy is strategy


# -- who watches, who takes part --------------------------------------------------------------------
class Catalog(MasterHook):
    @property
    def name(self):
        return "catalog"

    def trigger(self, checkpoint_id):
        return None

    def restore(self, checkpoint_id, state):
        pass


class Deaf(Catalog):
    trigger = None


class Half:
    def on_change(self, change):
        pass


@pytest.mark.parametrize("value", [5, None, "catalog", Catalog, Deaf(), object()])
def test_a_hook_is_an_instance_with_its_methods(value) -> None:
    error = refused(lambda: environment().add_master_hook(value))
    assert error.what.startswith(f"hook is {value!r} ({type(value).__name__})")
    assert "give an instance" in error.what_to_do
    environment().add_master_hook(Catalog())


@pytest.mark.parametrize("value", [5, None, QuietListener, Half(), JobListener])
def test_a_listener_is_an_instance_with_its_methods(value) -> None:
    error = refused(lambda: environment().add_listener(value))
    assert error.what.startswith(f"listener is {value!r} ({type(value).__name__})")
    assert "on_change(), on_checkpoint_aborted(), on_checkpoint_complete()" in error.why
    environment().add_listener(QuietListener())


@pytest.mark.parametrize("value", [5, None, SilentObserver, Half()])
def test_an_observer_is_an_instance_with_its_methods(value) -> None:
    error = refused(lambda: environment().observe(value))
    assert error.what.startswith(f"observer is {value!r} ({type(value).__name__})")
    assert "on_step_end(), on_step_start()" in error.why
    environment().observe(SilentObserver())


# -- streams ----------------------------------------------------------------------------------------
class Nowhere(Source):
    def load(self, spark, control_path):
        raise NotImplementedError


def stream():
    return environment().from_source(Nowhere(), uid="in")


@pytest.mark.parametrize(
    "call",
    [
        lambda: environment().from_source(Nowhere, uid="in"),
        lambda: environment().from_source(5, uid="in"),
        lambda: environment().from_source(Nowhere(), uid=5),
        lambda: environment().from_source(Nowhere(), uid=""),
        lambda: environment().from_dataframe(5, uid="in"),
        lambda: environment().from_dataframe(None, uid="in"),
        lambda: environment().from_dataframe(DataFrame, uid="in"),
        lambda: stream().transform(5),
        lambda: stream().transform(None),
        lambda: stream().key_by(),
        lambda: stream().key_by(5),
        lambda: stream().key_by(None),
        lambda: stream().key_by(""),
        lambda: stream().key_by(True),
        lambda: stream().key_by(["user", "product"]),
        lambda: stream().key_by("user", 5),
        lambda: stream().sink_to(5, uid="out"),
        lambda: stream().sink_to(None, uid="out"),
        lambda: stream().sink_to(Sink, uid="out"),
        lambda: stream().key_by("user").process(5, output="user STRING", uid="totals"),
    ],
)
def test_a_stream_refuses_what_it_cannot_use(call) -> None:
    with pytest.raises((ConfigError, GraphError)) as caught:
        call()
    assert caught.value.what


@pytest.mark.parametrize("value", [True, 0, 1.0, "128", math.nan, 32_769])
def test_key_groups_are_a_whole_number(value) -> None:
    with pytest.raises(ConfigError, match="max_parallelism is"):
        stream().key_by("user").process(
            RunningTotal(), output="user STRING", uid="totals", max_parallelism=value
        )


# -- restart strategies -----------------------------------------------------------------------------
MADE = [FixedDelay(UNLIMITED, 5), ExponentialDelay(100, 1_000), FailureRate(delay_ms=0), NoRestart()]


@pytest.mark.parametrize(
    ("strategy", "setting", "values"),
    [
        (FixedDelay, "attempts", [one for one in NUMBERS if one != 10**30]),
        (FixedDelay, "delay_ms", NUMBERS),
        (ExponentialDelay, "initial_delay_ms", [0, *NUMBERS]),
        (ExponentialDelay, "max_delay_ms", [0, 499, *NUMBERS]),
        (ExponentialDelay, "backoff_multiplier", [0.99, 1_001, *(one for one in NUMBERS if one != 1.5)]),
        (ExponentialDelay, "jitter_factor", [1.01, *(one for one in NUMBERS if one != 0.0 or one is False)]),
        (ExponentialDelay, "reset_backoff_threshold_ms", [0, *NUMBERS]),
        (ExponentialDelay, "attempts_before_reset_backoff", [1_000, *NUMBERS]),
        (FailureRate, "max_failures", [0, 1_000, UNLIMITED, *NUMBERS]),
        (FailureRate, "interval_ms", [0, *NUMBERS]),
        (FailureRate, "delay_ms", NUMBERS),
    ],
)
def test_a_strategy_that_cannot_work_is_a_config_error(strategy, setting, values) -> None:
    for value in values:
        error = refused(lambda one=value: strategy(**{setting: one}))
        assert error.facts.keys() == {"setting", "value"}
        assert f"({type(value).__name__})" in error.what
        is_text = setting.endswith("_ms") and isinstance(value, str)
        assert OF_TEXT in error.why if is_text else strategy.__name__ in error.what_to_do


def test_a_strategy_of_the_public_api_is_the_rule_itself() -> None:
    history = rules.RestartHistory().add_failure(0).add_failure(500)
    assert ExponentialDelay(100, 1_000).decide(history) == rules.ExponentialDelay(100, 1_000).decide(history)
    assert NoRestart is rules.NoRestart
    for made in MADE:
        assert pickle.loads(pickle.dumps(made)) == copy.copy(made) == made
        assert not hasattr(made, "__dict__") and hash(made) == hash(copy.copy(made))
        assert repr(made).startswith(f"{type(made).__name__}(")


# -- chaining and restoring -------------------------------------------------------------------------
@pytest.mark.parametrize("value", [math.nan, math.inf, True, 1.5, "5", -1, 10**30, [1]])
def test_an_alignment_timeout_is_a_whole_number(value) -> None:
    error = refused(lambda: UpstreamJob(mode=AlignmentMode.ALIGNED_WITH_TIMEOUT, alignment_timeout_ms=value))
    assert error.what == f"alignment_timeout_ms is {value!r} ({type(value).__name__})"
    wanted = OF_TEXT if isinstance(value, str) else "a whole number from 0 to 31536000000 (milliseconds)"
    assert error.why == f"it must be {wanted}"


@pytest.mark.parametrize("value", ["ALIGNED", None, True, 1])
def test_an_alignment_mode_is_no_word(value) -> None:
    error = refused(lambda: UpstreamJob(mode=value))
    assert (
        error.what == f"mode is {value!r} ({type(value).__name__})" and "AlignmentMode.ALIGNED" in error.why
    )


@pytest.mark.parametrize("value", [None, 5, True, b"a" * 32])
def test_an_upstream_job_is_named_by_its_uuid(value) -> None:
    error = refused(lambda: UpstreamJob(job=value))
    assert error.why == "it must be an instance of str" and "uuid" in error.what_to_do
    with pytest.raises(ConfigError, match="32 lower-case hex digits"):
        UpstreamJob(job="orders")


@pytest.mark.parametrize(
    ("field", "choices"),
    [("claim", ClaimMode), ("non_restored", NonRestoredState), ("unpositioned", UnpositionedSources)],
)
def test_restore_settings_take_values_and_no_words(field, choices) -> None:
    for choice in choices:
        assert getattr(RestoreSettings("/sp", **{field: choice}), field) is choice
        for value in (choice.name, choice.value, True, None, Standby.WAIT):
            error = refused(lambda one=value: RestoreSettings("/sp", **{field: one}))
            assert error.what == f"{field} is {value!r} ({type(value).__name__})"
            assert str(choice) in error.why


@pytest.mark.parametrize("value", [None, 5, True, b"/sp"])
def test_a_savepoint_s_path_is_a_str(value) -> None:
    error = refused(lambda: RestoreSettings(value))
    assert error.what == f"path is {value!r} ({type(value).__name__})" and "str" in error.why


# -- forms of texts, choices among texts, objects in lists ---------------------------------------------


class Late(PartitionPolicy):
    async def commit(self, partition, spark): ...


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: KafkaSink("b:9092", ""), "topic is '' .* not empty"),
        (
            lambda: KafkaSink("b:9092", "out", topic_column="t", other_topics=["a", ""]),
            "other_topics is .* not",
        ),
        (lambda: KafkaSink("b:9092", "out", writer="jvm"), r"writer is 'jvm' .*must be 'python'"),
        (lambda: KafkaSink("b:9092", "out", writer=["python"]), "writer is a list.*must be 'python'"),
        (lambda: CsvFiles(delimiter=";;"), "delimiter is ';;' .* one ASCII character"),
        (lambda: SuccessFile(".."), r"name is '\.\.'"),
        (lambda: SuccessFile(5), "name is 5 "),
        (lambda: ColumnBuckets("a", ""), "fields is '' .* not empty"),
        (lambda: PartitionCommit(policies=[SuccessFile(), Late()]), "Late that is given as policies"),
        (lambda: DataGeneratorSource({"n": Counting()}, records=1 << 63), "records is .* or UNLIMITED"),
        (lambda: JdbcSink("jdbc:sqlite:/a", "t", mode="replace"), "mode is 'replace' .*'insert' or 'upsert'"),
    ],
)
def test_texts_and_lists_are_what_their_types_say(make, says) -> None:
    assert re.search(says, str(refused(make)))
