"""Settings from outside: their names and texts, and which of two places wins."""

from __future__ import annotations

import copy
import inspect
import itertools
import logging
import pickle
import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.sql import SparkSession

from flinkish_spark import (
    UNLIMITED,
    CancellationConfig,
    CheckpointConfig,
    CheckpointRetention,
    ClaimMode,
    ExponentialDelay,
    FailureRate,
    FixedDelay,
    NonRestoredState,
    NoRestart,
    RestoreSettings,
    Standby,
    StreamExecutionEnvironment,
)
from flinkish_spark.bridge.settings import find_job_settings, find_submitted_settings
from flinkish_spark.core.config import find_given_fields
from flinkish_spark.core.errors import ConfigError
from flinkish_spark.job import configuration
from flinkish_spark.job.configuration import OPTIONS, check_settings
from flinkish_spark.job.doctor import doctor

Outside = Callable[..., StreamExecutionEnvironment]
#: A session without a JVM: nothing of it is used before `execute`.
SESSION = SparkSession.__new__(SparkSession)


@pytest.fixture
def outside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Outside:
    """Make an environment below settings of Spark's, variables and a file."""
    monkeypatch.chdir(tmp_path)

    def make(
        spark: Mapping[str, str] | None = None,
        variables: Mapping[str, str] | None = None,
        file: str = "",
        **program: Any,
    ) -> StreamExecutionEnvironment:
        given = {f"spark.flinkish.{name}": text for name, text in (spark or {}).items()}
        monkeypatch.setattr(configuration, "find_job_settings", lambda session: given)
        for name, text in (variables or {}).items():
            monkeypatch.setenv(name, text)
        (tmp_path / "flinkish.toml").write_text(file)
        return StreamExecutionEnvironment(SESSION, **{"job": "orders", "job_dir": "/jobs/a", **program})

    return make


#: Where an interval may come from, the winner first, with what it says.
PLACES: list[tuple[int, dict[str, Any]]] = [
    (1_000, {"checkpoint": CheckpointConfig(interval_ms=1_000)}),
    (2_000, {"spark": {"execution.checkpointing.interval": "2s"}}),
    (3_000, {"variables": {"FLINKISH_EXECUTION_CHECKPOINTING_INTERVAL": "3s"}}),
    (4_000, {"file": '[execution.checkpointing]\ninterval = "4s"'}),
    (10_000, {}),
]


@pytest.mark.parametrize(("higher", "lower"), list(itertools.combinations(PLACES, 2)))
def test_of_two_places_the_nearer_one_to_the_program_wins(outside: Outside, higher: Any, lower: Any) -> None:
    env = outside(**{**lower[1], **higher[1]})
    assert env.checkpoint.interval_ms == higher[0]


def test_each_place_says_what_the_others_leave_open(outside: Outside) -> None:
    env = outside(
        spark={"execution.checkpointing.min-pause": "1 s"},
        variables={"FLINKISH_EXECUTION_CHECKPOINTING_TIMEOUT": "5 min"},
        file='execution.checkpointing.num-retained = 7\n[task.cancellation]\ninterval = "1s"',
        checkpoint=CheckpointConfig(interval_ms="1s"),
        cancellation=CancellationConfig(timeout_ms=UNLIMITED),
    )
    assert env.checkpoint == CheckpointConfig(
        interval_ms=1_000, min_pause_ms=1_000, timeout_ms=300_000, retained=7
    )
    assert env.cancellation == CancellationConfig(interval_ms=1_000, timeout_ms=UNLIMITED)


def test_a_field_that_the_program_gives_is_its_own_even_with_the_default_s_value(outside: Outside) -> None:
    given = CheckpointConfig(10_000, timeout_ms="10 min")
    assert find_given_fields(given) == {"interval_ms": 10_000, "timeout_ms": 600_000}
    for config in (given, copy.copy(given), pickle.loads(pickle.dumps(given))):
        env = outside({"execution.checkpointing.interval": "2s"}, checkpoint=config)
        assert env.checkpoint == given
    assert given == CheckpointConfig() and hash(given) == hash(CheckpointConfig())


#: A setting, and what an environment then has.
VALUES: list[tuple[str, str, Callable[[Any], Any], Any]] = [
    ("pipeline.max-parallelism", "64", lambda env: env.max_parallelism, 64),
    ("trigger-interval", "500", lambda env: env.trigger_interval_ms, 500),
    ("standby", "wait", lambda env: env.standby, Standby.WAIT),
    ("unknown-hook-state", "IGNORE", lambda env: env._hooks._unknown.name, "IGNORE"),
    ("metrics.latency.interval", "1s", lambda env: env.latency_tracking_interval_ms, 1_000),
    ("metrics.latency.interval", "0", lambda env: env.latency_tracking_interval_ms, None),
    ("restart-strategy.tries-without-progress", "5", lambda env: env.tries_without_progress, 5),
    ("execution.checkpointing.mode", "at-least-once", lambda env: env.checkpoint.mode.name, "AT_LEAST_ONCE"),
    (
        "execution.checkpointing.externalized-checkpoint-retention",
        "DELETE_ON_CANCELLATION",
        lambda env: env.checkpoint.retention,
        CheckpointRetention.DELETE_ON_CANCELLATION,
    ),
    (
        "execution.checkpointing.checkpoints-after-tasks-finish.enabled",
        "false",
        lambda env: env.checkpoint.finished.name,
        "REFUSED",
    ),
    (
        "execution.checkpointing.tolerable-failed-checkpoints",
        "unlimited",
        lambda env: env.checkpoint.tolerable_failures,
        UNLIMITED,
    ),
    ("state.checkpoints.num-retained", "3", lambda env: env.checkpoint.retained, 3),
    ("task.cancellation.timeout", "0", lambda env: env.cancellation.timeout_ms, UNLIMITED),
    ("restart-strategy", "none", lambda env: env.restart_strategy, NoRestart()),
    ("restart-strategy.type", "failure-rate", lambda env: env.restart_strategy, FailureRate()),
    (
        "restart-strategy.exponential-delay.jitter-factor",
        "0.5",
        lambda env: env.restart_strategy,
        ExponentialDelay(jitter_factor=0.5),
    ),
    ("execution.savepoint.path", "/s/1", lambda env: env.restore, RestoreSettings("/s/1")),
    ("execution.state-recovery.path", "s3://bucket/1", lambda env: env.restore.path, "s3://bucket/1"),
]


@pytest.mark.parametrize(("name", "text", "read", "value"), VALUES)
def test_a_setting_says_what_an_argument_says(
    outside: Outside, name: str, text: str, read: Any, value: Any
) -> None:
    assert read(outside({name: text})) == value
    assert read(outside(variables={"FLINKISH_" + re.sub("[^A-Z]", "_", name.upper()): text})) == value


def test_numbers_and_truths_of_a_file_need_no_quotes(outside: Outside) -> None:
    env = outside(
        file="pipeline.max-parallelism = 64\n[flinkish.execution.checkpointing]\ninterval = 2000\n"
        "checkpoints-after-tasks-finish = false\n[restart-strategy.exponential-delay]\njitter-factor = 0.2"
    )
    assert (env.max_parallelism, env.checkpoint.interval_ms) == (64, 2_000)
    assert env.checkpoint.finished.name == "REFUSED"
    assert env.restart_strategy == ExponentialDelay(jitter_factor=0.2)


def test_a_restart_strategy_is_the_program_s_or_comes_from_outside_as_a_whole(outside: Outside) -> None:
    given = {"restart-strategy.type": "fixed-delay", "restart-strategy.fixed-delay.attempts": "7"}
    assert outside(given).restart_strategy == FixedDelay(attempts=7)
    assert outside(given, restart_strategy=FixedDelay(delay_ms=5)).restart_strategy == FixedDelay(delay_ms=5)


def test_name_and_directory_may_come_from_outside(outside: Outside, monkeypatch: pytest.MonkeyPatch) -> None:
    outside(file='pipeline.name = "totals"\nstate.checkpoints.dir = "/data/jobs/"')
    assert str(StreamExecutionEnvironment(SESSION).job_dir) == "/data/jobs/totals"
    assert str(StreamExecutionEnvironment(SESSION, "orders").job_dir) == "/data/jobs/orders"
    monkeypatch.setenv("FLINKISH_JOB_DIR", "/data/again")
    env = StreamExecutionEnvironment(SESSION)
    assert (env.job, str(env.job_dir)) == ("totals", "/data/again")


def test_a_job_without_a_name_or_a_directory_is_refused(outside: Outside) -> None:
    outside()
    with pytest.raises(ConfigError, match=r"has no name\..*-D pipeline\.name=orders"):
        StreamExecutionEnvironment(SESSION)
    with pytest.raises(ConfigError, match=r"has no directory\..*-D execution\.checkpointing\.dir="):
        StreamExecutionEnvironment(SESSION, "orders")


def test_savepoints_with_what_may_be_left_out(outside: Outside) -> None:
    rules = {
        "execution.state-recovery.ignore-unclaimed-state": "true",
        "execution.state-recovery.claim-mode": "claim",
    }
    wanted = RestoreSettings("/s/1", claim=ClaimMode.CLAIM, non_restored=NonRestoredState.ALLOW)
    assert outside({"execution.state-recovery.path": "/s/1", **rules}).restore == wanted
    assert outside(rules).restore is None
    same = RestoreSettings("/s/1")
    assert outside({"execution.state-recovery.path": "/s/1"}, restore=same).restore == same
    with pytest.raises(ConfigError, match="another savepoint than spark"):
        outside({"execution.state-recovery.path": "/s/2"}, restore=same)


def test_options_of_a_bucket_are_not_shown(outside: Outside, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    env = outside(
        {"store-options.aws_secret_access_key": "env:SOME_SECRET"},
        {"FLINKISH_STORE_OPTIONS_REGION": "eu-central-1"},
        job_dir="s3://bucket/jobs/a",
    )
    assert dict(env._place.options)["region"] == "eu-central-1"
    assert "store-options.aws_secret_access_key=..." in caplog.text and "SOME_SECRET" not in caplog.text
    with pytest.raises(ConfigError, match="is a secret") as refused:
        outside({"store-options.aws_secret_access_key": "hunter2"}, job_dir="s3://bucket/jobs/a")
    assert "hunter2" not in str(refused.value) + caplog.text


def test_the_log_says_where_a_setting_came_from_and_which_one_has_no_effect(
    outside: Outside, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    outside(
        {"execution.checkpointing.interval": "2s", "restart-strategy.fixed-delay.attempts": "3"},
        {"FLINKISH_PIPELINE_MAX_PARALLELISM": "64"},
        'trigger-interval = "1s"',
        checkpoint=CheckpointConfig(interval_ms=1),
    )
    taken, *unused = [record.message for record in caplog.records if record.name == configuration.__name__]
    assert taken == (
        "the job 'orders' takes from outside: trigger-interval=1s (flinkish.toml); "
        "pipeline.max-parallelism=64 (FLINKISH_PIPELINE_MAX_PARALLELISM)"
    )
    assert [one.split("=")[0] for one in unused] == [
        "the setting execution.checkpointing.interval",
        "the setting restart-strategy.fixed-delay.attempts",
    ]


@pytest.mark.parametrize(
    ("where", "says"),
    [
        (
            {"spark": {"execution.checkpointing.intervall": "1s"}},
            r"no setting 'execution.checkpointing.intervall'.*mean 'execution.checkpointing.interval'",
        ),
        ({"spark": {"until-caught-up": "1"}}, "docs/configuration.md"),
        ({"variables": {"FLINKISH_EXECUTION_CHECKPOINTING_INTERVALL": "1"}}, "_CHECKPOINTING_INTERVAL'"),
        ({"variables": {"FLINKISH_EXECUTON_CHECKPOINTING_INTERVAL": "1"}}, "_CHECKPOINTING_INTERVAL'"),
        ({"variables": {"FLINKISH_EXECUTION_PARALLELISM": "1"}}, "no setting"),
        ({"file": "pipeline.nam = 'a'"}, r"flinkish.toml gives it.*Did you mean 'pipeline.name'"),
        ({"file": "pipeline = 'a'"}, "no setting 'pipeline'"),
        ({"file": "store-options = 'a'"}, "no setting 'store-options'"),
        ({"file": "pipeline.name = ['a']"}, "is a list.*text or a number"),
        ({"file": "pipeline.name"}, r"flinkish.toml in the working directory .* cannot be read"),
        ({"spark": {"execution.checkpointing.interval": "soon"}}, "a duration like"),
        (
            {"spark": {"execution.checkpointing.interval": "0"}},
            r"interval is '0'.*1 to .*correct it in spark\.",
        ),
        ({"spark": {"standby": "maybe"}}, "REFUSE or WAIT"),
        ({"spark": {"restart-strategy.type": "often"}}, "exponential-delay or fixed-delay"),
        ({"variables": {"FLINKISH_PIPELINE_MAX_PARALLELISM": "0"}}, "correct it in FLINKISH_PIPELINE"),
        ({"file": "pipeline.max-parallelism = 1.5"}, "whole number"),
        ({"file": "execution.checkpointing.mode = 1"}, "EXACTLY_ONCE or AT_LEAST_ONCE"),
    ],
)
def test_what_cannot_be_is_refused_with_the_place_that_says_it(
    outside: Outside, where: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        outside(**where)


def test_variables_of_other_programs_are_none_of_ours(outside: Outside) -> None:
    others = ("RUNS", "SEED", "KILLS", "MASTER", "TEST_PASSWORD", "FAILURES", "TRANSACTION_TIMEOUT_MS")
    outside(variables={f"FLINKISH_{one}": "x" for one in others})


def test_settings_are_found_in_a_session_and_before_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = {"spark.flinkish.standby": "wait"}
    others = {"spark.flinkish.target": "local[*]", "spark.flinkish.until": "caught-up", "spark.x": "1"}
    spark = SimpleNamespace(_jsparkSession=1, conf=SimpleNamespace(getAll={**ours, **others}))
    assert find_job_settings(spark) == ours
    assert find_job_settings(SESSION) == {}
    words = "--master x --conf spark.x=1 --conf 'spark.flinkish.standby=wait' pyspark-shell"
    monkeypatch.setenv("PYSPARK_SUBMIT_ARGS", words)
    assert find_submitted_settings() == ours
    monkeypatch.delenv("PYSPARK_SUBMIT_ARGS")
    assert find_submitted_settings() == {}


def test_the_command_line_checks_values_before_anything_runs() -> None:
    check_settings({"spark.flinkish.execution.checkpointing.interval": "10s", "spark.x": "1"})
    with pytest.raises(ConfigError, match="correct it in -D"):
        check_settings({"spark.flinkish.execution.checkpointing.interval": "0s"})
    with pytest.raises(ConfigError, match="absolute path"):
        check_settings({"spark.flinkish.execution.state-recovery.path": "here"})


def test_the_doctor_says_what_comes_from_outside(outside: Outside) -> None:
    outside(file='trigger-interval = "1s"')
    spark: Any = SimpleNamespace(version="4.2.0")
    (line,) = [one for one in doctor(spark).findings if one.about == "settings"]
    assert line.says == "trigger-interval=1s (flinkish.toml)"
    Path("flinkish.toml").write_text("trigger-intervall = 1")
    (line,) = [one for one in doctor(spark).findings if one.about == "settings"]
    assert "Did you mean 'trigger-interval'" in line.what_to_do


#: What cannot be said in a text, or belongs to the program alone.
LEFT_OUT = {"spark", "manifest"}


def test_every_argument_of_an_environment_has_a_setting() -> None:
    arguments = set(inspect.signature(StreamExecutionEnvironment).parameters) - LEFT_OUT
    assert settable(None) - {"parent of job_dir"} == arguments - {
        "checkpoint",
        "cancellation",
        "restore",
        "restart_strategy",
    }
    assert settable(CheckpointConfig) == names_of(CheckpointConfig)
    assert settable(CancellationConfig) == names_of(CancellationConfig)
    assert settable(RestoreSettings) == names_of(RestoreSettings) - {"store_options"}
    for strategy in (FixedDelay, FailureRate, ExponentialDelay):
        assert settable(strategy) == names_of(strategy)


def settable(owner: type | None) -> set[str]:
    return {one.field for one in OPTIONS.values() if one.owner is owner}


def names_of(kind: Any) -> set[str]:
    return {one.name for one in fields(kind)}


def test_one_place_does_not_say_two_things(outside: Outside) -> None:
    twice = {"execution.savepoint.path": "/a", "execution.state-recovery.path": "/b"}
    with pytest.raises(ConfigError, match=r"execution\.state-recovery\.path is given twice"):
        outside(twice)
    with pytest.raises(ConfigError, match="FLINKISH_RESTART_STRATEGY and FLINKISH_RESTART_STRATEGY_TYPE"):
        outside(
            variables={"FLINKISH_RESTART_STRATEGY": "none", "FLINKISH_RESTART_STRATEGY_TYPE": "fixed-delay"}
        )


def test_a_login_in_a_url_is_in_no_log(outside: Outside, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    for name in ("job-dir", "execution.checkpointing.dir"):
        with pytest.raises(ConfigError) as refused:
            outside({name: "s3://user:HUSH@bucket/x"})
            StreamExecutionEnvironment(SESSION, "orders")
        assert "HUSH" not in str(refused.value)
    assert "HUSH" not in caplog.text


def test_variables_of_other_programs_are_left_alone(outside: Outside) -> None:
    others = ("TASK_ID", "JOB_NAME", "STATE_FOLDER_OF_MINE", "STORE_PASSWORD", "ORDERS_STORE_OPTIONS_KEY")
    outside(variables={f"FLINKISH_{one}": "x" for one in others})
    assert not configuration.read_configuration({})


def test_an_empty_variable_is_none(outside: Outside) -> None:
    env = outside(variables={"FLINKISH_EXECUTION_CHECKPOINTING_INTERVAL": ""}, file="trigger-interval = '2s'")
    assert env.checkpoint == CheckpointConfig() and env.trigger_interval_ms == 2_000


def test_a_file_may_begin_with_a_mark_of_its_encoding(outside: Outside) -> None:
    assert outside(file="\ufefftrigger-interval = '2s'").trigger_interval_ms == 2_000
