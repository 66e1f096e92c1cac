"""The class that writes a query's checkpoint files: what Spark's own promises, without a process per file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from py4j.protocol import Py4JJavaError

from flinkish_spark.bridge import settings
from flinkish_spark.bridge.session import LOCAL_CHECKPOINT_FILES, jvm
from flinkish_spark.bridge.settings import query_conf

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SPARKS = "org.apache.spark.sql.execution.streaming.checkpointing.FileContextBasedCheckpointFileManager"
SETTING = "spark.sql.streaming.checkpointFileManagerClass"
LOCAL_FILES = "fs.AbstractFileSystem.file.impl"


class Manager:
    """A checkpoint file manager of a folder."""

    def __init__(self, spark: SparkSession, name: str, folder: Path, conf: Any = None) -> None:
        self._jvm, self._folder = jvm(spark), folder
        conf = conf or spark._jsc.hadoopConfiguration()
        made: Any = self._jvm
        for part in name.split("."):
            made = getattr(made, part)
        self.files = made(self.path("."), conf)

    def path(self, name: str) -> Any:
        return self._jvm.org.apache.hadoop.fs.Path(f"file://{self._folder / name}")

    def begin(self, name: str, *, overwrite: bool) -> Any:
        return self.files.createAtomic(self.path(name), overwrite)

    def write(self, name: str, content: bytes, *, overwrite: bool) -> None:
        out = self.begin(name, overwrite=overwrite)
        out.write(content)
        out.close()


@pytest.fixture
def ours(spark: SparkSession, tmp_path: Path) -> Manager:
    return Manager(spark, LOCAL_CHECKPOINT_FILES, tmp_path)


def test_a_file_appears_whole_and_is_read_back(ours: Manager, tmp_path: Path) -> None:
    out = ours.begin("0", overwrite=False)
    out.write(b"x" * 100_000)
    assert not (tmp_path / "0").exists()
    out.close()
    assert (tmp_path / "0").read_bytes() == b"x" * 100_000
    assert [entry.name for entry in tmp_path.iterdir()] == ["0"]
    stream = ours.files.open(ours.path("0"))
    assert stream.read() == ord("x")
    stream.close()


def test_what_is_there_is_not_replaced_unless_asked(ours: Manager, tmp_path: Path) -> None:
    """Of two drivers that write the same entry of a log, one has to be told that it is not alone."""
    first, second = ours.begin("0", overwrite=False), ours.begin("0", overwrite=False)
    second.write(b"second")
    second.close()
    first.write(b"first")
    with pytest.raises(Py4JJavaError, match=r"org\.apache\.hadoop\.fs\.FileAlreadyExistsException"):
        first.close()
    assert (tmp_path / "0").read_bytes() == b"second"
    ours.write("0", b"third", overwrite=True)
    assert (tmp_path / "0").read_bytes() == b"third"


def test_a_checksum_of_what_was_there_before_goes_away(ours: Manager, tmp_path: Path) -> None:
    """Hadoop keeps one beside each file; a start without our JAR writes such files."""
    (tmp_path / ".0.crc").write_bytes(b"crc\0\0\0\2\0\1\2\3\4")
    ours.write("0", b"new", overwrite=False)
    stream = ours.files.open(ours.path("0"))
    assert stream.read() == ord("n")
    stream.close()
    assert [entry.name for entry in tmp_path.iterdir()] == ["0"]


def test_a_cancelled_file_leaves_nothing(ours: Manager, tmp_path: Path) -> None:
    out = ours.begin("0", overwrite=True)
    out.write(b"half")
    out.cancel()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_gone_is_not_made_again(ours: Manager, tmp_path: Path) -> None:
    """A newer owner renames the folder; what an older one writes must not give the name back its meaning."""
    with pytest.raises(Py4JJavaError, match=r"java\.io\.FileNotFoundException"):
        ours.begin("offsets/0", overwrite=False)
    assert list(tmp_path.iterdir()) == []


def test_files_have_the_permissions_that_sparks_own_have(
    spark: SparkSession, ours: Manager, tmp_path: Path
) -> None:
    ours.write("ours", b"", overwrite=True)
    Manager(spark, SPARKS, tmp_path).write("sparks", b"", overwrite=True)
    assert (tmp_path / "ours").stat().st_mode == (tmp_path / "sparks").stat().st_mode


def test_no_process_is_started_for_a_file(spark: SparkSession, ours: Manager, tmp_path: Path) -> None:
    pid = jvm(spark).java.lang.ProcessHandle.current().pid()

    def faults_of_children() -> int:
        """Page faults of processes that the JVM has waited for; each process has hundreds."""
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[8])

    untouched = faults_of_children()
    jvm(spark).java.lang.Runtime.getRuntime().exec("true").waitFor()
    before = faults_of_children()
    assert before > untouched, "a process would be seen"

    def faults_of_writing(turn: int) -> int:
        begun = faults_of_children()
        for number in range(20):
            ours.write(f"{turn}-{number}", b"", overwrite=number % 2 == 0)
        return faults_of_children() - begun

    # A worker of Spark's may end meanwhile: it is a child of the JVM's, too.
    assert 0 in map(faults_of_writing, range(3))


def test_a_query_of_ours_uses_it_and_a_users_own_choice_stays(spark: SparkSession) -> None:
    with query_conf(spark, 2):
        assert spark.conf.get(SETTING) == LOCAL_CHECKPOINT_FILES
    assert spark.conf.get(SETTING, None) is None
    spark.conf.set(SETTING, SPARKS)
    try:
        with query_conf(spark, 2):
            assert spark.conf.get(SETTING) == SPARKS
        assert spark.conf.get(SETTING) == SPARKS
    finally:
        spark.conf.unset(SETTING)


def test_without_our_class_a_file_has_no_checksum_which_would_be_another_process(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "has_checkpoint_files", lambda session: False)
    with query_conf(spark, 2):
        conf = spark._jsparkSession.sessionState().newHadoopConf()
        usual = Manager(spark, SPARKS, tmp_path, conf)
    usual.write("0", b"content", overwrite=False)
    assert [entry.name for entry in tmp_path.iterdir()] == ["0"]
    with pytest.raises(Py4JJavaError, match=r"java\.io\.FileNotFoundException"):
        usual.begin("offsets/0", overwrite=False)
    assert spark.conf.get(LOCAL_FILES, None) is None


def test_a_platforms_own_class_for_local_files_stays(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "has_checkpoint_files", lambda session: False)
    conf = spark.sparkContext._jsc.hadoopConfiguration()
    default = conf.get(LOCAL_FILES)
    conf.set(LOCAL_FILES, "org.example.WorkspaceFiles")
    try:
        with query_conf(spark, 2):
            assert spark.conf.get(LOCAL_FILES, None) is None
    finally:
        conf.set(LOCAL_FILES, default)
    spark.conf.set(LOCAL_FILES, "org.example.OwnFiles")
    try:
        with query_conf(spark, 2):
            assert spark.conf.get(LOCAL_FILES) == "org.example.OwnFiles"
    finally:
        spark.conf.unset(LOCAL_FILES)
