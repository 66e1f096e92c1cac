"""Kills of a job that keeps copies of a table: each version is the table as it was, whatever dies.

The table lives here, in memory. Its changes are written as each connector writes them, to a topic for each,
and all are read by one job, so that every kill hits all forms of changes and both kinds of copies.
"""

from __future__ import annotations

import base64
import io
import json
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import fastavro
import pytest
from kafka import KafkaProducer

from tests.crash.changelog_app import FORMS, Copy
from tests.support.jobs import delta_versions, read_committed
from tests.support.services import ROOT

PARTITIONS = 2
Row = tuple[int, str, Decimal]
#: The rows of one partition's keys.
Rows = frozenset[Row]
_CITIES = ("Bern", "Kiel", "Lodz")
_NUMBERS = 25

_ROW = {
    "type": "record",
    "name": "Value",
    "fields": [
        {"name": "id", "type": "int"},
        {"name": "city", "type": "string"},
        {
            "name": "balance",
            "type": {"type": "bytes", "logicalType": "decimal", "precision": 12, "scale": 2},
        },
    ],
}
ENVELOPE = {
    "type": "record",
    "name": "Envelope",
    "namespace": "bank.public.accounts",
    "fields": [
        {"name": "before", "type": ["null", _ROW], "default": None},
        {"name": "after", "type": ["null", "Value"], "default": None},
        {"name": "op", "type": "string"},
        {"name": "ts_ms", "type": ["null", "long"], "default": None},
    ],
}


def _fields(row: Row | None, balance: Any) -> dict[str, Any] | None:
    return None if row is None else {"id": row[0], "city": row[1], "balance": balance(row[2])}


def _unscaled(number: Decimal) -> str:
    whole = int(number.scaleb(2))
    return base64.b64encode(whole.to_bytes(8, "big", signed=True)).decode()


class Table:
    """The table that is true: how it changes, how each connector says so, and what it was at each moment.

    Parameters
    ----------
    schema_id
        Under which a registry has `ENVELOPE`.
    """

    def __init__(self, seed: int, schema_id: int) -> None:
        self._chance, self._schema_id = random.Random(seed), schema_id
        self.rows: dict[int, Row] = {}
        #: What the rows of each partition's keys were, one behind the other.
        self.states: list[list[Rows]] = [[frozenset()] for _ in range(PARTITIONS)]
        #: What a topic by key has to have: a value for each row that is new, a tombstone for each that goes.
        self.said: dict[str, Counter[tuple[int, Row | None]]] = {form: Counter() for form in FORMS}

    def change(self, count: int) -> dict[str, list[tuple[int, bytes, bytes | None]]]:
        """Change rows; return by form the records about it, each with the number of its partition."""
        found: dict[str, list[tuple[int, bytes, bytes | None]]] = {form: [] for form in FORMS}
        for _ in range(count):
            for old, new in self._steps():
                for form in FORMS:
                    records = list(self._records(form, old, new))
                    found[form] += [(self._place(old or new), key, value) for key, value in records]
                self._note(old, new)
        return found

    def _steps(self) -> list[tuple[Row | None, Row | None]]:
        """Return what was and what is; an update of the key stays in its partition."""
        number = self._chance.randrange(_NUMBERS) + 100 * self._chance.randrange(2)
        amount = Decimal(self._chance.randrange(-99_999, 99_999)).scaleb(-2)
        city, old = self._chance.choice(_CITIES), self.rows.get(number)
        if old is None:
            return [(None, (number, city, amount))]
        match self._chance.randrange(5):
            case 0:
                return [(old, None)]
            case 1:
                other = number + 100 if number < 100 else number - 100
                return [] if other in self.rows else [(old, (other, *old[1:]))]
        return [(old, (number, city, old[2] + amount))]

    @staticmethod
    def _place(row: Row | None) -> int:
        assert row is not None
        return row[0] % PARTITIONS

    def _note(self, old: Row | None, new: Row | None) -> None:
        states = self.states[self._place(old or new)]
        if old is not None:
            del self.rows[old[0]]
            states.append(states[-1] - {old})
        if new is not None:
            self.rows[new[0]] = new
            states.append(states[-1] | {new})

    def _records(self, form: str, old: Row | None, new: Row | None) -> Iterable[tuple[bytes, bytes | None]]:
        key = json.dumps({"id": (new or old or (0,))[0]}).encode()
        moved = old is not None and new is not None and old[0] != new[0]
        if form in ("debezium", "debezium-avro", "compacted") and moved:
            yield from self._records(form, old, None)
            yield from self._records(form, None, new)
            return
        said = self.said[form]
        if old is not None and not (form == "compacted" and new is not None):
            said[old[0], None] += 1
        if new is not None:
            said[new[0], new] += 1
        match form:
            case "debezium":
                yield key, json.dumps(self._envelope(old, new, _unscaled)).encode()
            case "debezium-avro":
                made = io.BytesIO(bytes([0]) + self._schema_id.to_bytes(4, "big"))
                made.seek(5)
                fastavro.schemaless_writer(made, _PARSED, self._envelope(old, new, lambda number: number))
                yield key, made.getvalue()
            case "canal":
                yield key, self._of_canal(old, new)
            case "maxwell":
                yield key, self._of_maxwell(old, new)
            case "compacted":
                yield key, None if new is None else json.dumps(_fields(new, float)).encode()
        if form.startswith("debezium") and new is None:
            yield key, None

    @staticmethod
    def _envelope(old: Row | None, new: Row | None, balance: Any) -> dict[str, Any]:
        op = "c" if old is None else "d" if new is None else "u"
        return {"before": _fields(old, balance), "after": _fields(new, balance), "op": op, "ts_ms": 7}

    @staticmethod
    def _of_canal(old: Row | None, new: Row | None) -> bytes:
        before, after = ({n: str(v) for n, v in (_fields(one, str) or {}).items()} for one in (old, new))
        kind = "INSERT" if old is None else "DELETE" if new is None else "UPDATE"
        changed = [{n: v for n, v in before.items() if v != after[n]}] if kind == "UPDATE" else None
        record = {"data": [after or before], "old": changed, "type": kind, "pkNames": ["id"]}
        return json.dumps({**record, "database": "bank", "table": "accounts", "isDdl": False}).encode()

    @staticmethod
    def _of_maxwell(old: Row | None, new: Row | None) -> bytes:
        before, after = (_fields(one, float) or {} for one in (old, new))
        kind = "insert" if old is None else "delete" if new is None else "update"
        changed = {"old": {n: v for n, v in before.items() if v != after[n]}} if kind == "update" else {}
        record = {"database": "bank", "table": "accounts", "type": kind, "data": after or before, **changed}
        return json.dumps(record).encode()


_PARSED = fastavro.parse_schema(ENVELOPE)


def send(servers: str, topics: Mapping[str, str], records: Mapping[str, Sequence[Any]]) -> None:
    producer = KafkaProducer(bootstrap_servers=servers, linger_ms=5)
    sent = [
        producer.send(topics[form], key=key, value=value, partition=place)
        for form, found in records.items()
        for place, key, value in found
    ]
    for one in sent:
        one.get(timeout=30)
    producer.close()


class Follower:
    """Judges one copy after the other: each must be the table as it was, and none older than the last."""

    def __init__(self, table: Table) -> None:
        self._states, self._at = table.states, [0] * PARTITIONS

    def check(self, rows: Iterable[Row], what: object) -> None:
        known = list(rows)
        for partition, states in enumerate(self._states):
            mine = [row for row in known if row[0] % PARTITIONS == partition]
            assert len(mine) == len(set(mine)), what
            assert frozenset(mine) in states[self._at[partition] :], what
            self._at[partition] = states.index(frozenset(mine), self._at[partition])


def by_batch(records: Iterable[Any]) -> list[list[Any]]:
    """Return the records of each micro-batch, in the order of these."""
    found: dict[tuple[int, ...], list[Any]] = {}
    for record in records:
        text = dict(record.headers)["flinkish-batch"].decode()
        found.setdefault(tuple(map(int, text.split("/"))), []).append(record)
    return [found[batch] for batch in sorted(found)]


def row_of(value: bytes | None) -> Row | None:
    if value is None:
        return None
    found = json.loads(value, parse_float=Decimal)
    return found["id"], found["city"], Decimal(found["balance"])


KILLS = (
    *("staged-file:after:2", "decision:before:1", "decision:after:1", "sink-commit:after:3"),
    *("sink-commit:after:8", "receipt:before:1"),
)


@pytest.mark.nightly(by_day="tests/integration/spark/test_changelogs.py")
@pytest.mark.timeout(2_400)
def test_copies_of_a_table_through_kills(broker: Any, topic: Any, registry: Any, tmp_path: Path) -> None:
    servers = broker.bootstrap_servers
    copies = [Copy(form, topic(PARTITIONS), topic(PARTITIONS)) for form in FORMS]
    changes = {copy.form: copy.changes for copy in copies}
    number = registry.register(f"{changes['debezium-avro']}-value", json.dumps(ENVELOPE))
    table = Table(30, number)
    for kill in (*KILLS, ""):
        send(servers, changes, table.change(40))
        told = copies if kill else [one._replace(wanted=table.said[one.form].total()) for one in copies]
        words = [str(tmp_path), servers, registry.url, json.dumps(told), kill]
        command = [sys.executable, "-m", "tests.crash.changelog_app", *words]
        ended = subprocess.run(command, cwd=ROOT, timeout=400, start_new_session=True, check=False)
        assert ended.returncode == (-9 if kill else 0), kill

    for copy in copies:
        of_table, versions = Follower(table), 0
        for versions, rows in enumerate(delta_versions(tmp_path / copy.form)):
            of_table.check((tuple(row.values()) for row in rows), (copy.form, "version", versions))
        assert set(map(tuple, (row.values() for row in rows))) == set(table.rows.values())
        assert versions > 2

        records, of_topic, now = read_committed(servers, copy.rows), Follower(table), dict[int, Row]()
        said = Counter((json.loads(one.key)["id"], row_of(one.value)) for one in records)
        assert said == table.said[copy.form], copy.form
        for place, batch in enumerate(by_batch(records)):
            for record in batch:
                row = row_of(record.value)
                now.pop(json.loads(record.key)["id"], None)
                now |= {} if row is None else {row[0]: row}
            of_topic.check(now.values(), (copy.form, "micro-batch", place))
        assert now == table.rows

    by_city: dict[str, list[Decimal]] = {}
    for _, city, balance in table.rows.values():
        by_city.setdefault(city, []).append(balance)
    wanted_totals = {(city, len(all_), sum(all_), max(all_)) for city, all_ in by_city.items()}
    *_, totals = delta_versions(tmp_path / "totals")
    assert {tuple(row.values()) for row in totals} == wanted_totals
