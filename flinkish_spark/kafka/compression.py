"""The compression codecs of Kafka's record batches, by pyarrow's codecs.

Three formats differ from what a general library writes, and Kafka's Java reader knows no others:

- snappy is cut into blocks behind a header of xerial's snappy-java; librdkafka writes it without
  either, and readers take both.
- lz4 is a frame whose blocks are independent. pyarrow's own frames link their blocks, which the
  Java reader refuses, so the frame is built here, around raw blocks.
- zstd and gzip are the usual formats; a Java writer leaves the uncompressed size out.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterator

import pyarrow as pa

from flinkish_spark.errors import EnvironmentFault

#: What Java writes: bytes of uncompressed data per block.
_SNAPPY_BLOCK = 32 * 1024
_LZ4_BLOCK = 64 * 1024
#: Xerial's magic, then its version and the oldest version that can read it, both 1.
_XERIAL_MAGIC = b"\x82SNAPPY\x00"
_XERIAL_HEADER = _XERIAL_MAGIC + struct.pack(">ii", 1, 1)
#: Magic; version 1 with independent blocks and no checksums; 64 KB blocks; checksum of these two.
_LZ4_HEADER = struct.pack("<I", 0x184D2204) + b"\x60\x40\x82"
_LZ4_END = struct.pack("<I", 0)
#: Set in the length of a block that is stored as it is.
_LZ4_STORED = 0x8000_0000
#: Snappy's densest element makes 64 bytes of 3, so a larger claim is not worth the memory.
_SNAPPY_MOST = 22


class Codec(enum.IntEnum):
    """How the records of a batch are compressed; the numbers are the protocol's."""

    NONE = 0
    GZIP = 1
    SNAPPY = 2
    LZ4 = 3
    ZSTD = 4


#: Kafka's default levels; pyarrow's are 9 and 1.
_LEVELS = {Codec.GZIP: 6, Codec.ZSTD: 3}


def require_codec(codec: Codec) -> None:
    """Check that records can be compressed here; called before anything starts.

    Raises
    ------
    EnvironmentFault
        The installed pyarrow was built without the codec.
    """
    if codec is not Codec.NONE and not pa.Codec.is_available(codec.name.lower()):
        raise EnvironmentFault(
            f"the installed pyarrow cannot compress with {codec.name.lower()}",
            what_to_do="install pyarrow from PyPI, whose wheels have every codec, or choose another one",
            codec=codec.name.lower(),
        )


class UnreadableCompression(EnvironmentFault):
    """Compressed data that ends early, or is not what its codec writes."""


def compress(codec: Codec, data: bytes | memoryview) -> bytes:
    """Return `data` as Kafka's Java reader of `codec` takes it.

    The result of incompressible data is a little larger than `data`.
    """
    match codec:
        case Codec.NONE:
            return bytes(data)
        case Codec.SNAPPY:
            return b"".join(_snappy_blocks(memoryview(data)))
        case Codec.LZ4:
            return b"".join(_lz4_frame(memoryview(data)))
        case Codec.GZIP | Codec.ZSTD:
            arrow = pa.Codec(codec.name.lower(), compression_level=_LEVELS[codec])
            return bytes(arrow.compress(data, asbytes=True))


def decompress(codec: Codec, data: bytes | memoryview) -> bytes:
    """Return what was compressed into `data`, by a Java, C or Python client.

    Raises
    ------
    UnreadableCompression
        If `data` ends early or is not what `codec` writes.
    """
    try:
        match codec:
            case Codec.NONE:
                return bytes(data)
            case Codec.SNAPPY if data[: len(_XERIAL_MAGIC)] == _XERIAL_MAGIC:
                return b"".join(_xerial_blocks(memoryview(data)))
            case Codec.SNAPPY:
                return _snappy_block(memoryview(data))
            case Codec.GZIP | Codec.LZ4 | Codec.ZSTD:
                # A stream, because only a stream does without the uncompressed size.
                with pa.CompressedInputStream(pa.BufferReader(data), codec.name.lower()) as stream:
                    return bytes(stream.read())
    except (OSError, ValueError) as broken:
        what = f"{len(data)} bytes are not {codec.name} data"
        raise UnreadableCompression(what, why=str(broken)) from broken


def _snappy_blocks(data: memoryview) -> Iterator[bytes]:
    snappy = pa.Codec("snappy")
    yield _XERIAL_HEADER
    for start in range(0, len(data), _SNAPPY_BLOCK):
        block = snappy.compress(data[start : start + _SNAPPY_BLOCK], asbytes=True)
        yield struct.pack(">i", len(block))
        yield block


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
    size = shift = 0
    for byte in block[:5]:
        size |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            break
    else:
        raise ValueError("a block's size ends early")
    if size > _SNAPPY_MOST * len(block):
        raise ValueError(f"a block of {len(block)} bytes claims to hold {size}")
    return bytes(pa.Codec("snappy").decompress(block, decompressed_size=size, asbytes=True))


def _lz4_frame(data: memoryview) -> Iterator[bytes | memoryview]:
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
