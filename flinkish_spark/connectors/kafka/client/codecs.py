"""Compression of record batches, in the framings of Kafka's Java client."""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterator

import pyarrow as pa

from flinkish_spark.connectors.varints import read_varint
from flinkish_spark.core.errors import EnvironmentFault

#: Block sizes of the Java client, in uncompressed bytes.
_SNAPPY_BLOCK = 32 * 1024
_LZ4_BLOCK = 64 * 1024
#: Xerial's magic, then its version and the oldest version that can read it, both 1.
_XERIAL_MAGIC = b"\x82SNAPPY\x00"
_XERIAL_HEADER = _XERIAL_MAGIC + struct.pack(">ii", 1, 1)
#: Magic; version 1 with independent blocks and no checksums; 64 KB blocks; checksum of these two.
_LZ4_HEADER = struct.pack("<I", 0x184D2204) + b"\x60\x40\x82"
_LZ4_END = struct.pack("<I", 0)
#: Flag in the length of an uncompressed block.
_LZ4_STORED = 0x8000_0000
#: Highest compression ratio: Snappy's densest element encodes 64 bytes in 3. A larger claim is wrong.
_SNAPPY_MOST = 22


class Codec(enum.IntEnum):
    """Compression codecs of record batches; the numbers are the protocol's."""

    NONE = 0
    GZIP = 1
    SNAPPY = 2
    LZ4 = 3
    ZSTD = 4


#: Kafka's default levels; pyarrow's are 9 and 1.
_LEVELS = {Codec.GZIP: 6, Codec.ZSTD: 3}


def require_codec(codec: Codec) -> None:
    if codec is not Codec.NONE and not pa.Codec.is_available(codec.name.lower()):
        raise EnvironmentFault(
            f"the installed pyarrow cannot compress with {codec.name.lower()}",
            what_to_do="install pyarrow from PyPI, whose wheels have every codec, or choose another one",
        )


def compress(codec: Codec, data: bytes | memoryview) -> bytes:
    """Compress `data` in the framing of Kafka's Java client; incompressible data gets a little larger."""
    match codec:
        case Codec.NONE:
            return bytes(data)
        case Codec.SNAPPY:
            # The framing of xerial's snappy-java. librdkafka writes neither header nor blocks; readers accept
            # both.
            starts = range(0, len(data), _SNAPPY_BLOCK)
            parts = (data[start : start + _SNAPPY_BLOCK] for start in starts)
            blocks = [pa.Codec("snappy").compress(part, asbytes=True) for part in parts]
            return b"".join([_XERIAL_HEADER, *(struct.pack(">i", len(one)) + one for one in blocks)])
        case Codec.LZ4:
            return b"".join(_lz4_frame(memoryview(data)))
        case Codec.GZIP | Codec.ZSTD:
            arrow = pa.Codec(codec.name.lower(), compression_level=_LEVELS[codec])
            return bytes(arrow.compress(data, asbytes=True))


def decompress(codec: Codec, data: bytes | memoryview) -> bytes:
    try:
        match codec:
            case Codec.NONE:
                return bytes(data)
            case Codec.SNAPPY if data[: len(_XERIAL_MAGIC)] == _XERIAL_MAGIC:
                return b"".join(_xerial_blocks(memoryview(data)))
            case Codec.SNAPPY:
                return _snappy_block(memoryview(data))
            case Codec.GZIP | Codec.LZ4 | Codec.ZSTD:
                # As a stream: Java does not write the uncompressed size, which other calls need.
                with pa.CompressedInputStream(pa.BufferReader(data), codec.name.lower()) as stream:
                    return bytes(stream.read())
    except (OSError, ValueError) as broken:
        what = f"{len(data)} bytes are not {codec.name} data"
        raise EnvironmentFault(
            what,
            why=str(broken),
            what_to_do="look whether the topic's segment is damaged, with kafka-dump-log",
        ) from broken


def _xerial_blocks(data: memoryview) -> Iterator[bytes]:
    position = len(_XERIAL_HEADER)
    if len(data) < position:
        raise ValueError("the header ends early")
    while position < len(data):
        if position + 4 > len(data):
            raise ValueError("a block's length ends early")
        (length,) = struct.unpack_from(">i", data, position)
        position += 4
        if not 0 < length <= len(data) - position:
            raise ValueError(f"a block claims {length} bytes, {len(data) - position} are left")
        yield _snappy_block(data[position : position + length])
        position += length


def _snappy_block(block: memoryview) -> bytes:
    """Decompress a block, which starts with its uncompressed size as a varint of 32 bits."""
    try:
        size, _ = read_varint(block, 0, most_bytes=5)
    except IndexError:
        raise ValueError("a block's size ends early") from None
    if size > _SNAPPY_MOST * len(block):
        raise ValueError(f"a block of {len(block)} bytes claims to hold {size}")
    return bytes(pa.Codec("snappy").decompress(block, decompressed_size=size, asbytes=True))


def _lz4_frame(data: memoryview) -> Iterator[bytes | memoryview]:
    # Not pyarrow's frames: their blocks depend on each other, which the Java client refuses.
    lz4 = pa.Codec("lz4_raw")
    yield _LZ4_HEADER
    for start in range(0, len(data), _LZ4_BLOCK):
        stored = data[start : start + _LZ4_BLOCK]
        block = lz4.compress(stored, asbytes=True)
        # A block may not be larger than the frame's block size.
        if len(block) < len(stored):
            yield struct.pack("<I", len(block))
            yield block
        else:
            yield struct.pack("<I", len(stored) | _LZ4_STORED)
            yield stored
    yield _LZ4_END
