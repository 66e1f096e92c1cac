"""Errors of Spark, Delta and Kafka: the innermost one in a text, and what it means for a job.

An error inside `foreachBatch` reaches the driver as one text: Spark's own sentence, Py4J's message about
the call into Python, a Python traceback that contains the text of a Java exception with its frames, and then
its causes. The useful part, the type and the message of the innermost exception, is at the end. Frames of
Py4J, of PySpark and of this package are left out.

Spark and Delta give an error a *condition* (``DIVIDE_BY_ZERO``), and Spark an SQLSTATE (``22012``). The rows
of :data:`RULES` name the conditions that a running job meets; the SQLSTATE classifies the others. After an
error that no row classifies the job restarts, and it ends if the error repeats without progress
(:class:`~flinkish_spark.protocol.restart.RepeatedFailures`).
"""

from __future__ import annotations

import builtins
import enum
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

#: Longest message of one cause that is kept; Spark prints whole rows and plans into some.
MOST_MESSAGE = 700
#: Longest part of a headline that identifies a repeated failure.
MOST_IDENTITY = 300
#: Frames of a user's program that are kept of a traceback, the innermost.
MOST_FRAMES = 4
#: After such a line Spark prints the query, with all of its literals.
_ASIDE = re.compile(r"\n=== Streaming Query ===|\n== (?:SQL|DataFrame|PySpark)\b")
_CONDITION = re.compile(r"^\s*\[([A-Z][A-Z0-9_]+(?:\.[A-Z0-9_]+)*)\]\s*")
#: A condition at the beginning of a line in the middle of a text.
_NAMED_LINE = re.compile(r"^\[[A-Z][A-Z0-9]*_[A-Z0-9_]+(?:\.[A-Z0-9_]+)*\] ")
_SQLSTATE = re.compile(r"\bSQLSTATE: ([0-9A-Z]{5})\b")
_SQLSTATE_AT_END = re.compile(r"\s*\bSQLSTATE: [0-9A-Z]{5}\b\.?\s*$")
_JAVA = re.compile(r"^(?:Caused by: |: )?((?:[a-z_][\w$]*\.)+[A-Z][\w$]*)(?::(?: (.*))?)?$")
_LOST_TASK = re.compile(r"Lost task \S+ in stage .*?\): ((?:[a-z_][\w$]*\.)+[A-Z][\w$]*)(?:: (.*))?$")
_PYTHON = re.compile(r"^([A-Za-z_][\w.]*(?:\.<locals>\.[\w.]+)*)(?:: (.*))?$")
_TRACEBACK = "Traceback (most recent call last):"
_GROUP = f"Exception Group {_TRACEBACK}"
#: Prefix of each line of an exception group, and the lines between its exceptions.
_MARGIN = re.compile(r"^\s*(?:\+-\+?-{3,}.*|[+|](?: |$))")
_BETWEEN = re.compile(r"^\s*\+-\+-{3,}", re.MULTILINE)
_FRAME = re.compile(r'^\s*File "([^"]+)", line (\d+), in (\S+)')
_FROM = "The above exception was the direct cause of the following exception:"
_DURING = "During handling of the above exception, another exception occurred:"
_JVM_STACK = "JVM stacktrace:"
#: Lines that end a message: frames of Java, and lines between two stacks.
_ENDS = re.compile(
    r"^\s+at \S|^\s*\.\.\. \d+ (?:more|common frames omitted)|^\s*Driver stacktrace:|^\s*Suppressed: "
)
#: Frames that do not help a user: this package, its callers, and libraries.
_FOREIGN_FRAMES = re.compile(
    r"(?:^|[/\\])(?:flinkish_spark|py4j|pyspark|site-packages|dist-packages)[/\\]|^<frozen "
    r"|pyspark\.zip|py4j-.*\.zip|\.p[xy][xi]$|[/\\]lib[/\\]python3"
)
_PROXY = re.compile(r"An exception was raised by the Python Proxy\.(?: Return Message:?)?\s*")
_CALLING = re.compile(r"An error occurred while calling \S+\s*")
#: Numbers, addresses, UUIDs and the like.
_NUMBERS = re.compile(r"\b(?=[0-9a-f-]*\d)(?:0x)?[0-9a-f]+(?:-[0-9a-f]+)*\b|\d+", re.IGNORECASE)
#: Exceptions that wrap another one and say nothing about it.
_WRAPPERS = frozenset(
    {"Py4JJavaError", "Py4JException", "StreamingQueryException", "UndeclaredThrowableException"}
)


@dataclass(frozen=True, slots=True)
class Cause:
    #: Class of the exception with its package, as in the text; empty for a message without a class.
    kind: str
    #: The message on one line, without condition and SQLSTATE, cut to :data:`MOST_MESSAGE`.
    message: str
    #: Spark's or Delta's name of the error, like ``DIVIDE_BY_ZERO``; empty without one.
    condition: str = ""
    #: Five characters; empty without one.
    sqlstate: str = ""
    #: Frames of the user's program, innermost last; empty for Java.
    frames: tuple[str, ...] = ()

    @classmethod
    def of(cls, kind: str, text: str, frames: Iterable[str] = ()) -> Cause:
        """Parse condition and SQLSTATE of a message; only Spark's own classes have them."""
        text = _ASIDE.split(text, maxsplit=1)[0]
        named = _CONDITION.match(text) if "." in kind or not kind else None
        condition = named.group(1) if named else ""
        state = _SQLSTATE.search(text)
        if named:
            text = text[named.end() :]
        # A user's message may contain the word, too: only at the end it is Spark's.
        text = _SQLSTATE_AT_END.sub("", text)
        text = _PROXY.sub("", _CALLING.sub("", text))
        message = " ".join(text.split())
        if len(message) > MOST_MESSAGE:
            message = f"{message[:MOST_MESSAGE].rstrip()} ..."
        sqlstate = state.group(1) if state and condition else ""
        return cls(kind, message, condition, sqlstate, tuple(frames)[-MOST_FRAMES:])

    @property
    def name(self) -> str:
        return self.kind.rsplit(".", 1)[-1].rsplit("$", 1)[-1]

    @property
    def is_wrapper(self) -> bool:
        return self.name in _WRAPPERS and not self.condition

    def __str__(self) -> str:
        condition = f"[{self.condition}]" if self.condition else ""
        said = " ".join(part for part in (condition, self.message) if part).rstrip(".")
        return ": ".join(part for part in (self.name, said) if part)


@dataclass(frozen=True, slots=True)
class Chain:
    """The causes of one failure, the outermost first; there is at least one."""

    causes: tuple[Cause, ...]

    @classmethod
    def of(cls, text: str) -> Chain:
        reader, has_groups = _Reader(), _BETWEEN.search(text) is not None
        for line in text.splitlines():
            reader.read_line(_MARGIN.sub("", line).replace(_GROUP, _TRACEBACK) if has_groups else line)
        return cls(tuple(reader.finish() or [Cause.of("", text)]))

    @property
    def root(self) -> Cause:
        return next((one for one in self.from_inside if not one.is_wrapper), self.causes[-1])

    @property
    def headline(self) -> str:
        """The innermost cause, preceded by the one around it if it has no message."""
        root = self.root
        around = (one for one in self.from_inside if not one.is_wrapper and (one.message or one.condition))
        told = next(around, root)
        return str(root) if told is root else f"{told} ({root.name})"

    @property
    def identity(self) -> str:
        return _NUMBERS.sub("#", self.headline)[:MOST_IDENTITY]

    @property
    def from_inside(self) -> tuple[Cause, ...]:
        return self.causes[::-1]

    @property
    def trace(self) -> str:
        """The causes from the innermost one outwards, in a few lines, with frames of the user's program."""
        lines: list[str] = []
        for cause in self.from_inside:
            line = str(cause)
            if cause.is_wrapper or any(line in before or before in line for before in lines):
                continue
            lines += [line, *(f"  at {frame}" for frame in reversed(cause.frames))]
        return "\n".join(lines[:12])


@dataclass(slots=True)
class _Open:
    """An exception whose message may continue on the next line."""

    kind: str
    words: list[str] = field(default_factory=list)
    frames: tuple[str, ...] = ()


class _Reader:
    def __init__(self) -> None:
        self.found: list[Cause] = []
        self._open: _Open | None = _Open("")
        self._frames: list[str] | None = None
        #: Start of the current traceback in `found`, and the causes that others were raised from, innermost
        #: first.
        self._began, self._goes_on = 0, False
        self._raised_from: list[list[Cause]] = []
        self._is_copy = False

    def read_line(self, line: str) -> None:
        if self._frames is not None:
            self._read_traceback_line(line)
        elif _TRACEBACK in line:
            self._read_message_line(line.split(_TRACEBACK, 1)[0].rstrip().removesuffix(":"))
            self._close()
            if not self._goes_on:
                self._began = len(self.found)
            self._goes_on, self._frames = False, []
        elif line.strip() in (_FROM, _DURING):
            self._close()
            self._goes_on = True
            if line.strip() == _FROM:
                # Python prints the inner exception first; it belongs after the one raised from it.
                self._raised_from.append(self.found[self._began :])
                del self.found[self._began :]
        elif line.strip() == _JVM_STACK:
            self._close()
            self._is_copy = True
        elif _ENDS.match(line):
            self._close()
        else:
            self._read_message_line(line)

    def _read_traceback_line(self, line: str) -> None:
        frame = _FRAME.match(line)
        if frame:
            path, number, name = frame.groups()
            if not _FOREIGN_FRAMES.search(path):
                assert self._frames is not None
                self._frames.append(f"{path.rsplit('/', 1)[-1]}:{number} in {name}")
            return
        head = _PYTHON.match(line)
        if head is None or line[:1].isspace():
            return
        kind, words = head.groups()
        self._open = _Open(kind, [words or ""], tuple(self._frames or ()))
        self._frames = None

    def _read_message_line(self, line: str) -> None:
        lost, java = _LOST_TASK.search(line), _JAVA.match(line)
        head = lost or java
        if head is None:
            is_of_python = self._open is not None and self._open.kind and "." not in self._open.kind
            if _NAMED_LINE.match(line) and not is_of_python:
                # The message of another exception, whose class was left out.
                self._close()
                self._open = _Open("")
            self._add_words(line)
            return
        if lost is not None:
            self._add_words(line[: lost.start(1)])
        self._close()
        kind, words = head.groups()
        if self._is_copy:
            # After "JVM stacktrace:" the same exception is printed once more.
            self._is_copy = False
            if not words or (self.found and self.found[-1].message[:40] in " ".join(words.split())):
                return
        self._open = _Open(kind, [words or ""])

    def _add_words(self, words: str) -> None:
        if self._open is not None:
            self._open.words.append(words)

    def _close(self) -> None:
        if self._open is None:
            return
        cause = Cause.of(self._open.kind, "\n".join(self._open.words), self._open.frames)
        self._open = None
        if cause.kind or cause.message or cause.condition:
            self.found.append(cause)

    def finish(self) -> list[Cause]:
        self._close()
        inner = (cause for group in reversed(self._raised_from) for cause in group)
        return [*self.found, *inner]


class ErrorCategory(enum.Enum):
    #: Lost input. The job ends: what it still has to read is gone, replaced or damaged.
    INPUT_LOST = "INPUT_LOST"
    #: User error. The job ends: a setting, such as what is read of a table, does not fit what it meets.
    SETTING = "SETTING"
    #: User error. The job ends: Spark or Delta does not accept its plan, or a schema.
    PLAN = "PLAN"
    #: User error. A record, or a function or expression on one; restarted once.
    RECORD = "RECORD"
    #: User error. A name or value that no store takes. The job ends.
    VALUE = "VALUE"
    #: Environment. Spark's log or state in the job directory is damaged or another job's. The job ends.
    DAMAGED = "DAMAGED"
    #: Environment. The job is not allowed to. The job ends.
    REFUSED = "REFUSED"
    #: Environment. Spark, or the machine it runs on, is not as it must be. The job ends.
    ENVIRONMENT = "ENVIRONMENT"
    #: Transient, and nothing of the job's can be the reason: restarted for as long as the strategy says.
    OUTAGE = "OUTAGE"
    #: Transient as far as one can tell: restarted, but not for ever at the same micro-batch.
    TRANSIENT = "TRANSIENT"


@dataclass(frozen=True, slots=True)
class Rule:
    category: ErrorCategory
    #: For people; sentences without a full stop.
    why: str
    what_to_do: str
    #: Beginnings of conditions; the longest that fits wins.
    conditions: tuple[str, ...] = ()
    #: Beginnings of SQLSTATEs, for conditions in no row; the longest that fits wins.
    sqlstates: tuple[str, ...] = ()
    #: Names of exceptions without their package.
    classes: tuple[str, ...] = ()
    #: A pattern in the message of an error without a condition.
    words: str = ""


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_NEW_JOB = "or begin anew with a new job_dir"
_GOES_ON = "the job goes on from the last checkpoint"

RULES = (
    # Input.
    Rule(
        ErrorCategory.INPUT_LOST,
        "the table at this path is not the one that the job has read so far: it was dropped and created "
        "again",
        f"put the old table back, {_NEW_JOB}, which reads the new table from its beginning",
        conditions=("DIFFERENT_DELTA_TABLE_READ_BY_STREAMING_SOURCE",),
    ),
    Rule(
        ErrorCategory.INPUT_LOST,
        "a table, a folder, a file or a log entry that the job has not read yet is gone; VACUUM and Delta's "
        "own cleaning delete files and entries when their retention is over",
        f"put it back as it was, {_NEW_JOB}; keep it for longer than a job may stand still "
        "(delta.deletedFileRetentionDuration, delta.logRetentionDuration)",
        conditions=_names(
            "DELTA_CANNOT_FIND_VERSION DELTA_FILE_NOT_FOUND DELTA_LOG_FILE_NOT_FOUND "
            "DELTA_MISSING_CHANGE_DATA DELTA_MISSING_DELTA_TABLE DELTA_PATH_DOES_NOT_EXIST "
            "DELTA_SCHEMA_NOT_SET DELTA_TABLE_NOT_FOUND DELTA_TRUNCATED_TRANSACTION_LOG "
            "DELTA_VERSION_NOT_FOUND FAILED_READ_FILE.FILE_NOT_EXIST PATH_NOT_FOUND"
        ),
    ),
    Rule(
        ErrorCategory.INPUT_LOST,
        "a file of the input is damaged, or of another format than the source was told",
        f"put the right file in its place, or move it out of the folder, {_NEW_JOB}",
        conditions=("DELTA_FAILED_READ_FILE_FOOTER", "FAILED_READ_FILE.CANNOT_READ_FILE_FOOTER"),
        words=r"is not a Parquet file|Expected magic number at tail|Not an Avro data file|Malformed ORC file",
    ),
    Rule(
        ErrorCategory.INPUT_LOST,
        "records of the topic that the job has not read yet are gone: their retention is over, or the "
        "topic was deleted and created again",
        f"raise the topic's retention; {_NEW_JOB}, which begins with what is there",
        conditions=("KAFKA_DATA_LOSS",),
        classes=(
            "OffsetOutOfRangeException",
            "NoOffsetForPartitionException",
            "UnknownTopicOrPartitionException",
            "UnknownTopicIdException",
        ),
        words=r"data may have been (?:missed|lost)",
    ),
    # The job as it is written.
    Rule(
        ErrorCategory.SETTING,
        "rows of the source table were updated, deleted or overwritten, and a source of rows that are "
        "added cannot report that others are gone",
        "read the change feed (DeltaSource(path, DeltaChanges.FEED)), or begin after that version in a "
        "new job_dir",
        conditions=("DELTA_SOURCE_IGNORE_DELETE", "DELTA_SOURCE_TABLE_IGNORE_CHANGES"),
    ),
    Rule(
        ErrorCategory.SETTING,
        "the table writes no change feed",
        "ALTER TABLE ... SET TBLPROPERTIES (delta.enableChangeDataFeed = true), or read its rows",
        conditions=("DELTA_CHANGE_TABLE_FEED_DISABLED",),
    ),
    Rule(
        ErrorCategory.PLAN,
        "the source table got another schema, with which its older versions cannot be read on",
        "put the old schema back, or begin after that version in a new job_dir",
        conditions=(
            "DELTA_CHANGE_DATA_FEED_INCOMPATIBLE_",
            "DELTA_STREAMING_INCOMPATIBLE_SCHEMA_CHANGE",
            "DELTA_STREAMING_SCHEMA_",
        ),
    ),
    Rule(
        ErrorCategory.PLAN,
        "the plan of this job, a schema or a setting is one that Spark or Delta does not accept",
        f"correct it; {_GOES_ON}",
        sqlstates=("0A", "22KD", "42", "51", "55", "F0", "KD0"),
    ),
    # Records and functions.
    Rule(
        ErrorCategory.RECORD,
        "a value does not fit the type that is declared, or cannot be converted to it",
        f"correct the record, choose a wider type, or use try_cast and functions like it; {_GOES_ON}",
        conditions=("EXPRESSION_DECODING_FAILED", "EXPRESSION_ENCODING_FAILED", "INVALID_EXTERNAL_TYPE"),
        sqlstates=("22003", "22007", "22008", "22015", "22018"),
    ),
    Rule(
        ErrorCategory.RECORD,
        "a record of a file, or a text in a transform, cannot be read with the declared schema",
        f"correct it, or read it with another schema or mode; {_GOES_ON}",
        conditions=(
            "FAILED_READ_FILE.PARQUET_COLUMN_DATA_TYPE_MISMATCH",
            "MALFORMED_CSV_RECORD",
            "MALFORMED_RECORD_IN_PARSING",
        ),
    ),
    Rule(
        ErrorCategory.RECORD,
        "an expression or a function of a transform failed on a record",
        f"correct the transform or the record, or raise the limit that the message names; {_GOES_ON}",
        sqlstates=("21", "22", "23", "38", "39", "54", "P0"),
        classes=("PythonException",),
    ),
    Rule(
        ErrorCategory.VALUE,
        "a value became the name of a folder or a file, and is longer than names may be: 255 bytes on "
        "most disks",
        "partition by another column, or shorten it (substring, a hash) before the sink",
        words=r"[Ff]ile name too long|PathComponentTooLong|maximum path component name limit|KeyTooLong",
    ),
    # What the job directory holds.
    Rule(
        ErrorCategory.DAMAGED,
        "Spark's own log or state of the query, in the job directory, is damaged or has lost a file, or was "
        "written by other operators than the job has now",
        "declare operators and states as they were; restore the job directory from a copy of the newest "
        f"time, {_NEW_JOB} from a savepoint",
        conditions=_names(
            "BATCH_METADATA_NOT_FOUND CHECKPOINT_FILE_CHECKSUM_VERIFICATION_FAILED "
            "INVALID_LOG_VERSION MALFORMED_LOG_FILE STATE_STORE_KEY_ STATE_STORE_ROW_CHECKSUM_ "
            "STATE_STORE_VALUE_ STREAMING_CHECKPOINT_MISSING_METADATA_FILE "
            "STREAMING_STATEFUL_OPERATOR_"
        ),
        words=r"(?:Incomplete|Malformed) log file|Log file was malformed|Error reading stream metadata",
    ),
    # Who may, and with what.
    Rule(
        ErrorCategory.REFUSED,
        "Kafka refuses this principal, or does not believe it",
        "grant the rights, or correct the options of security",
        classes=_names(
            "ClusterAuthorizationException DelegationTokenAuthorizationException "
            "GroupAuthorizationException SaslAuthenticationException TopicAuthorizationException "
            "TransactionalIdAuthorizationException"
        ),
    ),
    Rule(
        ErrorCategory.ENVIRONMENT,
        "Spark or Delta lacks a library, a setting, or a feature that a table needs",
        "put the JAR on the class path, or a newer one, or set what the message names, and start again",
        conditions=_names(
            "CANNOT_LOAD_CHECKPOINT_FILE_MANAGER DELTA_ACTIVE_SPARK_SESSION_NOT_FOUND "
            "DELTA_INVALID_PROTOCOL_VERSION DELTA_UNSUPPORTED_FEATURES_ KRYO_BUFFER_OVERFLOW"
        ),
        sqlstates=("56",),
        classes=(
            "ClassNotFoundException",
            "NoClassDefFoundError",
            "NoSuchMethodError",
            "UnsatisfiedLinkError",
        ),
    ),
    # What comes and goes.
    Rule(
        ErrorCategory.OUTAGE,
        "a system that the job needs does not answer, or is busy",
        "look whether it runs and can be reached from here; the job goes on by itself when it answers",
        conditions=("DATA_SOURCE_EXTERNAL_ERROR", "INTERNAL_ERROR_NETWORK"),
        sqlstates=("08",),
        classes=_names(
            "BrokenPipeError BrokerNotAvailableException ClosedChannelException "
            "CommunicationsException ConnectException ConnectTimeoutException ConnectionAbortedError "
            "ConnectionError ConnectionRefusedError ConnectionResetError "
            "CoordinatorLoadInProgressException CoordinatorNotAvailableException DisconnectException "
            "HttpHostConnectException KafkaConnectionError KafkaTimeoutError "
            "LeaderNotAvailableException NetworkException NoBrokersAvailable NoRouteToHostException "
            "NodeNotReadyError NotCoordinatorException NotLeaderOrFollowerException "
            "PortUnreachableException SQLNonTransientConnectionException SQLRecoverableException "
            "SQLTransientConnectionException SQLTransientException SocketException "
            "SocketTimeoutException TimeoutError TimeoutException UnknownHostException gaierror"
        ),
        words=r"Connection (?:refused|reset|timed out|closed|aborted)|[Rr]ead timed out|Broken pipe"
        r"|No route to host|Unable to execute HTTP request|Slow Down|Service Unavailable|database is locked"
        r"|could not connect to|server closed the connection|terminating connection|the database system is"
        r"|too many (?:clients|connections)|Name or service not known|Temporary failure in name resolution"
        r"|Network is unreachable",
    ),
    Rule(
        ErrorCategory.OUTAGE,
        "a disk is full, or the machine has run out of something else",
        "make room; the job goes on by itself then",
        words=r"No space left on device|[Dd]isk quota exceeded|Too many open files|Cannot allocate memory"
        r"|Resource temporarily unavailable|Stale file handle",
    ),
    Rule(
        ErrorCategory.OUTAGE,
        "an executor was taken away while it worked",
        "nothing, if that was wanted; else look into the log of the cluster",
        words=r"exited unrelated to the running tasks|Executor decommission|[Nn]ode decommission|worker lost",
    ),
    Rule(
        ErrorCategory.OUTAGE,
        "another writer of the same table was faster",
        "nothing; if it happens often, let others write at other times, or other partitions",
        conditions=("CONCURRENT_STREAM_LOG_UPDATE", "DELTA_CONCURRENT_"),
        sqlstates=("2D521", "40"),
    ),
    Rule(
        ErrorCategory.TRANSIENT,
        "there is no TLS connection to Kafka: certificates were renewed, or do not fit",
        "nothing, if they were renewed: the job starts again with clients that read them anew; else correct "
        "the options ssl.*",
        classes=("SslAuthenticationException",),
    ),
    Rule(
        ErrorCategory.TRANSIENT,
        "the schema of a table changed while the job ran",
        "nothing; the job is planned anew. If it comes back, begin after that version in a new job_dir",
        conditions=("DELTA_METADATA_CHANGED", "DELTA_SCHEMA_CHANGE", "DELTA_STREAMING_METADATA_EVOLUTION"),
        sqlstates=("51024",),
    ),
    Rule(
        ErrorCategory.TRANSIENT,
        "a Python worker of Spark's did not start, or the machine is far too busy to start one",
        "look whether PYSPARK_PYTHON is the interpreter that has pyspark and pyarrow, on each machine",
        words=r"Python worker (?:to|failed to) connect back|Accept timed out",
    ),
    Rule(
        ErrorCategory.TRANSIENT,
        "memory ran out",
        "give executors more memory, or let a micro-batch take fewer records",
        sqlstates=("53", "82"),
        classes=("OutOfMemoryError", "MemoryError"),
        words=r"OutOfMemoryError|Java heap space|GC overhead limit exceeded",
    ),
    Rule(
        ErrorCategory.TRANSIENT,
        "a file, a folder or Spark's state could not be read or written",
        "look whether the disk is there, and whether the job may write. If Spark's state cannot be read and "
        "it comes back, go back to an older checkpoint (flinkish rewind)",
        conditions=("CANNOT_LOAD_STATE_STORE", "CANNOT_WRITE_STATE_STORE", "FAILED_READ_FILE"),
        sqlstates=("42K04", "58", "KD001"),
    ),
    Rule(
        ErrorCategory.TRANSIENT,
        "a function or a data source in Python failed within Spark",
        "see the log for the whole trace",
        conditions=(
            "FOREACH_BATCH_USER_FUNCTION_ERROR",
            "PYTHON_DATA_SOURCE_ERROR",
            "PYTHON_STREAMING_DATA_SOURCE_RUNTIME_ERROR",
        ),
    ),
)
#: Conditions that only say that an inner part failed; the inner causes are classified first, and if none of
#: them is known, the condition is no reason to end a job at once.
WRAPPERS = frozenset(
    _names(
        "FAILED_EXECUTE_UDF FOREACH_BATCH_USER_FUNCTION_ERROR INTERNAL_ERROR PYTHON_DATA_SOURCE_ERROR "
        "PYTHON_EXCEPTION PYTHON_STREAMING_DATA_SOURCE_RUNTIME_ERROR STREAM_FAILED TASK_WRITE_FAILED"
    )
)

#: Spark's exception for an exception in a Python worker.
_WORKER = "PythonException"
#: Classes of libraries that talk to databases, brokers and services.
_CLIENT = re.compile(
    "Operational|Interface|Time(?:d)?[Oo]ut|Connect|Client|H(?:TTP|ttp)|SSL|Network|Transport|Unavail|Socket|Request"
)
#: Hadoop's message about a folder that it cannot create, whatever the reason, and the most bytes of a name.
_CANNOT_MAKE, _MOST_BYTES = "Mkdirs failed to create", 255
_NAME_TOO_LONG = next(rule for rule in RULES if rule.category is ErrorCategory.VALUE)
_BY_CONDITION = {start: rule for rule in RULES for start in rule.conditions}
_BY_SQLSTATE = {start: rule for rule in RULES for start in rule.sqlstates}
_BY_CLASS = {name: rule for rule in RULES for name in rule.classes}
_BY_WORDS = tuple((re.compile(rule.words), rule) for rule in RULES if rule.words)


def find_rule_of_condition(condition: str, sqlstate: str = "") -> Rule | None:
    """Return the row of a condition, or else of its SQLSTATE; None if there is none."""
    return _find_longest(_BY_CONDITION, condition) or _find_longest(_BY_SQLSTATE, sqlstate)


def find_rule(chain: Chain) -> Rule | None:
    """Return the row of the innermost cause that has one, wrappers last; None if none has."""
    names = [cause.name for cause in chain.causes]
    of_a_worker = chain.causes[names.index(_WORKER) + 1 :] if _WORKER in names else ()
    for cause in chain.from_inside:
        by_its_words = _is_from_system(cause)
        if cause in of_a_worker and "." in cause.kind:
            # Only a client of a system is trusted, not a class of the user's.
            by_its_words = by_its_words and _CLIENT.search(cause.name) is not None
        rule = None if cause.is_wrapper or _is_worker_error(cause) else _rule_of_cause(cause, by_its_words)
        if rule is not None:
            return rule
    for cause in chain.from_inside:
        rule = find_rule_of_condition(cause.condition, cause.sqlstate) or _BY_CLASS.get(cause.name)
        if _is_worker_error(cause) and rule is not None:
            return rule
    return None


def _is_worker_error(cause: Cause) -> bool:
    # A PythonException wraps the exception of Python, which follows it in the text.
    return cause.condition.split(".", 1)[0] in WRAPPERS or cause.name == _WORKER


def _rule_of_cause(cause: Cause, by_its_words: bool) -> Rule | None:
    found = find_rule_of_condition(cause.condition, cause.sqlstate)
    if found is not None:
        return found
    names = cause.message.split("/") if _CANNOT_MAKE in cause.message else ()
    if any(len(name.encode("utf-8")) > _MOST_BYTES for name in names):
        return _NAME_TOO_LONG
    words = (rule for words, rule in _BY_WORDS if by_its_words and words.search(cause.message))
    # Words first: they are more specific than a class such as SocketTimeoutException.
    return next(words, None) or _BY_CLASS.get(cause.name)


def _is_from_system(cause: Cause) -> bool:
    """Return if a system wrote the message: a ValueError may quote any words of a record."""
    if not cause.kind or "." in cause.kind:
        return not cause.kind.startswith("__main__.")
    of_python = getattr(builtins, cause.kind, None)
    return not isinstance(of_python, type) or issubclass(of_python, OSError)


def _find_longest(rules: dict[str, Rule], text: str) -> Rule | None:
    fitting = [start for start in rules if text.startswith(start)]
    return rules[max(fitting, key=len)] if fitting else None
