"""Streams as lz4-java writes them, the default codec of Spark's state: blocks, each with a head."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import pyarrow as pa

from flinkish_spark.core.errors import EnvironmentFault
from flinkish_spark.core.extras import how_to_install

#: Magic, token, compressed and uncompressed length, checksum.
_HEAD = struct.Struct("<8sBiii")
_MAGIC = b"LZ4Block"
#: The method in a token; the other half is the size of blocks.
_STORED, _COMPRESSED, _METHOD = 0x10, 0x20, 0xF0
#: Size of the blocks that are written, and how a token names it.
_BLOCK, _SIZE = 64 * 1024, 0x06
_SEED, _CHECKED_BITS = 0x9747B28C, 0x0FFFFFFF
#: Exceptions of reading a stream of an unknown form.
UNREADABLE = (ValueError, struct.error, pa.ArrowInvalid)


def read_blocks(data: bytes) -> Iterator[bytes]:
    """Yield the content of the blocks up to the end of a stream."""
    rest, codec = memoryview(data), pa.Codec("lz4_raw")
    while True:
        magic, token, compressed, size, _ = _HEAD.unpack_from(rest)
        if magic != _MAGIC or size < 0:
            raise ValueError("it is no lz4 stream, or ends too early")
        if size == 0:
            return
        block, rest = rest[_HEAD.size :][:compressed], rest[_HEAD.size + compressed :]
        if len(block) != compressed:
            raise ValueError("it ends within a block")
        is_stored = token & _METHOD == _STORED
        yield bytes(block if is_stored else codec.decompress(block, decompressed_size=size))


def compress(data: bytes) -> bytes:
    try:
        import xxhash
    except ImportError as error:
        raise EnvironmentFault(
            "state cannot be written without the library xxhash",
            why="each block of Spark's state files has a checksum of its kind",
            what_to_do=how_to_install("adopt"),
        ) from error
    codec, written = pa.Codec("lz4_raw"), list[bytes]()
    for at in range(0, len(data), _BLOCK):
        block = data[at : at + _BLOCK]
        packed, method = codec.compress(block, asbytes=True), _COMPRESSED
        if len(packed) >= len(block):
            packed, method = block, _STORED
        checksum = xxhash.xxh32_intdigest(block, seed=_SEED) & _CHECKED_BITS
        written += [_HEAD.pack(_MAGIC, method | _SIZE, len(packed), len(block), checksum), packed]
    return b"".join([*written, _HEAD.pack(_MAGIC, _STORED | _SIZE, 0, 0, 0)])
