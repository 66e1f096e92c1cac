"""Where a password comes from. Only the place is kept; the password is read for each connection."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from flinkish_spark.errors import EnvironmentFault


class SecretMissing(EnvironmentFault):
    """A secret is not where it was said to be."""


@dataclass(frozen=True, slots=True)
class EnvironmentSecret:
    """A secret in an environment variable of the driver.

    Parameters
    ----------
    variable
        Its name.
    """

    variable: str

    def read(self) -> str:
        """Return the secret; raise SecretMissing if the variable is not set."""
        value = os.environ.get(self.variable)
        if value is None:
            raise SecretMissing(
                f"the environment variable {self.variable} is not set",
                why="it should hold a password",
                what_to_do="set it where the driver starts",
            )
        return value


@dataclass(frozen=True, slots=True)
class FileSecret:
    """A secret in a file that the driver can read; a line break at its end is left out.

    Parameters
    ----------
    path
        Absolute. Read for each connection, so the file may be replaced while the job runs.
    """

    path: str

    def read(self) -> str:
        """Return the secret; raise SecretMissing if the file cannot be read."""
        try:
            return Path(self.path).read_text(encoding="utf-8").rstrip("\r\n")
        except OSError as error:
            raise SecretMissing(
                f"the file {self.path} cannot be read",
                why=f"{error.strerror}; it should hold a password",
                what_to_do="put it there, readable by the driver's user",
            ) from error


@dataclass(frozen=True, slots=True)
class PlainSecret:
    """A secret that the program has; shown nowhere."""

    value: str = field(repr=False)

    def read(self) -> str:
        """Return the secret."""
        return self.value


Secret = EnvironmentSecret | FileSecret | PlainSecret


def secret_of(value: str | Secret) -> Secret:
    """Return a secret for what a user gave."""
    return PlainSecret(value) if isinstance(value, str) else value


def scrubbed(text: str, secret: str) -> str:
    """Return a text of somebody else's without the secret in it."""
    return text.replace(secret, "***") if secret else text
