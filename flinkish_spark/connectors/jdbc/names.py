"""JDBC URLs and names of tables."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, unquote

from flinkish_spark.core.errors import ConfigError

_SERVER = re.compile(
    r"jdbc:(postgresql|mysql|mariadb)://(\[[0-9A-Fa-f:.]+\]|[^:/?#@\[\]]+)(?::(\d+))?/([^/?#]+)(?:\?(.*))?"
)
_SQLITE = re.compile(r"jdbc:sqlite:(/[^?#]+)")
_FILE = "jdbc:sqlite:"
_FORMS = (
    "it has to be jdbc:postgresql://host:port/database, jdbc:mysql://host:port/database or "
    "jdbc:sqlite:/absolute/path; other letters of a database's name are written as %23 for #, and so on"
)
#: Host and database of a URL that may be wrong, without text before an @ or after a ?.
_PLACE = re.compile(r"jdbc:(?:postgresql|mysql|mariadb)://([^/@]*)(?:/([^?@]*))?(?:\?[^@]*)?$")
_PORTS = {"postgresql": 5432, "mysql": 3306}
#: Options with a user or a secret, which a URL must not have: it is shown in messages.
_CREDENTIALS = re.compile(r"user(name)?|.*(password|passwd|passphrase|secret|token).*", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class JdbcUrl:
    system: str
    #: For SQLite an absolute path.
    database: str
    #: Host and port of the server; empty and 0 for SQLite.
    host: str = ""
    port: int = 0
    #: Options for the driver, after the question mark.
    options: Mapping[str, str] = field(default_factory=dict, repr=False)

    @classmethod
    def parse(cls, text: str) -> JdbcUrl:
        server, file = _SERVER.fullmatch(text), _SQLITE.fullmatch(text)
        options = dict(parse_qsl((server and server[5]) or "", keep_blank_values=True))
        has_login = server is None and "@" in text and not text.startswith(_FILE)
        if has_login or any(map(_CREDENTIALS.fullmatch, options)):
            raise _url_refused("the JDBC URL holds credentials", "user and password are settings")
        if server is not None:
            system, host, port, database, _ = server.groups()
            system = "mysql" if system == "mariadb" else system
            number = int(port) if port else _PORTS[system]
            return cls(system, unquote(database), host.strip("[]"), number, options)
        if file is not None:
            return cls("sqlite", file.group(1))
        if text.startswith(_FILE):
            raise _path_refused(text.removeprefix(_FILE))
        raise _url_refused(_why_unreadable(text), _FORMS)

    def __str__(self) -> str:
        if self.system == "sqlite":
            return f"jdbc:sqlite:{self.database}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"jdbc:{self.system}://{host}:{self.port}/{self.database}"


def _why_unreadable(text: str) -> str:
    """Return what is wrong with a server's URL, without text that could be a secret."""
    found = _PLACE.match(text)
    if found is None:
        return "the JDBC URL cannot be read"
    host, database = found.groups()
    for part, value, reserved in (("host", host, "#?[]"), ("database", database or "", "/#")):
        letters = ", ".join(f"'{letter}'" for letter in reserved if letter in value)
        if letters:
            return f"the JDBC URL cannot be read: the name of its {part} has {letters}"
    return "the JDBC URL cannot be read" + ("" if database else ": it names no database")


def _path_refused(path: str) -> ConfigError:
    letters = [f"'{letter}'" for letter in "?#" if letter in path]
    if letters:
        what = f"the JDBC URL cannot be read: its path has {' and '.join(letters)}"
        return ConfigError(what, what_to_do="rename the file or its folder, or reach it through a link")
    what = "the JDBC URL cannot be read: its path is not absolute"
    return ConfigError(what, what_to_do="write jdbc:sqlite:/absolute/path")


def _url_refused(what: str, why: str) -> ConfigError:
    return ConfigError(what, why=why, what_to_do="give user=... and password=... beside a plain URL")


_PART = r'(?:"((?:[^"]|"")+)"|([^".]+))'
_TABLE = re.compile(rf"(?:{_PART}\.)?{_PART}")


@dataclass(frozen=True, slots=True)
class TableName:
    """A table's name with its schemas; always quoted in SQL, so it is case-sensitive."""

    #: From the outermost schema to the table.
    parts: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> TableName:
        """Read ``table`` or ``schema.table``; a part in double quotes may hold anything."""
        found = _TABLE.fullmatch(text)
        if found is None:
            what = f"{text!r} is not the name of a table: table, or schema.table"
            to_do = 'write it like sales.orders or sales."a.b"; a quote within quotes is doubled'
            raise ConfigError(what, what_to_do=to_do)
        return cls(tuple(part.replace('""', '"') for part in found.groups() if part is not None))

    def __str__(self) -> str:
        return ".".join(
            '"' + part.replace('"', '""') + '"' if set('".') & set(part) else part for part in self.parts
        )
