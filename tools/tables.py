"""Tables that the documents quote, printed by what they describe."""

from __future__ import annotations

import dataclasses
import enum
import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from flinkish_spark import StreamExecutionEnvironment
from flinkish_spark.job.configuration import EARLIER_NAMES, OPTIONS, ConfigOption
from flinkish_spark.protocol.checkpoint import TRANSITIONS, CheckpointEvent, CheckpointState
from flinkish_spark.protocol.failures import CheckpointFailureReason
from flinkish_spark.protocol.job_status import JOB_TRANSITIONS, TASK_TRANSITIONS, JobEvent, TaskEvent
from flinkish_spark.protocol.limits import UNLIMITED
from flinkish_spark.protocol.recovery import RULES
from flinkish_spark.protocol.restart import RestartStrategy
from flinkish_spark.reporters.metrics import CATALOGUE


def transition_table() -> str:
    return _transitions("state", {state: TRANSITIONS[state] for state in CheckpointState}, CheckpointEvent)


def job_status_table() -> str:
    return _transitions("status", JOB_TRANSITIONS, JobEvent)


def task_state_table() -> str:
    return _transitions("state", TASK_TRANSITIONS, TaskEvent)


def failure_reason_table() -> str:
    reasons = CheckpointFailureReason
    rows = [(one.value, one.phase.value, "yes" if one.counts else "no", one.text) for one in reasons]
    return _table(("reason", "how far it was", "counts", "meaning"), rows)


def recovery_table() -> str:
    rows = [(number, rule.condition, rule.step, rule.why) for number, rule in enumerate(RULES, 1)]
    return _table(("order", "fact", "step", "why here"), rows)


def metrics_table() -> str:
    rows = [(f"`{one.name}`", one.kind.value, one.scope.value, one.unit, one.meaning) for one in CATALOGUE]
    return _table(("name", "type", "scope", "unit", "meaning"), rows)


def configuration_table() -> str:
    earlier = {name: f", earlier `{old}`" for old, name in EARLIER_NAMES.items()}
    rows = [
        (f"`{name}`{earlier.get(name, '')}", option.form.wanted, *_argument(option))
        for name, option in OPTIONS.items()
    ]
    return _table(("setting", "value", "default", "in a program"), rows)


def _argument(option: ConfigOption) -> tuple[str, str]:
    """Return the default of an option's argument or field as a text of the setting, and its name."""
    name, owner = option.field, option.owner
    if owner is None or owner is RestartStrategy:
        parameters = inspect.signature(StreamExecutionEnvironment).parameters
        default = parameters[name].default if name in parameters else ""
        default = "exponential-delay" if owner is RestartStrategy else default
    else:
        field = next(one for one in dataclasses.fields(owner) if one.name == name)
        name, default = f"{owner.__name__}({name}=...)", field.default
    return _to_text(option, default), f"`{name}`" if " " not in name else name


def _to_text(option: ConfigOption, default: Any) -> str:
    if default in (None, "", dataclasses.MISSING):
        return "-"
    if option.form.wanted == "true or false":
        return next(text for text in ("true", "false") if option.form.parse(text) is default)
    if option.field.endswith("_ms") and isinstance(default, int):
        return f"{default // 1000} s" if default % 1000 == 0 else f"{default} ms"
    return default.name.lower() if default is UNLIMITED else getattr(default, "name", str(default))


def _transitions(head: str, transitions: Mapping[Any, Mapping[Any, Any]], events: type[enum.Enum]) -> str:
    rows = [
        (state.value, *(row[event].value if event in row else "-" for event in events))
        for state, row in transitions.items()
    ]
    return _table((head, *(str(event.value) for event in events)), rows)


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = [head, *rows]
    text = [f"| {' | '.join(map(str, line))} |" for line in lines]
    return "\n".join([text[0], "|" + "---|" * len(head), *text[1:]])
