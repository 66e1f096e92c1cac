"""A Java properties file with settings of Kafka's clients, divided into what sources and sinks take."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import javaproperties

from flinkish_spark.connectors.kafka.client.connection import is_connection_option
from flinkish_spark.connectors.kafka.client.settings import (
    HARMLESS_OPTIONS,
    PRODUCER_SETTINGS,
    READER_OPTIONS,
)
from flinkish_spark.core.errors import ConfigError

LOG = logging.getLogger(__name__)
_SERVERS = "bootstrap.servers"
#: The source reads committed records only.
_FOR_READERS = (READER_OPTIONS | HARMLESS_OPTIONS) - {"isolation.level"}


def parse_properties(text: str, whose: str) -> dict[str, str]:
    """Return the names and values of a properties file, read as Java reads them."""
    try:
        found: dict[str, str] = javaproperties.loads(text)
    except ValueError:
        # The library's error quotes the text, which may be a secret.
        what = f"{whose} is no properties file"
        raise ConfigError(
            what, why=r"a \u in it has no four hexadecimal digits", what_to_do="correct it"
        ) from None
    return found


@dataclass(frozen=True, slots=True, repr=False)
class KafkaProperties:
    r"""The settings of Kafka's clients that a ``.properties`` file holds, as sources and sinks take them.

    Comments, continued lines and escapes are those of Java; a secret may be ``env:NAME`` or ``file:/path``.
    Names that nothing here takes, such as ``group.id`` and ``key.serializer``, are in `others`, and the log
    names them: they are parameters of a source or sink, or have no meaning.

    Parameters
    ----------
    settings
        All settings, by Kafka's names.

    Examples
    --------
    >>> found = KafkaProperties({"security.protocol": "SSL", "linger.ms": "5", "group.id": "a"})
    >>> found.options, found.producer, found.others
    ({'security.protocol': 'SSL'}, {'linger.ms': '5'}, ('group.id',))
    """

    settings: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Self:
        """Read a file; raise ConfigError if it cannot be read."""
        try:
            text = Path(path).read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            what_to_do = "give the path of a properties file that this process can read"
            raise ConfigError(f"{path} cannot be read", why=why or "", what_to_do=what_to_do) from None
        found = cls(parse_properties(text, str(path)))
        if found.others:
            LOG.warning("left out of %s, since nothing here takes it: %s", path, ", ".join(found.others))
        return found

    @property
    def bootstrap_servers(self) -> str:
        """Where Kafka is: for the parameter of that name; empty if the file does not say."""
        return self.settings.get(_SERVERS, "")

    @property
    def options(self) -> dict[str, str]:
        """Connection and security: for `options` of KafkaSource, KafkaSink and doctor."""
        return {name: value for name, value in self.settings.items() if is_connection_option(name)}

    @property
    def reader_options(self) -> dict[str, str]:
        """Settings of consumers: for `reader_options` of a KafkaSource."""
        return {f"kafka.{name}": value for name, value in self.settings.items() if name in _FOR_READERS}

    @property
    def producer(self) -> dict[str, str]:
        """Settings of producers: for `producer` of a KafkaSink."""
        return {name: value for name, value in self.settings.items() if name in PRODUCER_SETTINGS}

    @property
    def others(self) -> tuple[str, ...]:
        """Names that nothing here takes."""
        known = PRODUCER_SETTINGS | _FOR_READERS | {_SERVERS}
        return tuple(name for name in self.settings if name not in known and not is_connection_option(name))
