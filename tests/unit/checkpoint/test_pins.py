"""Pins: what they hold, what survives Spark's cleaning, and what a crash may leave."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from flinkish_spark.checkpoint import retention as pins_module
from flinkish_spark.checkpoint import state_files
from flinkish_spark.checkpoint.pins import PinManifest
from flinkish_spark.checkpoint.retention import SparkPins
from flinkish_spark.checkpoint.state_files import (
    StateFileNotFoundError,
    StateOnDisk,
    correct_schema_paths,
    files_of,
    lineage_of,
    store_versions,
)
from flinkish_spark.core.errors import CorruptObjectError, StoreError
from flinkish_spark.protocol.ids import BatchId, CheckpointId
from tests.support.durability import Synced
from tests.support.state_folder import SparkFolder, changelog, lz4_stream

ONE, TWO, THREE = CheckpointId(1), CheckpointId(2), CheckpointId(3)


@pytest.fixture
def folder(tmp_path):
    folder = SparkFolder(tmp_path)
    for batch in range(10):
        folder.run(batch, snapshot=batch in (3, 7))
    return folder


@pytest.fixture
def pins(folder, tmp_path):
    return SparkPins(folder.log, tmp_path)


def pool(tmp_path):
    return sorted(
        str(p.relative_to(tmp_path / "pins/state"))
        for p in (tmp_path / "pins/state").rglob("*")
        if p.is_file() and not p.name.endswith(".crc")
    )


# -- which files --------------------------------------------------------------------------------------


def needed(folder, batch):
    text = folder.log.read("commits", BatchId(batch))
    return [
        name for store in store_versions(text, batch) for name in files_of(StateOnDisk(folder.state), store)
    ]


def test_a_version_needs_its_newest_snapshot_and_the_changelogs_behind_it(folder):
    assert needed(folder, 5) == [
        "0/0/5_a5p0.changelog",
        "0/0/6_a6p0.changelog",
        "0/0/4_a4p0.zip",
        "0/0/SSTs/004-a4p0.sst",
        "0/0/_metadata/schema",
        "0/1/5_a5p1.changelog",
        "0/1/6_a6p1.changelog",
        "0/1/4_a4p1.zip",
        "0/1/SSTs/004-a4p1.sst",
    ]


def test_before_the_first_snapshot_all_changelogs_are_needed(folder):
    assert [n for n in needed(folder, 2) if "0/1/" in n] == [f"0/1/{v}_a{v}p1.changelog" for v in (1, 2, 3)]


def test_a_version_with_a_snapshot_needs_no_changelog(folder):
    assert [n for n in needed(folder, 3) if n.endswith("changelog")] == []


def test_a_job_without_state_has_nothing_to_keep():
    assert store_versions('v1\n{"nextBatchWatermarkMs":0}', 3) == ()
    assert store_versions("v1\n", 3) == ()


@pytest.mark.parametrize("text", ["v2\n{torn", 'v2\n{"stateUniqueIds":{"0":[["a","b"]]}}', "v2\n[1]"])
def test_a_commit_log_of_another_form_is_refused(text):
    with pytest.raises(CorruptObjectError, match="unknown form"):
        store_versions(text, 3)


@pytest.mark.parametrize("compressed", [True, False])
def test_a_changelog_names_its_lineage(tmp_path, compressed):
    path = tmp_path / "x.changelog"
    lineage = [(n, f"{n:036d}") for n in range(1, 30)]
    path.write_bytes(changelog(lineage, compressed=compressed))
    assert lineage_of(StateOnDisk(tmp_path), "x.changelog") == tuple(lineage)


@pytest.mark.parametrize(
    "data",
    [b"", b"\x28\xb5\x2f\xfd zstd", changelog([(1, "a")])[:40], lz4_stream(b"\x00\x02xx"), lz4_stream(b"")],
)
def test_a_changelog_that_cannot_be_read_is_an_error(tmp_path, data):
    (tmp_path / "x.changelog").write_bytes(data)
    with pytest.raises(CorruptObjectError, match="lz4"):
        lineage_of(StateOnDisk(tmp_path), "x.changelog")


def test_what_spark_has_cleaned_away_cannot_be_loaded(folder):
    folder.purge(below=6)
    (store, _) = store_versions('v2\n{"stateUniqueIds":{"0":[["a6p0"],["a6p1"]]}}', 5)
    with pytest.raises(CorruptObjectError, match="no snapshot below version 4"):
        files_of(StateOnDisk(folder.state), store)
    (store, _) = store_versions('v2\n{"stateUniqueIds":{"0":[["a5p0"],["a5p1"]]}}', 4)
    with pytest.raises(CorruptObjectError, match=r"5_a5p0\.changelog is missing"):
        files_of(StateOnDisk(folder.state), store)


def test_a_hole_between_snapshot_and_version_is_noticed(folder):
    (folder.state / "0/0/5_a5p0.changelog").unlink()
    with pytest.raises(CorruptObjectError, match=r"5_a5p0\.changelog is missing"):
        needed(folder, 5)


def test_a_damaged_snapshot_is_noticed(folder):
    (folder.state / "0/0/4_a4p0.zip").write_bytes(b"PK torn")
    with pytest.raises(CorruptObjectError, match=r"snapshot 0/0/4_a4p0\.zip"):
        needed(folder, 5)


# -- pinning and restoring ----------------------------------------------------------------------------


def test_a_pinned_checkpoint_survives_sparks_cleaning_and_is_restored_exactly(folder, pins):
    before = {name: folder.files()[name] for name in needed(folder, 5)}
    entries = {key: folder.log.read(*key) for key in [("offsets", BatchId(4)), ("commits", BatchId(5))]}
    pins.pin(folder.decision(1, 5))
    folder.purge(below=9)
    assert "0/0/4_a4p0.zip" not in folder.files()
    for batch in range(6, 10):
        folder.log.remove(f"commits/{batch}")
        folder.log.remove(f"offsets/{batch}")
    assert pins.why_not_restorable(ONE) == ""
    pins.restore(ONE)
    assert folder.files() == {**before, "0/_metadata/metadata": b"operator"}
    assert folder.log.batches("offsets") == {BatchId(4), BatchId(5)}
    assert {key: folder.log.read(*key) for key in entries} == entries
    # And once more: a restore that is repeated changes nothing.
    pins.restore(ONE)
    assert folder.files() == {**before, "0/_metadata/metadata": b"operator"}


def test_checksums_travel_with_their_files(folder, pins):
    pins.pin(folder.decision(1, 5))
    folder.purge(below=9)
    pins.restore(ONE)
    found = (folder.state / "0/0/.6_a6p0.changelog.crc").read_bytes()
    assert found == b"checksum of 0/0/6_a6p0.changelog"
    assert not (folder.state / "0/0/.9_a9p0.changelog.crc").exists()


def test_dead_lineages_go_with_a_restore(folder, pins):
    """Spark's cleaning counts from the highest version that it finds, dead or not."""
    pins.pin(folder.decision(1, 5))
    pins.restore(ONE)
    versions = {
        int(n.split("/")[2].split("_")[0]) for n in folder.files() if n.endswith(("zip", "changelog"))
    }
    assert max(versions) == 6


def test_pins_share_files_and_a_pin_adds_only_what_is_new(folder, pins, tmp_path):
    pins.pin(folder.decision(1, 5))
    first = set(pool(tmp_path))
    pins.pin(folder.decision(2, 6))
    assert set(pool(tmp_path)) - first == {"0/0/7_a7p0.changelog", "0/1/7_a7p1.changelog"}
    assert (tmp_path / "pins/state/0/0/7_a7p0.changelog").stat().st_nlink == 2
    assert pins.list_pinned() == {ONE, TWO}


def test_unpinning_deletes_what_no_other_pin_needs(folder, pins, tmp_path):
    pins.pin(folder.decision(1, 5))
    pins.pin(folder.decision(2, 6))
    with_both = set(pool(tmp_path))
    pins.pin(folder.decision(3, 9))
    # Another process, which has nothing in memory.
    other = SparkPins(folder.log, tmp_path)
    other.unpin(THREE)
    assert set(pool(tmp_path)) == with_both
    other.unpin(TWO)
    assert other.why_not_restorable(ONE) == ""
    other.unpin(ONE)
    other.unpin(ONE)
    assert pool(tmp_path) == [] and other.list_pinned() == frozenset()


def test_a_pinned_checkpoint_is_not_pinned_again(folder, pins):
    pins.pin(folder.decision(1, 5))
    folder.purge(below=9)
    pins.pin(folder.decision(1, 5))
    assert pins.list_pinned() == {ONE}


def refused_link(link):
    def refuse(source, target):
        if "state" in str(target):
            raise OSError(errno.EXDEV, "another device")
        link(source, target)

    return refuse


def test_where_links_are_impossible_files_are_copied(folder, pins, tmp_path, monkeypatch):
    os.utime(folder.state / "0/0/SSTs/004-a4p0.sst", (1, 1))
    monkeypatch.setattr(os, "link", refused_link(os.link))
    pins.pin(folder.decision(1, 5))
    copy = tmp_path / "pins/state/0/0/SSTs/004-a4p0.sst"
    # Spark takes table files for orphans by their age.
    assert (copy.stat().st_nlink, copy.stat().st_mtime) == (1, 1)
    folder.purge(below=9)
    pins.restore(ONE)
    assert "0/0/4_a4p0.zip" in folder.files()


def test_a_job_without_state_is_pinned_by_its_log_entries(tmp_path):
    folder = SparkFolder(tmp_path)
    pins = SparkPins(folder.log, tmp_path)
    folder.log.restore("offsets", BatchId(0), "v1\n{}\n7")
    folder.log.restore("commits", BatchId(0), 'v1\n{"nextBatchWatermarkMs":0}')
    pins.pin(folder.decision(1, 0))
    assert set(pins.log_entries(ONE)) == {"offsets/0", "commits/0"}
    folder.log.remove("offsets/0")
    pins.restore(ONE)
    assert folder.log.read("offsets", BatchId(0)) == "v1\n{}\n7"


def describe_native(folder: SparkFolder, batch: int, name: str) -> None:
    """Write what Spark writes for `transformWithState` when its schema is new in a micro-batch."""
    folder.write(f"0/_stateSchema/default/{name}", b"schema")
    path = f"file:{folder.state}/0/_stateSchema/default/{name}"
    body = json.dumps({"stateStoreInfo": [{"storeName": "default", "stateSchemaFilePaths": [path]}]})
    folder.write(f"0/_metadata/v2/{batch}", f"v2\n{body}".encode())


def test_schemas_of_sparks_own_operators_are_pinned_and_restored_with_their_metadata(folder, pins):
    describe_native(folder, 0, "0_a")
    describe_native(folder, 6, "6_b")
    pins.pin(folder.decision(1, 5))
    assert {n for n in pins._read_manifest(ONE).files if "0/_" in n and n[0] == "0" and n[2] == "_"} == {
        "0/_metadata/metadata",
        "0/_metadata/v2/0",
        "0/_stateSchema/default/0_a",
    }
    pins.restore(ONE)
    # Metadata of a later micro-batch would stay and name a schema that is gone.
    assert not (folder.state / "0/_metadata/v2/6").exists()
    assert not (folder.state / "0/_stateSchema/default/6_b").exists()
    (folder.state / "0/_stateSchema/default/0_a").unlink()
    pins.restore(ONE)
    assert (folder.state / "0/_stateSchema/default/0_a").exists()


def test_metadata_names_the_schemas_of_the_folder_where_it_is_now(folder, pins, tmp_path):
    describe_native(folder, 0, "0_a")
    pins.pin(folder.decision(1, 5))
    correct_schema_paths(folder.log.store, f"{folder.log.folder}/state", "file:/new/spark/22/state")
    text = (folder.state / "0/_metadata/v2/0").read_text()
    assert "file:/new/spark/22/state/0/_stateSchema/default/0_a" in text and text.startswith("v2\n")
    assert not (folder.state / "0/_metadata/v2/.0.crc").exists()
    # The pin's file is another one, and can be restored.
    assert pins.why_not_restorable(ONE) == ""
    assert "/22/" not in (tmp_path / "pins/state/0/_metadata/v2/0").read_text()


# -- what can be wrong --------------------------------------------------------------------------------


def test_an_unpinned_checkpoint_cannot_be_restored(pins):
    assert "not kept any more" in pins.why_not_restorable(ONE)
    assert pins.log_entries(ONE) == {}
    with pytest.raises(CorruptObjectError, match="checkpoint 1 cannot be restored"):
        pins.restore(ONE)


@pytest.mark.parametrize("damage", ["gone", "2 bytes instead"])
def test_a_damaged_pin_is_refused_before_anything_is_changed(folder, pins, tmp_path, damage):
    pins.pin(folder.decision(1, 5))
    file = tmp_path / "pins/state/0/1/4_a4p1.zip"
    file.unlink()
    if damage != "gone":
        file.write_bytes(b"??")
    before = folder.files()
    with pytest.raises(CorruptObjectError, match=damage):
        pins.restore(ONE)
    assert folder.files() == before


def test_state_that_is_gone_cannot_be_pinned(folder, pins, tmp_path):
    decision = folder.decision(1, 5)
    folder.purge(below=9)
    with pytest.raises(CorruptObjectError, match=r"offsets/4 is gone"):
        pins.pin(decision)
    folder.log.restore("offsets", BatchId(4), "v1")
    with pytest.raises(CorruptObjectError, match="cannot be loaded any more"):
        pins.pin(decision)
    assert pins.list_pinned() == frozenset()


def test_maintenance_that_takes_files_away_meanwhile_makes_the_pin_start_over(folder, pins, monkeypatch):
    def listed(state, store, calls=iter(range(100))):  # noqa: B008 - one counter for all calls
        if next(calls) < 2:
            raise StateFileNotFoundError("4_a4p0.zip")
        return files_of(state, store)

    monkeypatch.setattr(pins_module, "files_of", listed)
    pins.pin(folder.decision(1, 5))
    assert pins.why_not_restorable(ONE) == ""


def test_files_that_keep_vanishing_end_the_pin(folder, pins, monkeypatch):
    def listed(state, store):
        return ("0/0/99_gone.zip",)

    monkeypatch.setattr(pins_module, "files_of", listed)
    with pytest.raises(CorruptObjectError, match="vanishes while it is pinned"):
        pins.pin(folder.decision(1, 5))


def test_a_folder_that_vanishes_while_it_is_listed_is_told_apart_from_damage(tmp_path, folder):
    (store, _) = store_versions(folder.log.read("commits", BatchId(5)), 5)
    with pytest.raises(StateFileNotFoundError):
        state_files.files_of(StateOnDisk(tmp_path / "nowhere"), store)


def test_a_disk_that_refuses_is_named(folder, pins, monkeypatch):
    def refuse(source, target):
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(StoreError, match=r"cannot pin checkpoint 1.*no space left"):
        pins.pin(folder.decision(1, 5))
    monkeypatch.undo()
    pins.pin(folder.decision(1, 5))
    folder.purge(below=9)
    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(StoreError, match="cannot restore checkpoint 1"):
        pins.restore(ONE)


def test_a_torn_manifest_is_an_error_and_no_pin_is_taken_instead(folder, pins, tmp_path):
    pins.pin(folder.decision(1, 5))
    manifest = tmp_path / "pins/1.json"
    manifest.write_bytes(manifest.read_bytes()[:-9])
    with pytest.raises(CorruptObjectError, match=r"pins/1\.json"):
        SparkPins(folder.log, tmp_path).restore(ONE)


@pytest.mark.parametrize("name", ["../../offsets/1", "/etc/x", "0/../../x"])
def test_a_manifest_cannot_name_files_elsewhere(name):
    good = PinManifest(ONE, BatchId(1), {}, {"0/0/1_a.zip": 4})
    assert PinManifest.from_json(good.to_json()) == good
    with pytest.raises(ValueError, match="not the name of a state file"):
        PinManifest.from_json({**good.to_json(), "files": {name: 1}})


# -- power cuts ---------------------------------------------------------------------------------------


def test_what_a_crash_left_in_the_pool_is_never_taken_for_a_pinned_file(folder, pins, tmp_path):
    """No manifest names it, so nobody knows whether its content is whole: it is made again."""
    whole = folder.files()["0/0/4_a4p0.zip"]
    left = tmp_path / "pins/state/0/0/4_a4p0.zip"
    left.parent.mkdir(parents=True)
    for torn in (b"", whole[:-1], bytes(len(whole))):
        left.write_bytes(torn)
        pins.pin(folder.decision(1, 5))
        assert left.read_bytes() == whole
        pins.unpin(ONE)
        left.parent.mkdir(parents=True, exist_ok=True)
    os.link(folder.state / "0/0/4_a4p0.zip", left)
    pins.pin(folder.decision(1, 5))
    assert left.read_bytes() == whole
    assert not [name for name in pool(tmp_path) if name.endswith(".part")]


def test_a_pin_mends_a_file_that_it_shares_with_a_damaged_one(folder, pins, tmp_path):
    pins.pin(folder.decision(1, 5))
    shared = tmp_path / "pins/state/0/0/6_a6p0.changelog"
    whole = shared.read_bytes()
    shared.unlink()
    shared.write_bytes(whole[:-1])
    assert pins.why_not_restorable(ONE)
    pins.pin(folder.decision(2, 6))
    assert pins.why_not_restorable(ONE) == pins.why_not_restorable(TWO) == ""


def test_a_torn_manifest_does_not_keep_other_checkpoints_from_being_pinned(folder, pins, tmp_path):
    pins.pin(folder.decision(1, 5))
    (tmp_path / "pins/1.json").write_bytes(b"torn")
    other = SparkPins(folder.log, tmp_path)
    other.pin(folder.decision(2, 6))
    assert other.why_not_restorable(TWO) == ""


@pytest.mark.parametrize("links", ["links", "copies"])
def test_a_pin_survives_a_power_cut(folder, pins, tmp_path, monkeypatch, links):
    """Each file's content is synced before it has its name, and so are all new folders."""
    synced, real = Synced(monkeypatch), os.replace

    def replaced(source, target):
        if links == "copies" and str(source).endswith(".part") and "pins/state" in str(source):
            copied.append(Path(source))
            assert copied[-1] in synced
        real(source, target)

    copied: list[Path] = []
    monkeypatch.setattr(os, "replace", replaced)
    if links == "copies":
        monkeypatch.setattr(os, "link", refused_link(os.link))
    pins.pin(folder.decision(1, 5))
    assert bool(copied) is (links == "copies")
    assert synced.lost_below(tmp_path / "pins") == [] and tmp_path in synced
    # Checksums too: a torn one makes Spark refuse a whole file.
    assert all(path in synced for path in (tmp_path / "pins/state").rglob("*.*"))


# -- crashes ------------------------------------------------------------------------------------------


class Crash(BaseException):
    pass


def crash_after(monkeypatch, name, calls):
    """Make the process die at the call after `calls` calls of an os function."""
    real, left = getattr(os, name), [calls]

    def dying(*args, **kwargs):
        if not left[0]:
            raise Crash
        left[0] -= 1
        return real(*args, **kwargs)

    monkeypatch.setattr(os, name, dying)


@pytest.mark.parametrize("calls", range(0, 22, 3))
def test_a_pin_that_was_cut_off_anywhere_is_no_pin_and_can_be_made(folder, tmp_path, monkeypatch, calls):
    crash_after(monkeypatch, "link", calls)
    try:
        SparkPins(folder.log, tmp_path).pin(folder.decision(1, 5))
    except Crash:
        assert SparkPins(folder.log, tmp_path).list_pinned() == frozenset()
    monkeypatch.undo()
    pins = SparkPins(folder.log, tmp_path)
    pins.pin(folder.decision(1, 5))
    folder.purge(below=9)
    pins.restore(ONE)
    assert set(folder.files()) >= {"0/0/4_a4p0.zip", "0/1/6_a6p1.changelog"}


@pytest.mark.parametrize("calls", range(0, 22, 3))
def test_a_restore_that_was_cut_off_anywhere_is_finished_by_the_next(folder, tmp_path, monkeypatch, calls):
    pins = SparkPins(folder.log, tmp_path)
    pins.pin(folder.decision(1, 5))
    expected = {*needed(folder, 5), "0/_metadata/metadata"}
    folder.purge(below=9)
    crash_after(monkeypatch, "link", calls)
    try:
        pins.restore(ONE)
    except Crash:
        monkeypatch.undo()
        SparkPins(folder.log, tmp_path).restore(ONE)
    assert set(folder.files()) == expected


def test_garbage_of_a_cut_off_pin_goes_with_the_next_unpin(folder, pins, tmp_path, monkeypatch):
    pins.pin(folder.decision(1, 5))
    crash_after(monkeypatch, "link", 5)
    with pytest.raises(Crash):
        pins.pin(folder.decision(2, 9))
    monkeypatch.undo()
    (tmp_path / "pins/state/0/0/.9_x.zip.part").write_bytes(b"")
    pins.unpin(TWO)
    assert not [name for name in pool(tmp_path) if "9_a9" in name or name.endswith(".part")]
    assert pins.why_not_restorable(ONE) == ""
