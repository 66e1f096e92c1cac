"""A stand-in for Debezium's PostgreSQL connector: a table's changes as Debezium writes them, into Kafka.

It reads PostgreSQL's own logical decoding (`pgoutput`) of a table with REPLICA IDENTITY FULL and makes of it
the records that the connector's documentation describes: `op` c, u and d, values in their default encodings,
a tombstone behind each deletion, and an update of the key as a deletion and a creation. Records are sent
before the slot moves on, so a crash in between repeats some, as it does there.
"""

from __future__ import annotations

import base64
import datetime as dt
import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from kafka import KafkaProducer

_EPOCH = dt.date(1970, 1, 1)
_BOOL, _BYTEA, _JSON, _JSONB = 16, 17, 114, 3802
_WHOLE, _FLOATS = (20, 21, 23), (700, 701)
_DATE, _TIMESTAMP, _TIMESTAMPTZ, _NUMERIC = 1082, 1114, 1184, 1700


@dataclass(frozen=True)
class _Column:
    name: str
    type: int
    modifier: int


class _Bytes:
    """Reads a message from its begin."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def take(self, form: str) -> Any:
        (value,) = struct.unpack_from(f">{form}", self._data, self._at)
        self._at += struct.calcsize(f">{form}")
        return value

    def text(self) -> str:
        end = self._data.index(b"\0", self._at)
        found = self._data[self._at : end].decode()
        self._at = end + 1
        return found

    def raw(self, size: int) -> bytes:
        found = self._data[self._at : self._at + size]
        self._at += size
        return found


def _decimal(text: str, modifier: int) -> Any:
    number = Decimal(text)
    scale = (modifier - 4) & 0xFFFF if modifier >= 0 else max(0, -int(number.as_tuple().exponent))
    unscaled = int(number.scaleb(scale))
    size = (unscaled if unscaled >= 0 else -unscaled - 1).bit_length() // 8 + 1
    data = base64.b64encode(unscaled.to_bytes(size, "big", signed=True)).decode()
    return data if modifier >= 0 else {"scale": scale, "value": data}


def _encoded(column: _Column, text: str) -> Any:
    """Return a value as Debezium's JSON has it, with the connector's settings as they are by default."""
    match column.type:
        case kind if kind in _WHOLE:
            return int(text)
        case kind if kind in _FLOATS:
            return text if text in ("NaN", "Infinity", "-Infinity") else float(text)
        case 16:
            return text == "t"
        case 17:
            return base64.b64encode(bytes.fromhex(text.removeprefix("\\x"))).decode()
        case 1082:
            return (dt.date.fromisoformat(text) - _EPOCH).days
        case 1114:
            since = dt.datetime.fromisoformat(text) - dt.datetime(1970, 1, 1)
            return since // dt.timedelta(microseconds=1)
        case 1184:
            return dt.datetime.fromisoformat(text).astimezone(dt.UTC).isoformat().replace("+00:00", "Z")
        case 1700:
            return _decimal(text, column.modifier)
    return text


@dataclass
class PostgresChanges:
    """The changes of one table, from the moment in which this is made.

    Parameters
    ----------
    connection
        Of psycopg, in autocommit, to a server with `wal_level = logical`.
    table
        Its name. It gets REPLICA IDENTITY FULL.
    key
        Columns of its primary key.
    """

    connection: Any
    table: str
    key: Sequence[str]
    _columns: list[_Column] = field(default_factory=list)
    _transaction: dict[str, Any] = field(default_factory=dict)
    _newest: str = ""

    def __post_init__(self) -> None:
        self.slot = f"changes_of_{self.table}"
        run = self.connection.execute
        run("SET TIME ZONE 'UTC'")
        run(f'ALTER TABLE "{self.table}" REPLICA IDENTITY FULL')
        run(f'CREATE PUBLICATION "{self.slot}" FOR TABLE "{self.table}"')
        run("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", (self.slot,))

    def take(self) -> list[tuple[bytes, bytes | None]]:
        """Return key and value of what has been committed and was not confirmed."""
        found = self.connection.execute(
            "SELECT lsn::text, data FROM pg_logical_slot_peek_binary_changes(%s, NULL, NULL, "
            "'proto_version', '1', 'publication_names', %s)",
            (self.slot, self.slot),
        ).fetchall()
        self._newest = found[-1][0] if found else ""
        return [
            (_json(key), value and _json(value))
            for lsn, data in found
            for key, value in self._records(lsn, _Bytes(bytes(data)))
        ]

    def confirm(self) -> None:
        """Let what was taken not come again."""
        if self._newest:
            advance = "SELECT pg_replication_slot_advance(%s, %s::pg_lsn)"
            self.connection.execute(advance, (self.slot, self._newest))

    def send(self, servers: str, topic: str) -> int:
        """Send what has been committed since the last call; return how many records that were."""
        producer = KafkaProducer(bootstrap_servers=servers)
        # To partitions as Kafka's partitioner has it: by the key.
        sent = [producer.send(topic, key=key, value=value) for key, value in self.take()]
        for one in sent:
            one.get(timeout=30)
        producer.close()
        self.confirm()
        return len(sent)

    def drop(self) -> None:
        """Drop slot and publication."""
        self.connection.execute("SELECT pg_drop_replication_slot(%s)", (self.slot,))
        self.connection.execute(f'DROP PUBLICATION "{self.slot}"')

    # -- from messages to records ---------------------------------------------------------------
    def _records(self, lsn: str, message: _Bytes) -> Iterator[tuple[Any, Any]]:
        kind = message.raw(1)
        if kind == b"B":
            message.take("q")
            micros, xid = message.take("q"), message.take("i")
            # PostgreSQL counts from 2000.
            self._transaction = {"ts_ms": 946_684_800_000 + micros // 1_000, "txId": xid}
        elif kind == b"R":
            self._columns = list(_columns(message))
        elif kind == b"I":
            message.raw(5)
            yield from self._change(lsn, "c", None, self._row(message, None))
        elif kind == b"U":
            message.raw(5)
            before = self._row(message, None)
            message.raw(1)
            yield from self._change(lsn, "u", before, self._row(message, before))
        elif kind == b"D":
            message.raw(5)
            yield from self._change(lsn, "d", self._row(message, None), None)

    def _row(self, message: _Bytes, before: Mapping[str, Any] | None) -> dict[str, Any]:
        row: dict[str, Any] = {}
        message.take("h")
        for column in self._columns:
            match message.raw(1):
                case b"n":
                    row[column.name] = None
                case b"t":
                    row[column.name] = _encoded(column, message.raw(message.take("i")).decode())
                case b"u":
                    # A large value that has not changed is not sent again.
                    assert before is not None
                    row[column.name] = before[column.name]
        return row

    def _change(self, lsn: str, op: str, before: Any, after: Any) -> Iterator[tuple[Any, Any]]:
        old, new = (
            None if row is None else {name: row[name] for name in self.key} for row in (before, after)
        )
        if op == "u" and old != new:
            yield from self._change(lsn, "d", before, None)
            yield from self._change(lsn, "c", None, after)
            return
        source = {"connector": "postgresql", "schema": "public", "table": self.table, "lsn": lsn}
        payload = {"before": before, "after": after, "source": {**source, **self._transaction}, "op": op}
        payload["ts_ms"] = self._transaction["ts_ms"]
        yield (old if new is None else new), {"schema": None, "payload": payload}
        if op == "d":
            yield old, None


def _columns(message: _Bytes) -> Iterator[_Column]:
    message.take("i")
    message.text()
    message.text()
    message.raw(1)
    for _ in range(message.take("h")):
        message.raw(1)
        name = message.text()
        yield _Column(name, message.take("i"), message.take("i"))


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()
