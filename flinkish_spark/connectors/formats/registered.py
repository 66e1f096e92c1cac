"""Formats with a schema that a registry may hold: Avro, Protobuf and JSON Schema.

A sink's schema is registered before the job starts, and looked up again at each start; so no task has to ask
for the schema id that its records begin with.
"""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from pyspark.sql import types as T

from flinkish_spark.connectors.formats.reader import OnSchemaChange
from flinkish_spark.connectors.formats.registry import (
    NoSuchSchema,
    RegistrySchema,
    SchemaRegistry,
    client_of,
    header,
    subject_of,
)
from flinkish_spark.contracts.format import Format, PartReader, name_schema_fact
from flinkish_spark.contracts.source import JobPlace
from flinkish_spark.core.errors import ConfigError, SchemaError
from flinkish_spark.core.formats import BadRecordPolicy
from flinkish_spark.core.job_dir import JobDir


class RegisteredFormat(Format):
    __slots__ = ()
    #: Its name in a registry.
    _kind: ClassVar[str]
    registry: SchemaRegistry | None
    on_schema_change: OnSchemaChange
    on_bad_record: BadRecordPolicy

    @property
    @abstractmethod
    def _has_schema(self) -> bool: ...

    @abstractmethod
    def _make_reader(self, part: str, schema: RegistrySchema | None) -> PartReader:
        """Return the reader for a schema of the registry; None: for the format's own schema."""

    @abstractmethod
    def _find_written(self, schema: T.StructType) -> tuple[RegistrySchema, str]:
        """Return the schema that a stream is written with, and the full name of its record."""

    def _register_imports(self, registry: SchemaRegistry) -> Sequence[tuple[str, str, int]]:
        """Register what the written schema refers to; return names, subjects and versions."""
        return ()

    def _check_change(self, *, has_fields: bool) -> None:
        if self.on_schema_change is OnSchemaChange.EVOLVE and (has_fields or self.registry is None):
            raise ConfigError(
                f"{type(self).__name__} has OnSchemaChange.EVOLVE, and "
                + ("no registry" if self.registry is None else "a schema or fields of its own"),
                what_to_do="give a registry and neither of them, or choose OnSchemaChange.FAIL or LEAVE_OUT",
            )

    def make_reader(self, part: str) -> PartReader | None:
        if self._has_schema:
            return self._make_reader(part, None)
        if self.registry is None:
            what = f"{type(self).__name__} of a source has neither a schema nor a registry"
            raise ConfigError(what, what_to_do="give one of them")
        return None

    def find_reader(self, part: str, uid: str, place: JobPlace, topics: Sequence[str]) -> PartReader:
        # Called at each start of the query. Without EVOLVE a job always reads with the schema of its first
        # start, which is recorded as a fact in its directory and savepoints. With EVOLVE it reads with the
        # newest schema, and records from which checkpoint on it has read with each.
        stated = self.make_reader(part)
        if stated is not None:
            return stated
        assert self.registry is not None
        job_dir = None if place.job_dir is None else JobDir(place.job_dir.open(), place.job_dir)
        fact, evolves = name_schema_fact(uid, part), self.on_schema_change is OnSchemaChange.EVOLVE
        stored = None if job_dir is None or evolves else job_dir.find_fact(fact)
        schema = _newest(self.registry, part, topics) if stored is None else RegistrySchema.from_json(stored)
        if job_dir is not None and stored is None:
            first = job_dir.record_fact(fact, schema.to_json())
            if evolves:
                _note_schema(job_dir, fact, schema)
            else:
                schema = RegistrySchema.from_json(first)
        if schema.kind != self._kind:
            raise SchemaError(
                f"{schema.name} is {schema.kind}, and the {part} of source '{uid}' is read as {self._kind}",
                what_to_do="choose the format of the registry's schema, or another subject",
            )
        return self._make_reader(part, schema)

    def _prefix(self, schema: T.StructType, topics: Sequence[str], part: str) -> bytes:
        if self.registry is None:
            return b""
        client, (written, record) = client_of(self.registry), self._find_written(schema)
        numbers = set()
        for topic in topics:
            subject = subject_of(self.registry, topic, part, record)
            numbers.add(client.id_of(subject, written, self._register_imports(self.registry)))
        if len(numbers) != 1:
            raise SchemaError(
                f"the registry gives the schema of the {part} a number for each topic: {sorted(numbers)}",
                why="the topics' subjects are in different contexts of it",
                what_to_do="use a sink for each topic",
            )
        return header(numbers.pop())


def _newest(registry: SchemaRegistry, name: str, topics: Sequence[str]) -> RegistrySchema:
    if not registry.subject and len(topics) != 1:
        raise ConfigError(
            f"the schema of the {name} comes from a registry, and the source reads {len(topics)} topics",
            why="each of them has a subject of its own",
            what_to_do='give the schema, or SchemaRegistry(..., subject="...")',
        )
    subject = subject_of(registry, topics[0] if topics else "", name, "")
    try:
        return client_of(registry).newest(subject)
    except NoSuchSchema:
        raise SchemaError(
            f"the registry has no subject '{subject}'",
            what_to_do="write a record first, register a schema, or give the schema to the source",
        ) from None


def _note_schema(job_dir: JobDir, fact: str, schema: RegistrySchema) -> None:
    """Record from which checkpoint on a schema is used, unless it was in use before."""
    at = 1 + max((one.value for one in job_dir.list_checkpoint_ids()), default=0)
    numbered = re.compile(rf"facts/{re.escape(fact)}-([0-9]+)-([0-9]+)\.json")
    found = map(numbered.fullmatch, job_dir.store.list("facts"))
    past = [(int(one[1]), int(one[2])) for one in found if one is not None]
    # After a rewind there are facts about later checkpoints, whose ids come again.
    before = max((one for one in past if one[0] <= at), default=None)
    if before is None or before[1] != schema.schema_id:
        job_dir.record_fact(f"{fact}-{at}-{schema.schema_id}", schema.to_json())


def parse_schema_text(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except (TypeError, ValueError) as wrong:
        raise ConfigError(f"the {what} is no JSON", why=str(wrong), what_to_do="give it as JSON") from None
