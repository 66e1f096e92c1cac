"""Classification of Spark's failures: from an exception of the query to one typed error.

Errors of user code and of executors reach the driver as text. Ours start with a marker; the text of others
is parsed into causes, which the rules of `protocol.errors` classify. The message begins with the innermost
cause and says where it happened; the causes around it are in `trace`.
"""

from __future__ import annotations

import json
import re
import traceback
from importlib import import_module
from typing import Any, cast

from flinkish_spark.bridge.jvm_process import exit_code_of_jvm
from flinkish_spark.core import errors
from flinkish_spark.core.errors import (
    BAD_RECORD_MARKER,
    STATE_MARKER,
    UNREADABLE_MARKER,
    USER_FUNCTION_MARKER,
    AuthorizationError,
    BadRecordError,
    ConfigError,
    CorruptObjectError,
    DriverOutOfMemory,
    EnvironmentFault,
    FlinkishError,
    InputLostError,
    MemoryExhaustedError,
    ProcessLostError,
    SchemaError,
    SparkGoneError,
    UserError,
    UserFunctionError,
    bad_time,
    causes_of,
    may_pass,
    raise_translated,
)
from flinkish_spark.core.foreign_errors import describe_failure, is_gateway_gone, is_of_the_jvm
from flinkish_spark.protocol.errors import MOST_MESSAGE, Chain, ErrorCategory, Rule, find_rule
from flinkish_spark.protocol.process_loss import (
    WHAT_TO_DO,
    JobProcess,
    ProcessLoss,
    describe_loss,
    find_process_loss,
    is_out_of_memory,
)
from flinkish_spark.protocol.restart import RepeatedFailures

NOT_AUTHORIZED_MARKER = "[FLINKISH_NOT_AUTHORIZED]"
#: An error of ours that was raised in a Python process of Spark's: its module, class and message.
_OURS = re.compile(r"^(flinkish_spark(?:\.\w+)*)\.(\w+): (.+)$", re.MULTILINE)
#: Spark's message for a record whose timestamp does not fit into microseconds.
_BAD_TIME = re.compile(r"Record at topic (\S+) partition (\d+) offset (\d+) has timestamp value (-?\d+)")
#: Longest part of a task's message that an error repeats.
_MOST_TEXT = 1_500
#: Begins a note on an exception that says where in the job it came up.
_NOTE = "flinkish_spark: "


class QueryError(EnvironmentFault):
    """The query ended for a reason outside the user's code; a restart may help."""

    usual_advice = "see the log of this process for the whole trace"
    restartable = True
    ends_when_repeated = True


class Outage(QueryError):
    """A system that the query needs does not answer or is full; not counted as a repeated failure."""

    ends_when_repeated = False


class RepeatableUserError(UserFunctionError):
    """A user function raised; the job restarts once, since a system that it calls may recover."""

    restartable = True

    @property
    def is_placed(self) -> bool:
        return "offset" in self.facts or "sequence" in self.facts

    @property
    def record(self) -> tuple[Any, ...]:
        names = ("uid", "topic", "partition", "offset", "channel", "sequence")
        return tuple(self.facts.get(name) for name in names)


def add_place(error: BaseException, place: str) -> None:
    error.add_note(_NOTE + place)


def classify(error: BaseException, place: str = "") -> FlinkishError:
    if isinstance(error, FlinkishError):
        return error
    if is_gateway_gone(error):
        return _to_driver_loss(ProcessLoss.from_exit_code(exit_code_of_jvm()))
    return classify_alive(error, place)


def classify_alive(error: BaseException, place: str = "") -> FlinkishError:
    """Return the typed error of a failure in a JVM that answers, so a refused connection is not the JVM's."""
    if isinstance(error, FlinkishError):
        return error
    text = describe_failure(error)
    marked = _find_marked_error(text)
    if marked is not None:
        return marked
    if not is_of_the_jvm(error):
        lines = "".join(traceback.format_exception(error)).splitlines()
        text = "\n".join(line for line in lines if not line.startswith(_NOTE))
    chain = Chain.of(text)
    loss = find_process_loss(text, chain)
    notes = [note.removeprefix(_NOTE) for note in getattr(error, "__notes__", ()) if note.startswith(_NOTE)]
    where = ", ".join(part for part in (*notes, place) if part)
    if loss is not None:
        return _to_loss_error(loss, chain, where)
    return _to_error(chain, find_rule(chain), error, where)


def is_outage(error: BaseException) -> bool:
    """Return whether a system that does not answer, or is full, caused an error; that may last for hours."""
    if isinstance(error, QueryError):
        # Its class was chosen by all of its causes.
        return not error.ends_when_repeated
    return any(_is_outage(one) for one in causes_of(error))


def _is_outage(error: BaseException) -> bool:
    if isinstance(error, FlinkishError):
        return isinstance(error, EnvironmentFault) and error.restartable and not error.ends_when_repeated
    return (isinstance(error, OSError) and may_pass(error)) or isinstance(classify_alive(error), Outage)


def _find_marked_error(text: str) -> FlinkishError | None:
    """Return the error that a marker in the text describes, or our own error of a task; None without one."""
    if USER_FUNCTION_MARKER in text:
        return _user_error(text)
    if STATE_MARKER in text:
        return CorruptObjectError(
            _read_after(text, STATE_MARKER),
            why="the stored state and the function's declaration do not fit, or the state is damaged",
            what_to_do="declare the state as it was, or start a new job_dir",
        )
    if BAD_RECORD_MARKER in text:
        said, advice = _split_advice(_read_after(text, BAD_RECORD_MARKER))
        return BadRecordError(f"a record cannot be handled: {said}", what_to_do=advice)
    if UNREADABLE_MARKER in text:
        told = text[text.index(UNREADABLE_MARKER) + len(UNREADABLE_MARKER) :]
        place, _ = json.JSONDecoder().raw_decode(told.lstrip())
        return _to_unreadable_record_error(place)
    if (refused := _BAD_TIME.search(text)) is not None:
        topic, partition, offset, timestamp_ms = refused.groups()
        return bad_time(topic, int(partition), int(offset), int(timestamp_ms))
    if NOT_AUTHORIZED_MARKER in text:
        said, advice = _split_advice(_read_after(text, NOT_AUTHORIZED_MARKER))
        return AuthorizationError(said, what_to_do=advice)
    ours = _OURS.findall(text)
    return _rebuild_task_error(*ours[-1]) if ours else None


def _to_unreadable_record_error(place: dict[str, Any]) -> BadRecordError:
    """Return the error about a record that does not fit its format; its place may be unknown."""
    reason, what = place.pop("reason", ""), "a row"
    if place:
        what = "the record at topic {topic}, partition {partition}, offset {offset}".format(**place)
    return BadRecordError(
        f"{what} cannot be read",
        why=reason.rstrip("."),
        what_to_do="choose on_bad_record=OnBadRecord.DROP and start again, then the job goes on from "
        "its last checkpoint; or DeadLetter(topic), for which it needs a new job_dir",
        **place,
    )


#: The error class for each sort of failure. After a QueryError or an Outage a restart may help.
_KINDS: dict[ErrorCategory, type[FlinkishError]] = {
    ErrorCategory.INPUT_LOST: InputLostError,
    ErrorCategory.SETTING: ConfigError,
    ErrorCategory.PLAN: SchemaError,
    ErrorCategory.RECORD: RepeatableUserError,
    ErrorCategory.VALUE: BadRecordError,
    ErrorCategory.DAMAGED: CorruptObjectError,
    ErrorCategory.REFUSED: AuthorizationError,
    ErrorCategory.ENVIRONMENT: EnvironmentFault,
    ErrorCategory.OUTAGE: Outage,
    ErrorCategory.TRANSIENT: QueryError,
}


def _to_error(chain: Chain, rule: Rule | None, error: BaseException, place: str) -> FlinkishError:
    """Return the error of a failure, with its innermost cause, place, reason and advice."""
    root = chain.root
    what = f"{chain.headline}, {place}" if place else chain.headline
    kind = root.condition or root.name
    facts = {"condition": root.condition, "cause": chain.identity, "kind": kind, "trace": chain.trace}
    if rule is None:
        if type(error).__name__ == "AnalysisException":
            return SchemaError(what, why="Spark refuses the plan of this job", **facts)
        return QueryError(what, **facts)
    return _KINDS[rule.category](what, why=rule.why, what_to_do=rule.what_to_do, **facts)


#: Reasons why a process is gone that did not report a lack of memory.
_SAID_NOTHING = {
    JobProcess.WORKER: "the system has killed a Python worker, most often because memory ran out, or a "
    "library has crashed in it",
    JobProcess.EXECUTOR: "an executor was killed, most often because memory ran out, or its JVM has crashed",
}
#: The same for processes that reported a lack of memory.
_FULL = {
    JobProcess.WORKER: "a Python worker has no memory left",
    JobProcess.EXECUTOR: "an executor has no memory left",
    JobProcess.DRIVER: "the JVM of this driver has no memory left, and other parts of it may have failed",
}


def _to_loss_error(loss: ProcessLoss, chain: Chain, place: str) -> FlinkishError:
    """Return the error for a process that is gone or out of memory, while the driver's JVM answers."""
    kind: type[FlinkishError] = MemoryExhaustedError if loss.is_of_memory else ProcessLostError
    if loss.process is JobProcess.DRIVER:
        kind = DriverOutOfMemory
    # A full heap shows up in the task that filled it, or as the end of its executor: one cause for both.
    cause = f"{kind.__name__} of {loss.process.value}"
    return kind(
        ", ".join(part for part in (describe_loss(chain), place) if part),
        why=(_FULL if loss.is_of_memory else _SAID_NOTHING)[loss.process],
        what_to_do=WHAT_TO_DO[loss.process],
        process=loss.process,
        exit_code=loss.exit_code,
        cause=cause,
        kind=cause,
        trace=chain.trace,
    )


def _to_driver_loss(loss: ProcessLoss) -> FlinkishError:
    code = f" (exit code {loss.exit_code})"
    why = "it was killed or ran out of memory" if loss.exit_code is None else f"it has ended by itself{code}"
    if loss.is_of_memory:
        why = f"it had no memory left{code}"
    elif loss.was_killed:
        why = f"it was killed{code}, by the system as a rule, because memory ran out"
    return (DriverOutOfMemory if loss.is_of_memory else SparkGoneError)(
        "the JVM of this driver is gone",
        why=why,
        what_to_do=f"start the job again, a new process takes it over; {WHAT_TO_DO[loss.process]}",
        process=loss.process,
        exit_code=loss.exit_code,
    )


#: Errors that come again after each restart: the user has to correct something, or data is lost.
_FINAL = (UserError, InputLostError, AuthorizationError, CorruptObjectError)


def _rebuild_task_error(module: str, name: str, message: str) -> FlinkishError:
    """Return the error of ours that a Python reader or writer raised in a task, from its text."""
    try:
        kind: Any = getattr(import_module(module), name, None)
    except ImportError:
        kind = None
    said, advice = _split_advice(message[:_MOST_TEXT])
    is_ours = isinstance(kind, type) and issubclass(kind, FlinkishError)
    if is_ours and issubclass(kind, _FINAL):
        # Classes with other arguments are represented by their base class in `core.errors`.
        known = next(one for one in kind.__mro__ if one.__module__ == errors.__name__)
        return cast(type[FlinkishError], known)(said, what_to_do=advice)
    # A broker or another system that does not answer is not the fault of the user's code.
    passes = is_ours and kind.restartable and not kind.ends_when_repeated
    # A text with advice has its own reason, as a rule.
    why = "" if advice else "a task that reads or writes failed"
    return (Outage if passes else QueryError)(f"{name}: {said}", why=why, what_to_do=advice)


def _user_error(text: str) -> FlinkishError:
    start = text.index("{", text.index(USER_FUNCTION_MARKER))
    try:
        facts, _ = json.JSONDecoder().raw_decode(text[start:])
    except ValueError:
        return RepeatableUserError("a user function raised", why=text[start : start + MOST_MESSAGE])
    uid, error = facts.pop("uid"), facts.pop("error")
    known = {"operator": facts.pop("operator")} if "operator" in facts else {}
    what = facts.pop("what", f"the function of operator '{uid}'")
    place = "at the timer with" if "timer_ms" in facts else "on the record at"
    where = f" {place} " + ", ".join(f"{name} {value}" for name, value in facts.items()) if facts else ""
    # The function's exception and its causes follow the marker, if they are there at all.
    causes = Chain.of(text).causes
    ours = [number for number, cause in enumerate(causes) if USER_FUNCTION_MARKER in cause.message]
    names = [error.split(":", 1)[0]]
    if ours and causes[ours[-1] + 1 :]:
        raised = Chain(causes[ours[-1] + 1 :])
        facts["trace"] = raised.trace
        names += [cause.name for cause in raised.causes]
        if raised.root is not raised.causes[0]:
            error = f"{raised.root}, and so {error}"
    if any(map(is_out_of_memory, names)):
        known |= {"process": JobProcess.WORKER, "exit_code": None}
        return MemoryExhaustedError(
            f"{what} ran out of memory{where}",
            why=error,
            what_to_do=WHAT_TO_DO[JobProcess.WORKER],
            uid=uid,
            **facts,
            **known,
        )
    return RepeatableUserError(
        f"{what} failed{where}",
        why=error,
        what_to_do="correct the function or the record; the job goes on from the last checkpoint",
        uid=uid,
        **facts,
        **known,
    )


def _read_after(text: str, marker: str) -> str:
    return text.split(marker, 1)[1].split("\n", 1)[0][:_MOST_TEXT]


def _split_advice(message: str) -> tuple[str, str]:
    said, _, advice = message.partition(" To do: ")
    return said.strip().rstrip("."), advice.strip().rstrip(".")


def identity_of(error: FlinkishError) -> str:
    return str(error.facts.get("cause") or Chain.of(f"{type(error).__name__}: {error.what}").identity)


def kind_of(error: FlinkishError) -> str:
    return str(error.facts.get("kind") or type(error).__name__)


class RetryPolicy:
    """Decides which errors a loop retries: outages without end, other restartable ones a few times."""

    def __init__(self) -> None:
        self._repeated = RepeatedFailures()

    def check(self, error: Exception) -> FlinkishError:
        """Return the classified error if another try makes sense; raise it otherwise."""
        known = classify(error)
        if known.restartable and is_outage(known):
            return known
        cause, kind = identity_of(known), kind_of(known)
        self._repeated = self._repeated.add_failure(None, cause, kind)
        if not known.restartable or self._repeated.is_stuck(cause) or self._repeated.is_stuck_in(kind):
            raise_translated(known, error)
        return known
