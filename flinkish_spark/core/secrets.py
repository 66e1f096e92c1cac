"""Places of secrets, which are read for each connection; and texts without secrets."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from flinkish_spark.core.errors import ConfigError, EnvironmentFault
from flinkish_spark.core.fields import check_fields
from flinkish_spark.protocol.durations import PathText

_BY_NAME = re.compile(r"env:([A-Za-z_][A-Za-z0-9_]*)")
_BY_FILE = re.compile(r"file:(?://)?(/.+)")


@dataclass(frozen=True, slots=True)
class EnvironmentSecret:
    """A secret in an environment variable of the driver; as text ``env:NAME``.

    Parameters
    ----------
    variable
        Its name.
    """

    variable: str

    def read(self) -> str:
        """Return the secret; raise EnvironmentFault if the variable is not set."""
        value = os.environ.get(self.variable)
        if value is None:
            raise EnvironmentFault(
                f"the environment variable {self.variable} is not set",
                why="it should hold a secret",
                what_to_do="set it where the driver starts",
            )
        return value


@dataclass(frozen=True, slots=True)
class FileSecret:
    """A secret in a file that the driver can read, without a line break at its end; as text ``file:/path``.

    Parameters
    ----------
    path
        Absolute. Read for each connection, so the file may be replaced while the job runs.
    """

    path: PathText

    def __post_init__(self) -> None:
        check_fields(self)

    def read(self) -> str:
        """Return the secret; raise EnvironmentFault if the file cannot be read."""
        try:
            return Path(self.path).read_text(encoding="utf-8").rstrip("\r\n")
        except OSError as error:
            raise EnvironmentFault(
                f"the file {self.path} cannot be read",
                why=f"{error.strerror}; it should hold a secret",
                what_to_do="put it there, readable by the driver's user",
            ) from error


@dataclass(frozen=True, slots=True)
class PlainSecret:
    """A secret that the program has; shown nowhere."""

    value: str = field(repr=False)

    def read(self) -> str:
        return self.value


Secret = EnvironmentSecret | FileSecret | PlainSecret


def secret_of(value: str | Secret, name: str = "password") -> Secret:
    """Return the secret that a user gave, or that ``env:NAME`` or ``file:/path`` points to."""
    if not isinstance(value, str):
        return value
    if (by_name := _BY_NAME.fullmatch(value)) is not None:
        return EnvironmentSecret(by_name[1])
    if (by_file := _BY_FILE.fullmatch(value)) is not None:
        return FileSecret(by_file[1])
    if value.startswith(("env:", "file:")):
        raise ConfigError(
            f"the secret {name} names no place",
            why="a text that begins with env: or file: says where the secret is",
            what_to_do="write env:NAME, or file: with an absolute path",
        )
    return PlainSecret(value)


def place_of(secret: EnvironmentSecret | FileSecret) -> str:
    return f"env:{secret.variable}" if isinstance(secret, EnvironmentSecret) else f"file:{secret.path}"


_HIDDEN = "***"
#: Values of such names are hidden, as in messages about Kafka's options.
_SHOWN_SECRET = re.compile(
    r"""(?ix)
    ([\w.\-]*(?:passw|passphrase|jaas|secret|token|credential|(?:access|api|account|private|shared)[._-]?key
      |x-amz-signature|\bsig)
     [\w.\-]*["']?\s*[=:]\s*)
    ("[^"\n]*"|'[^'\n]*'|[^\s,;&)}\]]+)
    """
)
_BEARER = re.compile(r"(?i)\b(bearer|basic)\s+[\w.~+/=\-]{8,}")
_IN_URL = re.compile(r"(?<=://)[^\s/@:]*:[^\s/@]+@")


def hide_secrets(text: str) -> str:
    text = _SHOWN_SECRET.sub(rf"\g<1>{_HIDDEN}", text)
    return _IN_URL.sub(f"{_HIDDEN}@", _BEARER.sub(rf"\g<1> {_HIDDEN}", text))
