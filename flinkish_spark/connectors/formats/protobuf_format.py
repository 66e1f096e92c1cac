"""Protocol Buffers as a format of records."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark.sql import types as T

from flinkish_spark.connectors.formats.protobuf import (
    ProtobufReader,
    ProtobufWriter,
    fields_of,
    find_missing_required,
    why_unfit,
)
from flinkish_spark.connectors.formats.protobuf_descriptors import (
    descriptor_of,
    files_of,
    first_message,
    index_path,
    path_bytes,
    serialize_descriptors,
)
from flinkish_spark.connectors.formats.reader import ConvertingReader, ConvertingWriter, OnSchemaChange
from flinkish_spark.connectors.formats.registered import RegisteredFormat
from flinkish_spark.connectors.formats.registry import RegistrySchema, SchemaRegistry, client_of
from flinkish_spark.connectors.plain_formats import find_field
from flinkish_spark.contracts.format import PartReader, PartWriter
from flinkish_spark.core.errors import ConfigError, SchemaError
from flinkish_spark.core.fields import check_fields
from flinkish_spark.core.formats import BadRecordPolicy, OnBadRecord


@dataclass(frozen=True, slots=True)
class Protobuf(RegisteredFormat):
    """Protocol Buffers, one message per record; with a registry in Confluent's wire format.

    Needs the extra ``protobuf``. What each type becomes is said in `docs/formats.md`.

    Parameters
    ----------
    descriptor
        A serialized FileDescriptorSet, as ``protoc --descriptor_set_out --include_imports`` writes it. Empty,
        of a source: the newest schema of the registry's subject at the first start of the job.
    message
        Full name of the message in it, ``"shop.Order"``. Empty: the only one of its last file.
    registry
        Where the schema of each record is asked for, and that of a sink is registered. None: records have
        nothing in front.
    on_schema_change, on_bad_record
        As for :class:`Avro`.

    Examples
    --------
    >>> from google.protobuf import timestamp_pb2
    >>> Protobuf.of(timestamp_pb2.Timestamp).message
    'google.protobuf.Timestamp'
    """

    descriptor: bytes = b""
    message: str = ""
    registry: SchemaRegistry | None = None
    on_schema_change: OnSchemaChange = OnSchemaChange.FAIL
    on_bad_record: BadRecordPolicy = OnBadRecord.FAIL
    _kind = "PROTOBUF"

    def __post_init__(self) -> None:
        check_fields(self)
        self._check_change(has_fields=bool(self.descriptor))

    @classmethod
    def of(
        cls,
        message: Any,
        *,
        registry: SchemaRegistry | None = None,
        on_schema_change: OnSchemaChange = OnSchemaChange.FAIL,
        on_bad_record: BadRecordPolicy = OnBadRecord.FAIL,
    ) -> Protobuf:
        """Return the format of a message whose class a compiled module has: ``orders_pb2.Order``.

        The class is asked for its description once, here; no task needs its module.
        """
        known: Any = getattr(message, "DESCRIPTOR", None)
        if getattr(known, "full_name", None) is None or getattr(known, "file", None) is None:
            raise ConfigError(
                f"{message!r} is no message of a compiled module",
                what_to_do="give a class such as orders_pb2.Order",
            )
        return cls(
            serialize_descriptors(known.file), known.full_name, registry, on_schema_change, on_bad_record
        )

    @property
    def _has_schema(self) -> bool:
        return bool(self.descriptor)

    def _make_reader(self, part: str, schema: RegistrySchema | None) -> PartReader:
        files, message = self.descriptor, self.message
        if schema is not None:
            files = files_of(schema)
            message = message or first_message(files)
        name = descriptor_of(files, message).full_name
        reader = ProtobufReader(files, name, self.registry, self.on_schema_change)
        return ConvertingReader(part, reader.kind, reader)

    def check_fields(self, schema: T.StructType, whose: str) -> None:
        if not self.descriptor:
            raise ConfigError(
                f"{whose} is Protobuf without a descriptor",
                what_to_do="take Protobuf.of(orders_pb2.Order), or give what protoc writes",
            )
        message = self._descriptor
        wanted = fields_of(message)
        field = f"a field of the Protobuf message of {whose}"
        given = T.StructType([find_field(schema, name, field) for name in wanted.names])
        if (why := why_unfit(given, wanted, "")) is not None:
            raise SchemaError(
                f"{whose} cannot be written as its Protobuf message",
                why=why,
                what_to_do="cast it in a transform; docs/formats.md says what each type of Protobuf is",
            )
        if (name := find_missing_required(message, given)) is not None:
            raise SchemaError(
                f"{whose} has the required field '{name}' in its Protobuf message, and its stream does not",
                what_to_do="add it in a transform",
            )

    def make_writer(self, schema: T.StructType, topics: Sequence[str], part: str) -> PartWriter:
        message, prefix = self._descriptor, self._prefix(schema, topics, part)
        if prefix:
            prefix += path_bytes(index_path(message))
        fields = T.StructType([schema[name] for name in fields_of(message).names])
        return _MessageWriter(fields, ProtobufWriter(self.descriptor, message.full_name, prefix))

    def _find_written(self, schema: T.StructType) -> tuple[RegistrySchema, str]:
        return _serialize_file(self._descriptor.file), self._descriptor.full_name

    def _register_imports(self, registry: SchemaRegistry) -> Sequence[tuple[str, str, int]]:
        return _register_dependencies(registry, self._descriptor.file)

    @property
    def _descriptor(self) -> Any:
        return descriptor_of(self.descriptor, self.message)


class _MessageWriter(ConvertingWriter):
    def _rows(self, records: pa.RecordBatch) -> pa.Array:
        columns = self.columns(records)
        # Arrow takes the number of rows from the first column.
        nothing = pa.array([{}] * records.num_rows, pa.struct([]))
        return pa.StructArray.from_arrays(columns, self.fields.names) if columns else nothing


def _serialize_file(file: Any) -> RegistrySchema:
    from google.protobuf import descriptor_pb2

    made = descriptor_pb2.FileDescriptorProto()
    file.CopyToProto(made)
    return RegistrySchema("PROTOBUF", base64.b64encode(made.SerializeToString(deterministic=True)).decode())


def _register_dependencies(registry: SchemaRegistry, file: Any) -> list[tuple[str, str, int]]:
    """Register the files that a file imports, each under its own name, as Confluent's serializers do."""
    found = []
    for one in file.dependencies:
        if one.name.startswith("google/protobuf/"):
            continue
        needs = _register_dependencies(registry, one)
        written = _serialize_file(one)
        client_of(registry).id_of(one.name, written, needs)
        found.append((one.name, one.name, client_of(registry).version_of(one.name, written, needs)))
    return found
