"""From what Spark says went wrong to one typed error.

Errors of user code and of executors reach the driver as text. Those of ours start with a marker;
the rest are recognised by Spark's error conditions.
"""

from __future__ import annotations

import json
import re
from typing import Any

from flinkish_spark import errors
from flinkish_spark.bridge import describe_failure, is_gateway_gone
from flinkish_spark.errors import (
    AuthorizationError,
    BadRecordError,
    CorruptObjectError,
    EnvironmentFault,
    FlinkishError,
    InputLostError,
    SchemaError,
    SparkGoneError,
    UserError,
    UserFunctionError,
)
from flinkish_spark.kafka.record_times import bad_time
from flinkish_spark.runtime.keyed_operator import STATE_MARKER, USER_FUNCTION_MARKER
from flinkish_spark.sources.json_records import BAD_RECORD_MARKER, UNREADABLE_MARKER
from flinkish_spark.sources.kafka_reading import BAD_TIME_MARKER

NOT_AUTHORIZED_MARKER = "[FLINKISH_NOT_AUTHORIZED]"
_MALFORMED = ("MALFORMED_RECORD_IN_PARSING", "FAILED_EXECUTE_UDF.FROM_JSON")
#: What Spark's own reader says of a record's time that it cannot count in microseconds.
_BAD_TIME = re.compile(r"Record at topic (\S+) partition (\d+) offset (\d+) has timestamp value (-?\d+)")
_INPUT_LOST = re.compile(
    r"KAFKA_DATA_LOSS|data may have been missed|data may have been lost|OffsetOutOfRange"
    r"|UnknownTopicOrPartition",
)
#: Errors of the data (class 22) and of a user's Python code in a transform: unlike a lost worker they
#: come again after every restart.
_USER_CODE = re.compile(r"SQLSTATE: 22\w{3}|api\.python\.PythonException")
#: An error of ours that was raised in a Python process of Spark's: its class and its message.
_OURS = re.compile(r"^flinkish_spark(?:\.\w+)*\.(\w+): (.+)$", re.MULTILINE)
#: Longest part of a foreign message that is repeated in ours.
_MOST_TEXT = 1_500


class QueryFailed(EnvironmentFault):
    """The query ended for a reason outside the user's code; a restart may help."""

    restartable = True


class UnreadableRecordError(BadRecordError):
    """An input value is not a JSON object of the declared schema and the policy is to fail."""

    @classmethod
    def at(cls, topic: str, partition: int, offset: int) -> UnreadableRecordError:
        """Return the error that names the record."""
        return cls.about(
            f"the record at topic {topic}, partition {partition}, offset {offset}",
            topic=topic,
            partition=partition,
            offset=offset,
        )

    @classmethod
    def about(cls, what: str, **facts: Any) -> UnreadableRecordError:
        """Return the error about a record of which only `what` is known."""
        return cls(
            f"{what} is not a JSON object of the declared schema",
            what_to_do="choose on_bad_record=OnBadRecord.DROP and start again, then the job goes on from "
            "its last checkpoint; or DeadLetter(topic), for which it needs a new job_dir",
            **facts,
        )


class RepeatableUserError(UserFunctionError):
    """A user function raised; restarted once, since what it calls may recover."""

    restartable = True

    @property
    def is_placed(self) -> bool:
        """Whether it is known which record it was."""
        return "offset" in self.facts or "sequence" in self.facts

    @property
    def record(self) -> tuple[Any, ...]:
        """What identifies the record, to see whether the same one fails again."""
        return tuple(
            self.facts.get(k) for k in ("uid", "topic", "partition", "offset", "channel", "sequence")
        )


def classify(error: BaseException) -> FlinkishError:
    """Return the typed error for whatever ended the query."""
    if isinstance(error, FlinkishError):
        return error
    if is_gateway_gone(error):
        return SparkGoneError(
            "the JVM of this driver is gone",
            why="it was killed or ran out of memory",
            what_to_do="start the job again; a new process takes it over from the last checkpoint",
        )
    text = describe_failure(error)
    if USER_FUNCTION_MARKER in text:
        return _user_error(text)
    if STATE_MARKER in text:
        return CorruptObjectError(
            _after(text, STATE_MARKER),
            why="the stored state and the function's declaration do not fit, or the state is damaged",
            what_to_do="declare the state as it was, or start a new job_dir",
        )
    if BAD_RECORD_MARKER in text:
        return BadRecordError(
            f"a record cannot be handled:{_after(text, BAD_RECORD_MARKER)}",
            what_to_do="correct the producer, or choose another policy for bad records",
        )
    if UNREADABLE_MARKER in text:
        place, _ = json.JSONDecoder().raw_decode(_after(text, UNREADABLE_MARKER).lstrip())
        return UnreadableRecordError.at(**place) if place else UnreadableRecordError.about("a row")
    if BAD_TIME_MARKER in text:
        facts, _ = json.JSONDecoder().raw_decode(_after(text, BAD_TIME_MARKER))
        return bad_time(**facts)
    if (refused := _BAD_TIME.search(text)) is not None:
        topic, partition, offset, timestamp_ms = refused.groups()
        return bad_time(topic, int(partition), int(offset), int(timestamp_ms))
    if any(name in text for name in _MALFORMED):
        return UnreadableRecordError.about("a value of the input")
    if NOT_AUTHORIZED_MARKER in text:
        return AuthorizationError(_after(text, NOT_AUTHORIZED_MARKER).strip().rstrip("."))
    ours = _OURS.findall(text)
    if ours:
        return _raised_in_a_task(*ours[-1])
    if _INPUT_LOST.search(text):
        return InputLostError("Spark found that input is missing", why=text[:_MOST_TEXT])
    if _USER_CODE.search(text):
        return RepeatableUserError(
            "an expression or a function of a transform failed on a record",
            why=text[:_MOST_TEXT],
            what_to_do="correct the transform or the record; the job goes on from the last checkpoint",
        )
    if type(error).__name__ == "AnalysisException":
        return SchemaError("Spark refuses the plan of this job", why=str(error)[:_MOST_TEXT])
    return QueryFailed("the query failed", why=text[:_MOST_TEXT], text=text)


def _raised_in_a_task(name: str, message: str) -> FlinkishError:
    """Return what an error of ours means that came out of a Python reader or writer as text."""
    known = getattr(errors, name, None)
    # What the user has to correct comes again after every restart: a state in `open()`, for example.
    if isinstance(known, type) and issubclass(known, UserError | InputLostError | AuthorizationError):
        return known(message[:_MOST_TEXT].rstrip("."))
    # A broker or another system that does not answer: not the fault of the user's code.
    return QueryFailed("a task that reads or writes failed", why=message[:_MOST_TEXT].rstrip("."))


def _user_error(text: str) -> FlinkishError:
    start = text.index("{", text.index(USER_FUNCTION_MARKER))
    try:
        facts, _ = json.JSONDecoder().raw_decode(text[start:])
    except ValueError:
        return RepeatableUserError("a user function raised", why=text[start : start + _MOST_TEXT])
    uid, error = facts.pop("uid"), facts.pop("error")
    what = facts.pop("what", f"the function of operator '{uid}'")
    where = ", ".join(f"{name} {value}" for name, value in facts.items())
    place = "at the timer with" if "timer_ms" in facts else "on the record at"
    return RepeatableUserError(
        f"{what} failed" + (f" {place} {where}" if where else ""),
        why=error,
        what_to_do="correct the function or the record; the job goes on from the last checkpoint",
        uid=uid,
        **facts,
    )


def _after(text: str, marker: str) -> str:
    rest = text[text.index(marker) + len(marker) :]
    return rest.split("\n", 1)[0][:_MOST_TEXT]
