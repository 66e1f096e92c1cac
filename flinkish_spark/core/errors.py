"""Every error that flinkish_spark raises on purpose.

One root, three families, so that a caller can tell whose turn it is:

- :class:`UserError`: the job or its settings are wrong; nothing was started, nothing was lost.
- :class:`EnvironmentFault`: Spark, Kafka, Delta or the disk is not as it must be.
- :class:`InternalError`: a rule of the protocol was broken; please report it.

A message says what happened, why, and what to do next; the facts are attributes.
:attr:`FlinkishError.restartable` tells the supervisor whether trying again can help.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator, Mapping
from typing import NoReturn, Self

#: Opens the message of an error about a record that cannot be read or written.
BAD_RECORD_MARKER = "[FLINKISH_BAD_RECORD]"
#: The same for an input value that is no JSON object; the record's place follows as JSON.
UNREADABLE_MARKER = "[FLINKISH_UNREADABLE_RECORD]"

#: Opens the message of an error that a user's function caused; the supervisor looks for it.
USER_FUNCTION_MARKER = "[FLINKISH_USER_FUNCTION]"
#: The same for state that cannot be read or written.
STATE_MARKER = "[FLINKISH_STATE]"

#: What to do if a repeated micro-batch gave other rows than the first time.
MAKE_DETERMINISTIC = (
    "make functions deterministic: no clock, no unseeded random; ask systems outside by AsyncDataStream, "
    "with record_answers=True"
)


#: A plain word that a sentence begins with; a name, a path, code and what stands in quotes are no such words.
_PLAIN_WORD = re.compile(r"[a-z][a-z'-]*(?=[ ,;]|\. |$)")


def _sentence(text: str) -> str:
    first = _PLAIN_WORD.match(text)
    begun = text[0].upper() + text[1:] if first else text
    return begun if begun.endswith((".", "?", "!")) else f"{begun}."


class FlinkishError(Exception):
    """Root of all errors of this package.

    Parameters
    ----------
    what, why, what_to_do
        The three parts of the message, each a sentence without its full stop; the last two may begin with a
        small letter.
    facts
        Whatever a program may want to read; also set as attributes.
    """

    #: Whether the supervisor may restart the query after this error.
    restartable = False
    #: Whether it is nothing that a restart mends if it comes back at the same micro-batch.
    ends_when_repeated = False
    #: What to do about an error of this class that does not say it itself.
    usual_advice = ""

    def __init__(self, what: str, *, why: str = "", what_to_do: str = "", **facts: object) -> None:
        what_to_do = what_to_do or self.usual_advice
        self.what, self.why, self.what_to_do = what, why, what_to_do
        self.facts: Mapping[str, object] = facts
        for name, value in facts.items():
            setattr(self, name, value)
        parts = [what if what.endswith((".", "?", "!")) else f"{what}."]
        parts += [_sentence(why)] if why else []
        parts += [_sentence(f"To do: {what_to_do}")] if what_to_do else []
        super().__init__(" ".join(parts))


class UserError(FlinkishError):
    """The job, a function or a setting is wrong."""


class ConfigError(UserError):
    """A setting is missing, out of range, or contradicts another."""


class GraphError(UserError):
    """The stream graph cannot be run: duplicate uid, unknown topic, loop through one topic."""


class PatternError(UserError):
    """A pattern contradicts itself, or asks for a match in a way that cannot be done."""


class JobDirError(UserError):
    """The job directory belongs to another job, Spark version, format or setting."""


class SchemaError(UserError):
    """Declared schema and data (or table) do not fit."""


class JobCancelledError(UserError):
    """Somebody has cancelled the job; rows that it staged after its last checkpoint do not count."""


class UserFunctionError(UserError):
    """A user function raised; the message names the record's origin."""

    usual_advice = "correct the function or the record; the job goes on from the last checkpoint"


class BadRecordError(UserError):
    """A record cannot be read or written and the policy is to fail."""

    usual_advice = "correct the producer, or choose another policy for bad records"


def bad_time(topic: str, partition: int, offset: int, timestamp_ms: int) -> BadRecordError:
    place = f"topic {topic}, partition {partition}, offset {offset}"
    return BadRecordError(
        f"the record at {place} has the timestamp {timestamp_ms}",
        why="Kafka's timestamps are milliseconds since 1970, and this is in none of the years 1 to 9999",
        what_to_do="correct the producer; delete the records up to it, or start after it in a new job",
        topic=topic,
        partition=partition,
        offset=offset,
    )


class EnvironmentFault(FlinkishError):
    """Something outside this process is not as it must be."""

    @classmethod
    def from_os_error(cls, error: OSError, what: str, *, what_to_do: str = "", **facts: object) -> Self:
        """Return the error that an OSError means: a missing right is final, a full disk may pass."""
        found = cls(what, why=str(error), what_to_do=what_to_do, **facts)
        found.ends_when_repeated = not may_pass(error)
        return found


class BrokerUnavailableError(EnvironmentFault):
    """No Kafka broker answered within the time allowed."""

    restartable = True


class AuthorizationError(EnvironmentFault):
    """Kafka refuses this principal; retrying cannot help."""

    usual_advice = "give this principal the right by an ACL, and start the job again"


class UnavailableError(EnvironmentFault):
    """A system, a disk or a service is not available now; the job tries again."""

    usual_advice = "check that its system can be reached; the job tries again"
    restartable = True


class RetriableError(EnvironmentFault):
    """An attempt failed, and another one may succeed; the same failure again and again ends the job."""

    restartable = True
    ends_when_repeated = True


class InputLostError(EnvironmentFault):
    """Input that the job still needs is gone: expired, or its topic was created again."""


class OwnedElsewhereError(EnvironmentFault):
    """Another living process owns the job directory."""


class FencedError(EnvironmentFault):
    """A newer owner has taken the job over; this process must stop."""

    usual_advice = "let this process end; the newer owner goes on with the job"


class AnotherTimelineError(EnvironmentFault):
    """Somebody else has committed under this job's name: its directory is an older copy, or runs twice.

    Nothing was started, or nothing later is committed. What was committed stays as it is.
    """


class CommittableLostError(EnvironmentFault):
    """A decided committable can no longer be committed. Nothing later is decided.

    A job stops its query, and its next start stages the data again.
    """

    restartable = True
    ends_when_repeated = True


class NotReplayableError(CommittableLostError):
    """Lost data cannot be staged again either. The job stops; nothing later is decided."""

    restartable = False


class NoProgressError(EnvironmentFault):
    """A failure came back at the same micro-batch, as often as it may, and no checkpoint between."""


class ProcessLostError(EnvironmentFault):
    """A process that worked for the job was killed, has crashed or has no memory left."""

    restartable = True
    ends_when_repeated = True


class MemoryExhaustedError(ProcessLostError):
    """An executor or a Python worker has no memory left; nothing of the micro-batch counts."""


class SparkGoneError(ProcessLostError):
    """The JVM of this driver died; a new process has to take the job over."""

    restartable = False


class CancellationTimedOut(SparkGoneError):
    """A cancelled micro-batch, or a thread of the job on its driver, did not end in time.

    Nothing of such a micro-batch counts, and the JVM was ended unless the message says otherwise. The next
    start commits decided checkpoints.
    """


class DriverOutOfMemory(MemoryExhaustedError, SparkGoneError):
    """The JVM of this driver has no memory left. It is not used any more, whether or not it has ended."""

    restartable = False


class StoreError(EnvironmentFault):
    """The job directory cannot be read or written."""

    restartable = True


class CorruptObjectError(EnvironmentFault):
    """An object in the job directory fails its checksum, or a state value does not decode."""

    usual_advice = "put the file back from a copy, or start a new job_dir from a savepoint"


class InternalError(FlinkishError):
    """A rule of the protocol was broken; a bug in this package."""

    usual_advice = "report it, with this message and the trace"


#: Errors of a disk, or a system on the network, that is away, full or busy.
_MAY_PASS = frozenset(
    getattr(errno, name)
    for name in (
        *("EAGAIN", "EBUSY", "EDEADLK", "EDQUOT", "EINTR", "EIO", "EMFILE", "ENFILE", "ENODEV", "ENOLCK"),
        *("ENOMEM", "ENOSPC", "ENXIO", "EREMOTEIO", "ESTALE", "ETIMEDOUT"),
        *("EADDRINUSE", "EADDRNOTAVAIL", "ECOMM", "ECONNABORTED", "ECONNREFUSED", "ECONNRESET", "EHOSTDOWN"),
        *("EHOSTUNREACH", "ENETDOWN", "ENETRESET", "ENETUNREACH", "ENOBUFS", "ENOTCONN", "EPIPE", "EPROTO"),
        "ESHUTDOWN",
    )
    if hasattr(errno, name)
)
#: They may have no number; they mean a path or a right, and no outage.
_DO_NOT_PASS = (FileExistsError, FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError)


def may_pass(error: OSError) -> bool:
    """Return whether an error may be an outage: something does not answer, is full or busy."""
    if isinstance(error, _DO_NOT_PASS):
        return False
    # Classes of libraries have numbers of their own: 1 is any error of TLS.
    if type(error).__module__ != "builtins" or isinstance(error, ConnectionError | TimeoutError):
        return True
    return error.errno is None or error.errno in _MAY_PASS


def raise_translated(known: BaseException, error: BaseException) -> NoReturn:
    """Raise `known`, which a caught `error` was translated to; called where the error was caught."""
    if known is error:
        raise error
    raise known from error


def causes_of(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception and all its causes in turn; each once."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        yield cause
        seen.add(id(cause))
        cause = cause.__cause__ or cause.__context__
