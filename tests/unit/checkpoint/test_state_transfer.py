"""State of a plain query as state of a job: every form of it is read, and what is written is read back."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from flinkish_spark.checkpoint.lz4_blocks import compress, read_blocks
from flinkish_spark.checkpoint.state_files import StateOnDisk, StoreVersion, files_of
from flinkish_spark.checkpoint.state_transfer import (
    StoreContent,
    read_hdfs_backed,
    read_rocksdb,
    write_rocksdb,
)
from flinkish_spark.core.errors import CorruptObjectError
from flinkish_spark.core.store import LocalStore
from tests.support.plain_checkpoint import PlainCheckpoint, changelog, records, sized

PLAIN = "0/0"
A, B = b"a" * 16, b"b" * 16


def state_of(plain: PlainCheckpoint) -> StateOnDisk:
    return StateOnDisk(plain.place / "state")


def written(tmp_path: Path, state: StateOnDisk, content: StoreContent) -> list[str]:
    unique_id = write_rocksdb(state, content, LocalStore(tmp_path / "new"), "state/0/0")
    folder = StateOnDisk(tmp_path / "new/state")
    store = StoreVersion(PLAIN, 2, unique_id)
    again = read_rocksdb(folder, store)
    assert (again.changes, again.has_kinds) == (content.changes, content.has_kinds)
    assert all((tmp_path / "new/state" / name).exists() for name in files_of(folder, store))
    names = (tmp_path / "new/state/0/0").rglob("*")
    return sorted(path.name.replace(unique_id, "ID") for path in names if path.is_file())


def test_streams_are_read_back_whatever_their_length() -> None:
    chance = random.Random(7)
    for size in (0, 1, 64 * 1024, 64 * 1024 + 1, 300_000):
        for data in (chance.randbytes(size), b"x" * size):
            assert b"".join(read_blocks(compress(data))) == data


def test_rows_of_the_hdfs_backed_provider_become_puts(tmp_path: Path) -> None:
    plain = PlainCheckpoint(tmp_path)
    plain.run({A: b"1" * 8, B: b"2" * 8})
    plain.run({A: None, b"c": b"3" * 12})
    content = read_hdfs_backed(state_of(plain), StoreVersion(PLAIN, 2, ""))
    # Its encoding comes before each row, and Spark leaves out what follows the last whole word.
    assert content.changes == b"".join(map(sized, (b"\0" + B, b"\0" + b"2" * 8, b"\0c", b"\0" + b"3" * 8)))
    assert len(written(tmp_path, state_of(plain), content)) == 2


def test_a_snapshot_of_the_hdfs_backed_provider_replaces_older_deltas(tmp_path: Path) -> None:
    plain = PlainCheckpoint(tmp_path)
    for number in range(4):
        plain.run({b"%d" % number: b"x" * 8})
    plain.write("state/0/0/3.snapshot", compress(records({b"all": b"y" * 8}) + b"\xff" * 4))
    for version in (1, 2, 3):
        (tmp_path / f"state/0/0/{version}.delta").unlink()
    changes = read_hdfs_backed(state_of(plain), StoreVersion(PLAIN, 4, "")).changes
    assert b"all" in changes and b"3" in changes and b"0" not in changes.replace(b"\0", b"")


def test_a_snapshot_of_rocksdb_is_copied(tmp_path: Path) -> None:
    plain = PlainCheckpoint(tmp_path)
    plain.snapshot(0, 7)
    content = read_rocksdb(state_of(plain), StoreVersion(PLAIN, 7, ""))
    assert (content.changes, content.snapshot) == (b"", "0/0/7.zip")
    assert written(tmp_path, state_of(plain), content) == ["007-0.sst", "2_ID.zip"]


@pytest.mark.parametrize("version", [1, 2])
def test_changelogs_after_a_snapshot_become_one(tmp_path: Path, version: int) -> None:
    plain, chance = PlainCheckpoint(tmp_path), random.Random(7)
    parts = [chance.randbytes(100) for _ in range(3)]
    plain.snapshot(0, 4)
    for number, part in enumerate(parts, 5):
        plain.write(f"state/0/0/{number}.changelog", changelog(part, version))
    content = read_rocksdb(state_of(plain), StoreVersion(PLAIN, 7, ""))
    assert (content.changes, content.has_kinds) == (b"".join(parts), version == 2)
    names = written(tmp_path, state_of(plain), content)
    assert len(names) == 3 and names[0] == "004-0.sst" and names[-1].endswith(".changelog")


def test_format_2_is_read_along_its_lineage(tmp_path: Path) -> None:
    plain = PlainCheckpoint(tmp_path)
    plain.snapshot(0, 1, "one")
    plain.write("state/0/0/2_two.changelog", changelog(b"second", 4, [(1, "one")]))
    plain.write("state/0/0/2_other.changelog", changelog(b"another", 4, [(1, "one")]))
    plain.write("state/0/0/3_three.changelog", changelog(b"third", 4, [(1, "one"), (2, "two")]))
    content = read_rocksdb(state_of(plain), StoreVersion(PLAIN, 3, "three"))
    assert (content.changes, content.has_kinds) == (b"secondthird", True)
    assert len(written(tmp_path, state_of(plain), content)) == 3


def test_the_written_lineage_is_the_one_that_spark_reads(tmp_path: Path) -> None:
    content = StoreContent("", records({A: b"\0" * 8}))
    state = StateOnDisk(tmp_path / "state")
    last = write_rocksdb(state, content, LocalStore(tmp_path), "state/0/0")
    data = b"".join(read_blocks(state.read(f"0/0/2_{last}.changelog")))
    assert data[:4] == b"\0\x02v3" and data.endswith(b"\xff" * 4)
    (before,) = json.loads(data[6 : 6 + int.from_bytes(data[4:6])])
    assert before["version"] == 1
    assert (tmp_path / f"state/0/0/1_{before['checkpointUniqueId']}.changelog").exists()


def test_missing_and_torn_files_are_errors(tmp_path: Path) -> None:
    plain = PlainCheckpoint(tmp_path)
    plain.run({A: b"1" * 8})
    with pytest.raises(CorruptObjectError, match=r"2\.delta is missing"):
        read_hdfs_backed(state_of(plain), StoreVersion(PLAIN, 2, ""))
    with pytest.raises(CorruptObjectError, match=r"1\.changelog is missing"):
        read_rocksdb(state_of(plain), StoreVersion(PLAIN, 1, ""))
    for torn in (b"", b"LZ4Bl", compress(sized(A)[:-1]), compress(b"\0\0")):
        plain.write("state/0/0/1.delta", torn)
        with pytest.raises(CorruptObjectError, match=r"1\.delta cannot be read"):
            read_hdfs_backed(state_of(plain), StoreVersion(PLAIN, 1, ""))
    for torn in (compress(b"\0\x02v9\0"), compress(b"abcd")):
        plain.write("state/0/0/1.changelog", torn)
        with pytest.raises(CorruptObjectError, match=r"1\.changelog cannot be read"):
            read_rocksdb(state_of(plain), StoreVersion(PLAIN, 1, ""))
