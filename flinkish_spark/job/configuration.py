"""Settings of a job from outside of its program: their names, how they are read, and which one wins.

A program's argument wins over Spark's settings (`flinkish run -D`), these over variables, these over a file.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import logging
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec

from flinkish_spark.bridge.settings import JOB_SETTING, find_job_settings, find_submitted_settings
from flinkish_spark.checkpoint.hooks import UnknownHookState
from flinkish_spark.core.config import (
    CancellationConfig,
    CheckpointConfig,
    CheckpointingMode,
    ExponentialDelay,
    FailureRate,
    FixedDelay,
    NoRestart,
    find_given_fields,
)
from flinkish_spark.core.errors import ConfigError
from flinkish_spark.core.store_spec import redact_url
from flinkish_spark.job.engine import Standby
from flinkish_spark.protocol.checkpoint import FinishedParticipants
from flinkish_spark.protocol.choices import Choice, closest
from flinkish_spark.protocol.durations import milliseconds
from flinkish_spark.protocol.limits import UNLIMITED
from flinkish_spark.protocol.restart import RestartStrategy
from flinkish_spark.protocol.restore import NonRestoredState, UnpositionedSources
from flinkish_spark.protocol.retention import CheckpointRetention
from flinkish_spark.protocol.savepoints import ClaimMode
from flinkish_spark.savepoints.files import RestoreSettings

LOG = logging.getLogger(__name__)
FILE = "flinkish.toml"
_VARIABLE = "FLINKISH_"
_PAGE = "docs/configuration.md lists all settings"
#: How like a known name another program's variable may not be.
_LIKENESS = 0.8
_P = ParamSpec("_P")


@dataclass(frozen=True, slots=True)
class TextForm:
    """A form of a setting's text: in words, and its parser, which raises ValueError or KeyError."""

    wanted: str
    parse: Callable[[str], Any]


def _parse_duration(text: str) -> Any:
    # As in Flink, a number without a unit is milliseconds.
    return int(text) if text.strip().isdecimal() else milliseconds("", text)


def _duration_or(off: object) -> TextForm:
    return TextForm(f"{_DURATION.wanted}, or 0 for {_OFF[off]}", lambda text: _parse_duration(text) or off)


def _choice(kind: type[Choice]) -> TextForm:
    names = kind.__members__
    return TextForm(" or ".join(names), lambda text: names[text.strip().upper().replace("-", "_")])


def _switch(no: Choice, yes: Choice) -> TextForm:
    return TextForm("true or false", lambda text: {"false": no, "true": yes}[text.strip().lower()])


_OFF: Mapping[object, str] = {None: "never", UNLIMITED: "no limit"}
_ENDLESS = ("unlimited", "infinite")
_TEXT = TextForm("a text", str)
_PATH = TextForm("an absolute path or a URL", str)
_NUMBER = TextForm("a whole number", int)
_FACTOR = TextForm("a number", float)
_LIMIT = TextForm(
    "a whole number, or unlimited", lambda text: UNLIMITED if text.lower() in _ENDLESS else int(text)
)
_DURATION = TextForm('a duration like "10s", "5 min" or "500ms"', _parse_duration)
_STRATEGIES = {
    "exponential-delay": ExponentialDelay,
    "fixed-delay": FixedDelay,
    "failure-rate": FailureRate,
    "none": NoRestart,
}
_FINISHED = _switch(FinishedParticipants.REFUSED, FinishedParticipants.ALLOWED)
_NON_RESTORED = _switch(NonRestoredState.REFUSE, NonRestoredState.ALLOW)
_RETENTION, _UNPOSITIONED = _choice(CheckpointRetention), _choice(UnpositionedSources)
_GROWING = "restart-strategy.exponential-delay"
_STRATEGY = TextForm(" or ".join(_STRATEGIES), lambda text: _STRATEGIES[text.strip().lower()])


@dataclass(frozen=True, slots=True)
class ConfigOption:
    """A setting: Flink's name where Flink has one, the field that takes it, and its text's form.

    `owner` is the class of the field; None for an argument of the environment itself.
    """

    name: str
    owner: type | None
    field: str
    form: TextForm


#: Name, class, field, form of the text.
_TABLE: tuple[tuple[str, type | None, str, TextForm], ...] = (
    ("pipeline.name", None, "job", _TEXT),
    ("job-dir", None, "job_dir", _PATH),
    # A folder with a directory for each job; no argument has it.
    ("execution.checkpointing.dir", None, "parent of job_dir", _PATH),
    # All of them begin with its name: ``store-options.region``.
    ("store-options", None, "store_options", _TEXT),
    ("pipeline.max-parallelism", None, "max_parallelism", _NUMBER),
    ("trigger-interval", None, "trigger_interval_ms", _DURATION),
    ("standby", None, "standby", _choice(Standby)),
    ("unknown-hook-state", None, "unknown_hook_state", _choice(UnknownHookState)),
    ("metrics.latency.interval", None, "latency_tracking_interval_ms", _duration_or(None)),
    ("execution.checkpointing.interval", CheckpointConfig, "interval_ms", _DURATION),
    ("execution.checkpointing.timeout", CheckpointConfig, "timeout_ms", _DURATION),
    ("execution.checkpointing.min-pause", CheckpointConfig, "min_pause_ms", _DURATION),
    ("execution.checkpointing.max-concurrent-checkpoints", CheckpointConfig, "max_concurrent", _NUMBER),
    ("execution.checkpointing.tolerable-failed-checkpoints", CheckpointConfig, "tolerable_failures", _LIMIT),
    ("execution.checkpointing.mode", CheckpointConfig, "mode", _choice(CheckpointingMode)),
    ("execution.checkpointing.num-retained", CheckpointConfig, "retained", _NUMBER),
    ("execution.checkpointing.externalized-checkpoint-retention", CheckpointConfig, "retention", _RETENTION),
    ("execution.checkpointing.checkpoints-after-tasks-finish", CheckpointConfig, "finished", _FINISHED),
    ("execution.checkpointing.restart-budget", CheckpointConfig, "restart_budget_ms", _DURATION),
    ("execution.checkpointing.owner-lease", CheckpointConfig, "owner_lease_ms", _DURATION),
    ("restart-strategy.type", RestartStrategy, "restart_strategy", _STRATEGY),
    ("restart-strategy.fixed-delay.attempts", FixedDelay, "attempts", _LIMIT),
    ("restart-strategy.fixed-delay.delay", FixedDelay, "delay_ms", _DURATION),
    ("restart-strategy.failure-rate.max-failures-per-interval", FailureRate, "max_failures", _NUMBER),
    ("restart-strategy.failure-rate.failure-rate-interval", FailureRate, "interval_ms", _DURATION),
    ("restart-strategy.failure-rate.delay", FailureRate, "delay_ms", _DURATION),
    (f"{_GROWING}.initial-backoff", ExponentialDelay, "initial_delay_ms", _DURATION),
    (f"{_GROWING}.max-backoff", ExponentialDelay, "max_delay_ms", _DURATION),
    (f"{_GROWING}.backoff-multiplier", ExponentialDelay, "backoff_multiplier", _FACTOR),
    (f"{_GROWING}.jitter-factor", ExponentialDelay, "jitter_factor", _FACTOR),
    (f"{_GROWING}.reset-backoff-threshold", ExponentialDelay, "reset_backoff_threshold_ms", _DURATION),
    (f"{_GROWING}.attempts-before-reset-backoff", ExponentialDelay, "attempts_before_reset_backoff", _LIMIT),
    ("restart-strategy.tries-without-progress", None, "tries_without_progress", _LIMIT),
    ("execution.state-recovery.path", RestoreSettings, "path", _PATH),
    ("execution.state-recovery.ignore-unclaimed-state", RestoreSettings, "non_restored", _NON_RESTORED),
    ("execution.state-recovery.claim-mode", RestoreSettings, "claim", _choice(ClaimMode)),
    ("execution.state-recovery.unpositioned-sources", RestoreSettings, "unpositioned", _UNPOSITIONED),
    ("task.cancellation.interval", CancellationConfig, "interval_ms", _DURATION),
    ("task.cancellation.timeout", CancellationConfig, "timeout_ms", _duration_or(UNLIMITED)),
)
OPTIONS = {row[0]: ConfigOption(*row) for row in _TABLE}
#: Earlier name of Flink's -> the name of today.
EARLIER_NAMES = {
    "restart-strategy": "restart-strategy.type",
    "state.checkpoints.dir": "execution.checkpointing.dir",
    "state.checkpoints.num-retained": "execution.checkpointing.num-retained",
    "execution.checkpointing.checkpoints-after-tasks-finish.enabled": (
        "execution.checkpointing.checkpoints-after-tasks-finish"
    ),
    "execution.savepoint.path": "execution.state-recovery.path",
    "execution.savepoint.ignore-unclaimed-state": "execution.state-recovery.ignore-unclaimed-state",
    "execution.savepoint-restore-mode": "execution.state-recovery.claim-mode",
}
_PARENT, _STORE_OPTIONS = OPTIONS["execution.checkpointing.dir"], OPTIONS["store-options"]
_SAVEPOINT = OPTIONS["execution.state-recovery.path"]


def _to_variable(name: str) -> str:
    return re.sub("[^A-Z0-9]", "_", name.upper())


_BY_NAME = {**OPTIONS, **{earlier: OPTIONS[name] for earlier, name in EARLIER_NAMES.items()}}
_BY_VARIABLE = {_to_variable(name): name for name in _BY_NAME}
_STORE_VARIABLE = "STORE_OPTIONS_"
#: Variables that begin so are meant for a job.
_GROUPS = ("EXECUTION_", "PIPELINE_", "RESTART_STRATEGY_")


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting that was found: its name, value and text, and who gives it."""

    name: str
    option: ConfigOption
    value: Any
    text: str
    origin: str

    def __str__(self) -> str:
        return f"{self.name}={self.shown} ({self.origin})"

    @property
    def shown(self) -> str:
        """The text without secrets: an option of a store may be one, and a URL may hold a login."""
        if self.option is _STORE_OPTIONS:
            return "..."
        return redact_url(self.text) if self.option.form is _PATH else self.text


def read_setting(name: str, text: str, origin: str) -> Setting:
    """Return a setting by its name, with or without ``flinkish.``; raise ConfigError if there is none."""
    bare = name.removeprefix("flinkish.")
    kind, _, part = bare.partition(".")
    is_store_option = kind == _STORE_OPTIONS.name and part != ""
    option = _STORE_OPTIONS if is_store_option else _BY_NAME.get(bare)
    if option is None or (option is _STORE_OPTIONS and not part):
        raise ConfigError(
            f"there is no setting '{bare}'",
            why=f"{origin} gives it",
            what_to_do=closest(bare, _BY_NAME) or _PAGE,
        )
    try:
        value = option.form.parse(text)
    except (ValueError, KeyError):
        why = f"{origin} gives it, and it must be {option.form.wanted}"
        raise ConfigError(f"the setting {bare} is {text!r}", why=why, what_to_do="correct it there") from None
    return Setting(bare if is_store_option else option.name, option, value, text, origin)


def check_settings(spark_settings: Mapping[str, str]) -> None:
    """Raise ConfigError if no environment takes these settings of `flinkish run -D`."""
    job = {name: text for name, text in spark_settings.items() if name.startswith(JOB_SETTING)}
    fill_arguments({}, {one.name: one for one in _read_spark(job, "-D")})


def _read_spark(settings: Mapping[str, str], origin: str = "") -> Iterator[Setting]:
    for name, text in settings.items():
        yield read_setting(name.removeprefix("spark."), text, origin or name)


def read_configuration(spark_settings: Mapping[str, str]) -> dict[str, Setting]:
    """Return the settings from outside by name, each from the place that wins."""
    spark = _read_spark(spark_settings)
    found: dict[str, Setting] = {}
    for layer in (_read_file(), _read_variables(), spark):
        here: dict[str, Setting] = {}
        for one in layer:
            other = here.setdefault(one.name, one)
            if other.text != one.text:
                raise ConfigError(
                    f"the setting {one.name} is given twice",
                    why=f"{other.origin} and {one.origin} say different things",
                    what_to_do="leave one of them out",
                )
        found |= here
    return found


def read_outside() -> dict[str, Setting]:
    """Return the settings from outside of a program that may have no session yet."""
    from pyspark.sql import SparkSession

    active = SparkSession.getActiveSession()
    return read_configuration(find_submitted_settings() if active is None else find_job_settings(active))


def _read_file() -> Iterator[Setting]:
    try:
        # An editor of Windows may begin it with a mark of its encoding.
        content = tomllib.loads(Path(FILE).read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        return
    except (OSError, ValueError, RecursionError) as error:
        what = f"{FILE} in the working directory {Path.cwd()} cannot be read"
        raise ConfigError(what, why=str(error), what_to_do="correct the file, or remove it") from None
    for name, value in _flatten(content):
        if not isinstance(value, str | int | float):
            what = f"the setting {name} is a {type(value).__name__}"
            raise ConfigError(what, why=f"{FILE} gives it", what_to_do="give a text or a number")
        yield read_setting(name, str(value).lower() if isinstance(value, bool) else str(value), FILE)


def _flatten(table: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        if isinstance(value, dict):
            yield from ((f"{name}.{inner}", one) for inner, one in _flatten(value))
        else:
            yield name, value


def _read_variables() -> Iterator[Setting]:
    for variable, text in os.environ.items():
        bare = variable.removeprefix(_VARIABLE)
        # An empty variable is how a shell leaves one out.
        if bare == variable or not text:
            continue
        if bare.startswith(_STORE_VARIABLE):
            part = bare.removeprefix(_STORE_VARIABLE).lower()
            yield read_setting(f"{_STORE_OPTIONS.name}.{part}", text, variable)
        elif bare in _BY_VARIABLE:
            yield read_setting(_BY_VARIABLE[bare], text, variable)
        elif bare.startswith(_GROUPS) or difflib.get_close_matches(bare, _BY_VARIABLE, 1, _LIKENESS):
            # Others are variables of other programs.
            near = closest(variable, (f"{_VARIABLE}{one}" for one in _BY_VARIABLE))
            what = f"the variable {variable} is no setting"
            raise ConfigError(what, what_to_do=near or _PAGE)


def fill_arguments(
    given: Mapping[str, Any], found: Mapping[str, Setting]
) -> tuple[dict[str, Any], list[Setting]]:
    """Return an environment's arguments, with what the program leaves open, and the settings used."""
    # None is what is left out; only of this argument it says something.
    stated = {name for name, value in given.items() if value is not None or name.startswith("latency")}
    filled, used = dict(given), list[Setting]()

    def take(owner: type | None, closed: Iterable[str] = ()) -> list[Setting]:
        taken = [
            one for one in found.values() if one.option.owner is owner and one.option.field not in closed
        ]
        used.extend(taken)
        return taken

    filled |= {
        one.option.field: one.value for one in take(None, {*stated, _PARENT.field, _STORE_OPTIONS.field})
    }
    parent = found.get(_PARENT.name)
    if parent is not None and "job_dir" not in filled and "job" in filled:
        used.append(parent)
        filled["job_dir"] = f"{parent.value.rstrip('/')}/{filled['job']}"
    options = [one for one in found.values() if one.option is _STORE_OPTIONS]
    if options and _STORE_OPTIONS.field not in stated:
        used += options
        filled[_STORE_OPTIONS.field] = {one.name.partition(".")[2]: one.value for one in options}
    for argument, owner in (("checkpoint", CheckpointConfig), ("cancellation", CancellationConfig)):
        config = given.get(argument)
        own = find_given_fields(config) if isinstance(config, owner) else {}
        if (config is None or isinstance(config, owner)) and (taken := take(owner, own)):
            filled[argument] = _make(owner, taken, own)
    if "restart_strategy" not in stated:
        chosen = take(RestartStrategy)
        strategy = chosen[0].value if chosen else ExponentialDelay
        if (taken := take(strategy)) or chosen:
            filled["restart_strategy"] = _make(strategy, taken)
    savepoint, restore = found.get(_SAVEPOINT.name), given.get("restore")
    if savepoint is not None and restore is None:
        filled["restore"] = _make(RestoreSettings, take(RestoreSettings))
    elif savepoint is not None and getattr(restore, "path", "") != savepoint.value:
        raise ConfigError(
            f"the program starts from another savepoint than {savepoint.origin} says",
            why="nobody can tell which one is meant, and from the wrong one a job writes wrong rows",
            what_to_do="leave one of them out: restore=, or the setting",
        )
    return filled, used


def _make(owner: Callable[..., Any], taken: Iterable[Setting], own: Mapping[str, Any] | None = None) -> Any:
    with _name_settings(taken):
        return owner(**{one.option.field: one.value for one in taken} | dict(own or {}))


@contextmanager
def _name_settings(used: Iterable[Setting]) -> Iterator[None]:
    """Let an error about the value of an argument name the setting that gave it."""
    try:
        yield
    except ConfigError as error:
        field = error.facts.get("setting")
        for one in used:
            if one.option.field == field:
                what, to_do = f"the setting {one.name} is {one.shown!r}", f"correct it in {one.origin}"
                raise ConfigError(what, why=error.why, what_to_do=to_do) from None
        raise


def take_configuration(init: Callable[_P, None]) -> Callable[_P, None]:
    """Let a constructor take the arguments that the program leaves open from outside."""
    signature = inspect.signature(init)

    @functools.wraps(init)
    def run(*args: _P.args, **named: _P.kwargs) -> None:
        try:
            given = signature.bind(*args, **named).arguments
        except TypeError:
            # Python's own error names the function.
            return init(*args, **named)
        found = read_configuration(find_job_settings(given["spark"]))
        filled, used = fill_arguments(given, found)
        for name, what, flag in (("job", "name", _JOB_FLAG), ("job_dir", "directory", _DIR_FLAG)):
            if name not in filled:
                what_to_do = f"give {name}=... in the program, or a setting: {flag}"
                why = "neither the program nor a setting gives one"
                raise ConfigError(f"the job has no {what}", why=why, what_to_do=what_to_do)
        if used:
            LOG.info("the job '%s' takes from outside: %s", filled["job"], "; ".join(map(str, used)))
        for one in found.values():
            if one not in used:
                why = "the program gives its own, or what it belongs to is not chosen"
                LOG.warning("the setting %s is not used: %s", one, why)
        with _name_settings([one for one in used if one.option.owner is None]):
            init(**filled)  # type: ignore[call-arg]

    return run


_JOB_FLAG = "flinkish run -D pipeline.name=orders"
_DIR_FLAG = "flinkish run -D execution.checkpointing.dir=/data/jobs"
