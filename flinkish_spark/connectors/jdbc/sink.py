"""The JDBC sink."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Literal

from flinkish_spark.connectors.buffer import BufferedSink, BufferWriter
from flinkish_spark.connectors.jdbc.checks import Checks
from flinkish_spark.connectors.jdbc.committer import JdbcCommitter
from flinkish_spark.connectors.jdbc.dialect import ColumnInfo, WriteMode
from flinkish_spark.connectors.jdbc.names import JdbcUrl, TableName
from flinkish_spark.connectors.jdbc.settings import JdbcSettings, RecordCheck, RefusedPolicy
from flinkish_spark.contracts.dataset import Dataset
from flinkish_spark.contracts.sink import Committer, SinkContext, SinkWriter
from flinkish_spark.core.errors import ConfigError
from flinkish_spark.core.fields import Range, check_fields
from flinkish_spark.core.formats import OnBadRecord
from flinkish_spark.core.secrets import Secret, secret_of
from flinkish_spark.protocol.durations import Milliseconds

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


#: Table in which a database keeps the newest checkpoint of each sink.
CONTROL_TABLE = "flinkish_checkpoints"
DEFAULT_TIMEOUT_MS = 300_000


@dataclass(frozen=True)
class JdbcSink(BufferedSink):
    """Writes into a table of PostgreSQL, MySQL or SQLite, exactly once.

    The rows of a checkpoint are buffered in files of the job directory and then written in one transaction,
    together with the checkpoint's id in a control table: a repeated commit, by any process, changes nothing.
    Statements run on Spark's driver, through a Python driver of the database.

    Parameters
    ----------
    url
        ``jdbc:postgresql://host:port/database``, ``jdbc:mysql://host:port/database`` or
        ``jdbc:sqlite:/absolute/path``. Options after a question mark are the Python driver's
        (``?sslmode=verify-full``). No user and no password.
    table
        ``table`` or ``schema.table``, case-sensitive; parts in double quotes may contain any character.
    key
        Columns that identify a row; required for upserts.
    mode
        ``"insert"`` adds every record as a row. With ``"upsert"`` a record replaces the row with its key; of
        several records in one checkpoint the last one is written.
    user, password
        The password as text, or better a reference to it: ``"env:NAME"``, ``"file:/path"``,
        ``EnvironmentSecret("NAME")``, ``FileSecret("/path")``. It is never shown or stored.
    delete_when
        A BOOLEAN column: a record in which it is true deletes the row with its key. The column is not
        written.
    row_kind
        Instead of `delete_when`, for changelogs: the STRING column with row kinds, ``"_row_kind"``. -D and -U
        delete the row with their key, +I and +U replace it; any other value is refused.
    create_table
        If the table is created when it is missing, with columns that fit the stream.
    on_refused
        What happens to a record that the database refuses at the commit, by a constraint, a length or a cast.
        ``OnBadRecord.FAIL`` stops the job, and nothing of the checkpoint becomes visible; a record that no
        table could store stops it before the checkpoint is decided. ``OnBadRecord.DROP`` drops and counts the
        record. ``DeadLetterTable("name")`` writes it to that table with the reason, in the same transaction.
    control_table
        The table with the newest checkpoint; created if it is missing. One table serves all jobs.
    timeout_ms
        How long the database may be silent before the connection is considered lost. Silent means that it
        sends no answer and does not report that it executes a statement. Transactions have no time limit.

    Examples
    --------
    >>> JdbcSink("jdbc:postgresql://db:5432/shop", "sales.totals", key=("user",), mode="upsert").key
    ('user',)
    """

    url: str
    table: str
    key: tuple[str, ...] = ()
    mode: Literal["insert", "upsert"] | WriteMode = WriteMode.INSERT
    user: str = ""
    password: str | Secret = field(default="", repr=False)
    delete_when: str = ""
    create_table: bool = False
    on_refused: RefusedPolicy = OnBadRecord.FAIL
    control_table: str = CONTROL_TABLE
    timeout_ms: Annotated[Milliseconds, Range(1)] = DEFAULT_TIMEOUT_MS
    row_kind: str = ""
    #: The table's columns by uid, found by the preflight: staging must go on while the database is
    #: unavailable.
    _columns: dict[str, tuple[ColumnInfo, ...]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        check_fields(self, key='name the columns in a tuple: key=("id",)', mode="use insert or upsert")
        object.__setattr__(self, "mode", WriteMode(self.mode))
        object.__setattr__(self, "password", secret_of(self.password))
        settings = self.settings  # checks URL and names
        key, deletes_by, tables = self.key, settings.deletes_by, settings.tables
        if self.row_kind and self.delete_when:
            raise ConfigError("row_kind and delete_when are both set", what_to_do="leave one of them out")
        if self.mode is WriteMode.UPSERT and not key:
            raise ConfigError("mode='upsert' needs a key", what_to_do='name the columns, as key=("id",)')
        if deletes_by and self.mode is WriteMode.INSERT:
            what = f"deleting by '{deletes_by}' needs mode='upsert', since rows are deleted by their key"
            raise ConfigError(what, what_to_do="set the mode")
        if deletes_by in key and deletes_by:
            what = f"the column '{deletes_by}', by which rows are deleted, is a column of the key"
            raise ConfigError(what, what_to_do="use a column of its own, which is not stored")
        if len(set(key)) < len(key):
            raise ConfigError("the key names a column twice", what_to_do="name each once")
        if len(set(tables)) < len(tables):
            what = "table, control_table and the dead-letter table are not all different"
            raise ConfigError(what, what_to_do="give each a name of its own")
        for name in tables:
            settings.dialect.table(name)

    @property
    def settings(self) -> JdbcSettings:
        """The validated settings."""
        return JdbcSettings(self)

    def datasets(self) -> tuple[Dataset, ...]:
        """Return the table as a dataset, with the database's default schema if none is named."""
        url, table = JdbcUrl.parse(self.url), TableName.parse(self.table)
        if url.system == "sqlite":
            return (Dataset("sqlite", f"{url.database}/{'.'.join(table.parts)}"),)
        parts = table.parts if url.system == "mysql" or len(table.parts) > 1 else ("public", *table.parts)
        system = {"postgresql": "postgres"}.get(url.system, url.system)
        host = f"[{url.host}]" if ":" in url.host else url.host
        # In MySQL a schema is a database.
        inside = parts if url.system == "mysql" and len(parts) > 1 else (url.database, *parts)
        return (Dataset(f"{system}://{host}:{url.port}", ".".join(inside)),)

    def why_needs_session(self) -> str:
        """Return that it is not needed."""
        return ""

    def preflight(self, spark: SparkSession, context: SinkContext) -> None:
        """Check fields, table, key and rights, and that the database answers."""
        super().preflight(spark, context)
        self._columns[context.uid] = Checks(self.settings, context).run()

    def create_writer(self, spark: SparkSession, context: SinkContext) -> SinkWriter:
        """Return the writer; with OnBadRecord.FAIL it refuses records that no commit could write."""
        # With other policies the commit handles refused records.
        if self.on_refused is not OnBadRecord.FAIL:
            return BufferWriter(context)
        settings = self.settings
        target, columns = settings.target(context.schema), self._columns.get(context.uid, ())
        check = RecordCheck(context.uid, settings.dialect, target, settings.deletes_by, columns)
        return BufferWriter(context, check)

    def create_committer(self, spark: SparkSession, context: SinkContext) -> Committer:
        """Return the committer; it connects at the first commit."""
        return JdbcCommitter(self.settings, context)
