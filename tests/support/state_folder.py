"""Spark's checkpoint as files, written by hand: what a query with state would leave behind."""

from __future__ import annotations

import json
import struct
import zipfile
from pathlib import Path

import pyarrow as pa

from flinkish_spark.checkpoint.spark_log import SparkLog
from flinkish_spark.core.store import LocalStore
from flinkish_spark.protocol.decisions import Decision, Verdict
from flinkish_spark.protocol.ids import BatchId, CheckpointId, Lineage, OwnerEpoch
from flinkish_spark.protocol.records import StagedBatch


def lz4_stream(data: bytes, *, compressed: bool = True, block: int = 64) -> bytes:
    """What lz4-java's block stream makes of `data`; its checksums are left 0."""
    out = b""
    for at in range(0, len(data), block):
        plain = data[at : at + block]
        small = pa.Codec("lz4_raw").compress(plain).to_pybytes() if compressed else plain
        token = 0x26 if compressed else 0x16
        out += b"LZ4Block" + struct.pack("<Biii", token, len(small), len(plain), 0) + small
    return out + b"LZ4Block" + struct.pack("<Biii", 0x16, 0, 0, 0)


def changelog(lineage: list[tuple[int, str]], **how) -> bytes:
    texts = ["v3", json.dumps([{"version": v, "checkpointUniqueId": u} for v, u in lineage])]
    plain = b"".join(struct.pack(">H", len(t)) + t.encode() for t in texts)
    return lz4_stream(plain + b"what changed", **how)


class SparkFolder:
    """Two partitions of one operator; every micro-batch writes a changelog, some a snapshot, too.

    Parameters
    ----------
    root
        The job directory.
    epoch
        Owner epoch in the folder's name.
    """

    def __init__(self, root: Path, epoch: int = 1) -> None:
        self.location = root / "spark" / str(epoch)
        self.location.mkdir(parents=True, exist_ok=True)
        self.log = SparkLog(LocalStore(root), f"spark/{epoch}", self.location)
        self.state = self.location / "state"
        self.lineages: dict[int, list[tuple[int, str]]] = {0: [], 1: []}
        self.write("0/_metadata/metadata", b"operator")
        self.write("0/0/_metadata/schema", b"schema")

    def write(self, name: str, data: bytes) -> None:
        path = self.state / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        path.with_name(f".{path.name}.crc").write_bytes(b"checksum of " + name.encode())

    def run(self, batch: int, run: str = "a", *, snapshot: bool = False) -> None:
        """Run micro-batch `batch`; `run` tells the files of one run from those of another."""
        version, ids = batch + 1, []
        for partition, lineage in self.lineages.items():
            unique_id = f"{run}{version}p{partition}"
            ids.append([unique_id])
            self.write(f"0/{partition}/{version}_{unique_id}.changelog", changelog(lineage))
            lineage.append((version, unique_id))
            if snapshot:
                self.snapshot(partition)
        self.log.restore("offsets", BatchId(batch), f'v1\n{{}}\n{{"{run}":{batch}}}')
        text = json.dumps({"nextBatchWatermarkMs": 0, "stateUniqueIds": {"0": ids}})
        self.log.restore("commits", BatchId(batch), f"v2\n{text}")

    def snapshot(self, partition: int) -> None:
        """Upload a snapshot of the newest version, as Spark's maintenance does."""
        version, unique_id = self.lineages[partition][-1]
        table = f"00{version}-{unique_id}.sst"
        self.write(f"0/{partition}/SSTs/{table}", b"table")
        named = {"sstFiles": [{"localFileName": "x", "dfsSstFileName": table, "sizeBytes": 5}]}
        path = self.state / f"0/{partition}/{version}_{unique_id}.zip"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("metadata", "v1\n" + json.dumps(named))
        self.lineages[partition] = [(version, unique_id)]

    def go_back(self, version: int) -> None:
        """Let what runs next follow `version`, as Spark does after a rewind."""
        for lineage in self.lineages.values():
            lineage[:] = [one for one in lineage if one[0] <= version]

    def purge(self, below: int) -> None:
        """Do what Spark's own retention does: versions and log entries below `below` go."""
        for path in [p for p in self.state.rglob("*_*") if "_metadata" not in p.parts and p.is_file()]:
            if int(path.name.lstrip(".").split("_")[0]) < below:
                path.unlink()
        for log in ("offsets", "commits"):
            for batch in self.log.batches(log):
                if batch.value < below - 1:
                    self.log.remove(f"{log}/{batch}")

    def decision(self, checkpoint: int, batch: int, lineage: int = 0) -> Decision:
        """Return the decision of a checkpoint that ended with `batch`."""
        staged = StagedBatch(Lineage(lineage), BatchId(batch), OwnerEpoch(1), 1, (), ())
        return Decision(
            CheckpointId(checkpoint),
            Verdict.COMMIT,
            OwnerEpoch(1),
            0,
            lineage=Lineage(lineage),
            batches=(staged,),
            offsets_text=self.log.read("offsets", BatchId(batch)) or "",
            commits_text=self.log.read("commits", BatchId(batch)) or "",
        )

    def files(self) -> dict[str, bytes]:
        """Return all state files that Spark may read, by name; no checksum files."""
        return {
            str(path.relative_to(self.state)): path.read_bytes()
            for path in sorted(self.state.rglob("*"))
            if path.is_file() and not path.name.endswith(".crc")
        }
