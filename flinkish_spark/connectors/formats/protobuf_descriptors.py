"""Protobuf's descriptors: read from files or a registry, and messages in them found by name or index."""

from __future__ import annotations

import base64
import binascii
import contextlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flinkish_spark.connectors.formats.reader import CodecError
from flinkish_spark.connectors.formats.registry import RegistrySchema, make_library_error
from flinkish_spark.connectors.varints import read_varint, write_varint
from flinkish_spark.core.errors import SchemaError

#: Patterns of file names, the package with their modules, the extra, and the library.
_BUILT_IN = (
    (r"google/protobuf/((?:compiler/)?[a-z_]+)\.proto", "google.protobuf", "protobuf", "protobuf"),
    (r"google/api/([a-z_]+)\.proto", "google.api", "protobuf", "googleapis-common-protos"),
    (r"google/rpc/([a-z_]+)\.proto", "google.rpc", "protobuf", "googleapis-common-protos"),
    (r"google/type/([a-z_]+)\.proto", "google.type", "protobuf", "googleapis-common-protos"),
    (
        r"confluent/(meta|types?/decimal)\.proto",
        "confluent_kafka.schema_registry.confluent",
        "schema-registry",
        "confluent-kafka",
    ),
)
_IMPORT = re.compile(r"""(?m)(?:^|;|\*/)\s*import\s+(?:public\s+|weak\s+)?["']([^"']+)["']""")
#: Longest message of the compiler that an error shows.
_MOST_WORDS = 1_000


def descriptor_of(files: bytes, message: str) -> Any:
    try:
        file = file_of(files)
        if message:
            return file.pool.FindMessageTypeByName(message)
        messages = list(file.message_types_by_name.values())
        if len(messages) != 1:
            raise ValueError(f"its last file has {len(messages)} messages: name one")
        return messages[0]
    except ImportError as missing:
        raise make_library_error("protobuf", "protobuf", missing) from None
    except Exception as wrong:
        raise SchemaError(
            f"the message '{message}' is not in the Protobuf descriptor"
            if message
            else "no Protobuf message",
            why=f"{wrong}"[:500].rstrip("."),
            what_to_do="give what protoc --descriptor_set_out --include_imports writes, and the full name",
        ) from None


def serialize_descriptors(file: Any) -> bytes:
    """Return a file's descriptors with those of all its imports; imported files come first."""
    from google.protobuf import descriptor_pb2

    found = descriptor_pb2.FileDescriptorSet()
    known: set[str] = set()

    def add(one: Any) -> None:
        if one.name in known:
            return
        known.add(one.name)
        for needed in one.dependencies:
            add(needed)
        one.CopyToProto(found.file.add())

    add(file)
    return bytes(found.SerializeToString(deterministic=True))


def file_of(files: bytes) -> Any:
    from google.protobuf import descriptor_pb2, descriptor_pool

    found = descriptor_pb2.FileDescriptorSet.FromString(files)
    if not found.file:
        raise ValueError("it has no file")
    pool = descriptor_pool.DescriptorPool()
    by_name, added = {one.name: one for one in found.file}, set[str]()
    for one in found.file:
        _add(pool, one.name, by_name, added)
    return pool.FindFileByName(found.file[-1].name)


def _add(pool: Any, name: str, known: Mapping[str, Any], added: set[str]) -> None:
    from google.protobuf import descriptor_pb2

    if name in added:
        return
    added.add(name)
    file = known.get(name)
    if file is None:
        file = descriptor_pb2.FileDescriptorProto()
        _find_built_in_file(name).CopyToProto(file)
    for one in file.dependency:
        _add(pool, one, known, added)
    pool.Add(file)


def _find_built_in_file(name: str) -> Any:
    """Return a well-known file that schemas import; registries do not have it, since clients do."""
    import importlib

    # Only these modules may be imported: the name comes from a schema.
    for pattern, package, extra, library in _BUILT_IN:
        if (found := re.fullmatch(pattern, name)) is None:
            continue
        try:
            importlib.import_module(package)
        except ImportError as missing:
            raise make_library_error(extra, f"{library}, for the file '{name}'", missing) from None
        try:
            return importlib.import_module(f"{package}.{found[1].replace('/', '.')}_pb2").DESCRIPTOR
        except ModuleNotFoundError:
            raise ValueError(f"the file '{name}' is not in the installed {library}") from None
    raise ValueError(f"the file '{name}' is missing")


def _add_built_in_files(texts: Sequence[tuple[str, str]], known: Any) -> None:
    """Add the built-in files that texts import to the known files, each after its own imports."""
    there = {name for name, _ in texts} | {one.name for one in known.file}

    def add(name: str) -> None:
        # The compiler has these files.
        if name in there or name.startswith("google/protobuf/"):
            return
        there.add(name)
        file = _find_built_in_file(name)
        for one in file.dependencies:
            add(one.name)
        file.CopyToProto(known.file.add())

    for _, text in texts:
        for name in _IMPORT.findall(text):
            # If a file is missing, the compiler reports which file imports it.
            with contextlib.suppress(ValueError):
                add(name)


def files_of(schema: RegistrySchema) -> bytes:
    """Return the descriptors of a registry's schema: Protobuf text, or base64 of descriptors."""
    from google.protobuf import descriptor_pb2
    from google.protobuf.message import DecodeError

    texts = [*schema.references, ("schema.proto", schema.text)]
    found, sources = descriptor_pb2.FileDescriptorSet(), []
    for name, text in texts:
        try:
            file = descriptor_pb2.FileDescriptorProto.FromString(base64.b64decode(text, validate=True))
        except (binascii.Error, ValueError, DecodeError):
            sources.append((name, text))
        else:
            file.name = name
            found.file.append(file)
    _add_built_in_files(sources, found)
    parsed = bytes(found.SerializeToString(deterministic=True))
    return _compile(sources, parsed, texts[-1][0]) if sources else parsed


def _compile(texts: Sequence[tuple[str, str]], parsed: bytes, last: str) -> bytes:
    """Compile source files with Protobuf's own compiler, which sees no other files."""
    try:
        import grpc_tools
    except ImportError as missing:
        raise make_library_error("protobuf", "grpcio-tools", missing) from None
    with tempfile.TemporaryDirectory(prefix="flinkish-protobuf-") as folder:
        for name, text in texts:
            place = (Path(folder) / "in" / name).resolve()
            if not place.is_relative_to((Path(folder) / "in").resolve()):
                raise SchemaError(
                    f"the registry's schema refers to '{name}', which is no name of a file",
                    what_to_do="register it under the path that its import has",
                )
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text, encoding="utf-8")
        made, known = Path(folder) / "out", Path(folder) / "known"
        known.write_bytes(parsed)
        own = Path(grpc_tools.__file__).parent / "_proto"
        # In another process, so that the compiler's messages can be captured.
        ended = subprocess.run(
            [
                *(sys.executable, "-m", "grpc_tools.protoc"),
                f"-I{folder}/in",
                f"-I{own}",
                f"--descriptor_set_in={known}",
                "--include_imports",
                f"--descriptor_set_out={made}",
                last,
            ],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
        if ended.returncode:
            words = [line for line in ended.stderr.splitlines() if ": warning: " not in line]
            said = "; ".join(words).replace(f"{folder}/in/", "")
            raise SchemaError(
                "the registry's Protobuf schema cannot be compiled",
                why=f"the compiler says: {said[:_MOST_WORDS].rstrip('.')}",
                what_to_do="correct the schema, or give the source a descriptor",
            )
        return made.read_bytes()


def index_path(message: Any) -> tuple[int, ...]:
    around = message.containing_type
    if around is None:
        return (_names_within(message.file).index(message.name),)
    return (*index_path(around), _names_within(around).index(message.name))


def _names_within(around: Any) -> list[str]:
    """Return the names of the messages in a file or message, in declaration order."""
    from google.protobuf import descriptor_pb2

    is_file = hasattr(around, "message_types_by_name")
    made = descriptor_pb2.FileDescriptorProto() if is_file else descriptor_pb2.DescriptorProto()
    around.CopyToProto(made)
    return [one.name for one in (made.message_type if is_file else made.nested_type)]


def message_at(file: Any, path: Sequence[int], *, counts_entries: bool = True) -> Any:
    around = file
    for at in path:
        names = _names_within(around)
        by_name = around.message_types_by_name if around is file else around.nested_types_by_name
        if not counts_entries:
            names = [name for name in names if not by_name[name].GetOptions().map_entry]
        if not 0 <= at < len(names):
            return None
        around = by_name[names[at]]
    return around


def path_bytes(path: Sequence[int]) -> bytes:
    """Return the encoded index path of a message, which follows the schema id."""
    if tuple(path) == (0,):
        return b"\0"
    return b"".join(write_varint(number << 1) for number in (len(path), *path))


def path_in(data: bytes, start: int) -> tuple[tuple[int, ...], int]:
    """Return the index path of a record's message, and the offset after it; raises CodecError."""
    count, at = _number(data, start)
    if count == 0:
        return (0,), at
    if not 0 < count <= 64:
        raise CodecError("the indexes of its Protobuf message cannot be read")
    path = []
    for _ in range(count):
        number, at = _number(data, at)
        path.append(number)
    return tuple(path), at


def _number(data: bytes, at: int) -> tuple[int, int]:
    try:
        found, end = read_varint(data, at, most_bytes=10)
    except IndexError:
        raise CodecError("the indexes of its Protobuf message cannot be read") from None
    return (found >> 1) ^ -(found & 1), end


def first_message(files: bytes) -> str:
    found = message_at(file_of(files), (0,))
    if found is None:
        raise SchemaError("the registry's Protobuf schema has no message", what_to_do="register one with it")
    return str(found.full_name)
