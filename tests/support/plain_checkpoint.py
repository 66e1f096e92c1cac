"""The checkpoint of a plain Spark query, written by hand: two partitions of one operator."""

from __future__ import annotations

import json
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flinkish_spark.checkpoint.lz4_blocks import compress
from flinkish_spark.job.plain_query import PROVIDER, ROCKSDB

HDFS_BACKED = ROCKSDB.replace("RocksDB", "HDFSBacked")
CONF = {
    PROVIDER: HDFS_BACKED,
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.streaming.multipleWatermarkPolicy": "min",
    "spark.sql.streaming.stateStore.compression.codec": "lz4",
    "spark.sql.streaming.stateStore.rowChecksum.enabled": "false",
}
Changes = Mapping[bytes, bytes | None]


def sized(data: bytes) -> bytes:
    return struct.pack(">i", len(data)) + data


def records(changes: Changes) -> bytes:
    """Rows as in a delta of the HDFS-backed provider, and as in RocksDB's changelogs of form 1."""
    each = (
        sized(key) + (struct.pack(">i", -1) if row is None else sized(row)) for key, row in changes.items()
    )
    return b"".join(each)


def text(value: str) -> bytes:
    return struct.pack(">H", len(value)) + value.encode()


def changelog(body: bytes, version: int, lineage: list[tuple[int, str]] | None = None) -> bytes:
    begin = text(f"v{version}") if version > 1 else b""
    if lineage is not None:
        begin += text(json.dumps([{"version": v, "checkpointUniqueId": u} for v, u in lineage]))
    return compress(begin + body + (b"\0" if version in (2, 4) else struct.pack(">i", -1)))


class PlainCheckpoint:
    def __init__(self, place: Path, **conf: str) -> None:
        self.place, self.conf = place, {**CONF, **conf}
        self.batch = -1
        self.write("metadata", '{"id":"5d2ddbd0-cb9d-4e7b-a1a5-b44a7ea2dcd1"}')
        self.write("sources/0/0", 'v1\n{"path":"file:///in/0.json"}')
        self.describe("stateStoreSave")
        self.write("state/0/0/_metadata/schema", "schema")

    def write(self, name: str, data: str | bytes) -> None:
        path = self.place / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data.encode() if isinstance(data, str) else data)
        path.with_name(f".{path.name}.crc").write_bytes(b"checksum")

    def describe(self, operator: str, *stores: dict[str, Any]) -> None:
        store = {"storeName": "default", "numColsPrefixKey": 0, "numPartitions": 2}
        body = {"operatorInfo": {"operatorId": 0, "operatorName": operator}}
        text = json.dumps({**body, "stateStoreInfo": [{**store, **one} for one in stores or ({},)]})
        self.write("state/0/_metadata/metadata", f"v1\n{text}")

    def plan(self, batch: int, *positions: str, version: str = "v1") -> None:
        facts = json.dumps({"batchWatermarkMs": 5, "batchTimestampMs": 7, "conf": self.conf})
        self.write(f"offsets/{batch}", "\n".join([version, facts, *(positions or ('{"logOffset":0}',))]))

    def run(self, *changes: Changes, kind: str = "delta", ids: list[str] | None = None) -> None:
        """Run one micro-batch that changes the rows of its partitions."""
        self.batch += 1
        self.plan(self.batch)
        for partition, one in enumerate(changes):
            name, body = f"state/0/{partition}/{self.batch + 1}", records(one)
            if kind == "delta":
                self.write(f"{name}.delta", compress(body + struct.pack(">i", -1)))
            elif kind == "changelog":
                self.write(f"{name}.changelog", changelog(body, 1))
        commit = {"nextBatchWatermarkMs": 9}
        version = "v1" if ids is None else "v2"
        more = {} if ids is None else {"stateUniqueIds": {"0": [[one] for one in ids]}}
        self.write(f"commits/{self.batch}", f"{version}\n{json.dumps({**commit, **more})}")

    def snapshot(self, partition: int, version: int, unique_id: str = "") -> None:
        """Write a snapshot of RocksDB with one table."""
        stem = f"{version}_{unique_id}" if unique_id else str(version)
        path = self.place / f"state/0/{partition}/{stem}.zip"
        path.parent.mkdir(parents=True, exist_ok=True)
        table = f"00{version}-{partition}.sst"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("metadata", f"v1\n{json.dumps({'sstFiles': [{'dfsSstFileName': table}]})}")
        self.write(f"state/0/{partition}/SSTs/{table}", f"table {version}")
