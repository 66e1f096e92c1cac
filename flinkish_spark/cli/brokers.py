"""How commands reach Kafka: options as Kafka's own tools have them, and their properties file."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import click

from flinkish_spark.cli.exits import complain

if TYPE_CHECKING:
    from flinkish_spark.kafka import KafkaConnection

F = TypeVar("F", bound=Callable[..., Any])
#: A name ends at the first of these that is not escaped.
_NAME = re.compile(r"((?:\\.|[^\\=:\s])*)\s*[=:]?\s*(.*)", re.DOTALL)
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|.)", re.DOTALL)
_ESCAPED = {"n": "\n", "r": "\r", "t": "\t", "f": "\f"}


def brokers_options(command: F) -> F:
    """Give a command `--bootstrap-servers` and `--command-config`, as `servers` and `config`."""
    servers = click.option(
        "--bootstrap-servers",
        "servers",
        required=True,
        metavar="HOST:PORT,...",
        help="Where Kafka is; the job directory does not know it.",
    )
    config = click.option(
        "--command-config",
        "config",
        type=click.File("r", encoding="utf-8"),
        metavar="FILE",
        help="Properties with the security settings, as for Kafka's own tools.",
    )
    return servers(config(command))


def connection_of(servers: str, config: Any) -> KafkaConnection:
    """Return how the brokers are reached; end with USAGE if the options cannot be used.

    Settings of the file that say nothing about the connection are named on stderr and left out.
    """
    # Here and not above: most commands talk to no broker.
    from flinkish_spark.errors import ConfigError
    from flinkish_spark.kafka import KafkaConnection
    from flinkish_spark.kafka.options import is_connection_option

    try:
        given = dict(parse_properties(config.read())) if config is not None else {}
    except (UnicodeDecodeError, OSError) as error:
        raise click.BadParameter(f"the file of --command-config cannot be read: {error}.") from None
    given.pop("bootstrap.servers", None)
    used = {name: value for name, value in given.items() if is_connection_option(name)}
    if len(used) < len(given):
        complain(f"left out of --command-config: {', '.join(sorted(given.keys() - used.keys()))}")
    try:
        return KafkaConnection(servers, used)
    except ConfigError as error:
        raise click.UsageError(str(error)) from None


def parse_properties(text: str) -> Iterator[tuple[str, str]]:
    r"""Yield names and values of a Java properties file.

    Examples
    --------
    >>> dict(parse_properties("# who\nsecurity.protocol = SASL_SSL\nssl.protocol:TLSv1.3"))
    {'security.protocol': 'SASL_SSL', 'ssl.protocol': 'TLSv1.3'}
    """
    for line in _logical_lines(text):
        match = _NAME.fullmatch(line)
        assert match is not None
        yield _unescaped(match[1]), _unescaped(match[2])


def _logical_lines(text: str) -> Iterator[str]:
    """Yield lines without comments, joined where a backslash ends one."""
    begun = ""
    # Not splitlines: Java ends lines at these only.
    for raw in re.split(r"\r\n|\n|\r", text):
        line = raw.lstrip(" \t\f")
        if not begun and (not line or line[0] in "#!"):
            continue
        backslashes = len(line) - len(line.rstrip("\\"))
        if backslashes % 2:
            begun += line[:-1]
            continue
        yield begun + line
        begun = ""
    if begun:
        yield begun


def _unescaped(text: str) -> str:
    def letter(match: re.Match[str]) -> str:
        code = match[1]
        return chr(int(code[1:], 16)) if len(code) > 1 else _ESCAPED.get(code, code)

    return _ESCAPE.sub(letter, text)
