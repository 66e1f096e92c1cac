"""The JDBC sink: rows of a checkpoint enter a database table in one transaction, exactly once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from flinkish_spark.config import require_positive
from flinkish_spark.errors import ConfigError
from flinkish_spark.formats import OnBadRecord
from flinkish_spark.sinks.base import Committer, SinkContext, SinkWriter
from flinkish_spark.sinks.buffer import BufferedSink, BufferWriter
from flinkish_spark.sinks.jdbc.checks import Checks, check_options
from flinkish_spark.sinks.jdbc.committer import JdbcCommitter
from flinkish_spark.sinks.jdbc.dialect import ColumnInfo, WriteMode
from flinkish_spark.sinks.jdbc.names import TableName
from flinkish_spark.sinks.jdbc.refused import DeadLetterTable, RecordCheck, RefusedPolicy
from flinkish_spark.sinks.jdbc.secrets import Secret, secret_of
from flinkish_spark.sinks.jdbc.settings import DIALECTS, JdbcSettings
from flinkish_spark.sinks.jdbc.url import JdbcUrl

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: Table in which a database keeps the newest checkpoint of each sink.
CONTROL_TABLE = "flinkish_checkpoints"
DEFAULT_TIMEOUT_MS = 300_000


@dataclass(frozen=True)
class JdbcSink(BufferedSink):
    """Write into a table of PostgreSQL, MySQL or SQLite, exactly once.

    The rows of a checkpoint wait in files of the job directory and enter the table in one transaction,
    together with the checkpoint's id in a control table: a repeated commit, by any process, changes nothing.
    Statements run in the driver, through a Python driver of the database.

    Parameters
    ----------
    url
        ``jdbc:postgresql://host:port/database``, ``jdbc:mysql://host:port/database`` or
        ``jdbc:sqlite:/absolute/path``. Options behind a question mark are the Python driver's
        (``?sslmode=verify-full``). No user and no password.
    table
        ``table`` or ``schema.table``, letter by letter; parts in double quotes may hold anything.
    key
        Columns by which there is one row; needed to upsert.
    mode
        ``"insert"`` adds every record as a row. ``"upsert"`` lets it take the place of the row with its key;
        of several in one checkpoint the last one counts.
    user, password
        The password as text, or better where it is found: ``EnvironmentSecret("NAME")``,
        ``FileSecret("/path")``. It is shown and stored nowhere.
    delete_when
        A BOOLEAN column: a record in which it is true deletes the row with its key. It is not stored.
    create_table
        Whether the table is created if it is missing, with columns that fit the stream.
    on_refused
        What becomes of a record that the database refuses at the commit, by a constraint, a length or a cast:
        ``OnBadRecord.FAIL`` stops the job before anything of the checkpoint is visible, and for what the
        record alone decides before the checkpoint is decided,
        ``OnBadRecord.DROP`` leaves it out and counts it, ``DeadLetterTable("name")`` writes it there with
        the reason, in the same transaction.
    control_table
        Where the newest checkpoint is kept; created if it is missing. One table serves all jobs.
    timeout_ms
        How long the transaction of a checkpoint may take before its connection is taken for lost.

    Examples
    --------
    >>> JdbcSink("jdbc:postgresql://db:5432/shop", "sales.totals", key=("user",), mode="upsert").key
    ('user',)
    """

    url: str
    table: str
    key: tuple[str, ...] = ()
    mode: str | WriteMode = WriteMode.INSERT
    user: str = ""
    password: str | Secret = field(default="", repr=False)
    delete_when: str = ""
    create_table: bool = False
    on_refused: RefusedPolicy = OnBadRecord.FAIL
    control_table: str = CONTROL_TABLE
    timeout_ms: int = DEFAULT_TIMEOUT_MS
    #: Of the table, by uid, as the preflight saw them: staging must go on while the database is away.
    _columns: dict[str, tuple[ColumnInfo, ...]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        given: object = self.key
        if isinstance(given, str):
            raise ConfigError(f"key={self.key!r} is text", what_to_do=f"give a tuple: key=({self.key!r},)")
        object.__setattr__(self, "key", tuple(self.key))
        object.__setattr__(self, "mode", WriteMode.of(self.mode))
        object.__setattr__(self, "password", secret_of(self.password))
        if not isinstance(self.on_refused, OnBadRecord | DeadLetterTable):
            raise ConfigError(
                f"on_refused={self.on_refused!r} is no policy of this sink",
                what_to_do='use OnBadRecord.FAIL, OnBadRecord.DROP or DeadLetterTable("name")',
            )
        require_positive("timeout_ms", self.timeout_ms)
        settings = self.settings  # checks URL and names
        check_options(self.key, settings.mode, self.delete_when)
        tables = settings.tables
        if len(set(tables)) < len(tables):
            raise ConfigError(
                "table, control_table and the dead-letter table are not all different",
                what_to_do="give each a name of its own",
            )
        for name in tables:
            settings.dialect.table(name)

    @property
    def settings(self) -> JdbcSettings:
        """All of it in checked types."""
        url = JdbcUrl.parse(self.url)
        if url.system not in DIALECTS:
            raise ConfigError(f"there is no dialect for {url.system}", what_to_do="use another database")
        return JdbcSettings(
            url,
            self.user,
            secret_of(self.password),
            self.timeout_ms,
            TableName.parse(self.table),
            self.key,
            WriteMode.of(self.mode),
            self.delete_when,
            self.create_table,
            TableName.parse(self.control_table),
            self.on_refused,
        )

    def preflight(self, spark: SparkSession, context: SinkContext) -> None:
        """Refuse fields, tables, keys and rights that do not fit, and a database that does not answer."""
        super().preflight(spark, context)
        self._columns[context.uid] = Checks(self.settings, context).run()

    def create_writer(self, spark: SparkSession, context: SinkContext) -> SinkWriter:
        """Return the staging half; under FAIL it refuses what no commit could write."""
        return BufferWriter(context, self._record_check(context))

    def _record_check(self, context: SinkContext) -> RecordCheck | None:
        # Other policies have a place for refused records at the commit.
        if self.on_refused is not OnBadRecord.FAIL:
            return None
        settings = self.settings
        target, columns = settings.target(context.schema), self._columns.get(context.uid, ())
        return RecordCheck(context.uid, settings.dialect, target, settings.delete_when, columns)

    def create_committer(self, spark: SparkSession, context: SinkContext) -> Committer:
        """Return the committing half; it connects when it has something to commit."""
        return JdbcCommitter(self.settings, context)
