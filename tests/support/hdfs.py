"""HDFS for tests, and YARN beside it: all of a cluster in one JVM, on loopback."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from flinkish_spark.core.store_spec import StoreSpec
from tests.support.buckets import ROOT, BucketServer
from tests.support.local_server import HOST

_PROGRAM = ROOT / "tests/support/MiniHadoop.java"


class LocalHdfs(BucketServer):
    """HDFS by Hadoop's MiniDFSCluster.

    Parameters
    ----------
    jars
        Where its JARs are (`make hdfs`).
    """

    #: What is started beside it.
    _beside: tuple[str, ...] = ()

    def __init__(self, jars: Path) -> None:
        super().__init__()
        self._jars = jars
        self.folder = Path(tempfile.mkdtemp(prefix="test-hdfs-", dir=ROOT / "build"))

    @staticmethod
    def why_not(jars: Path) -> str:
        """Return why it cannot be started here; empty if it can."""
        if not any(jars.glob("hadoop-client-minicluster-*.jar")):
            return "Hadoop's MiniDFS is not there: `make hdfs`"
        return ""

    def _command(self) -> list[str]:
        flags = ["-Xmx600m", "-XX:TieredStopAtLevel=1", f"-Dtest.build.data={self.folder}/data"]
        words = [str(_PROGRAM), str(self.folder), str(self.port), *self._beside]
        return ["java", *flags, "-cp", f"{self._jars}/*", *words]

    def _make_bucket(self, name: str) -> None:
        # Folders come with their first file.
        if not (self.folder / "ready").exists():
            raise OSError("it has not said that it is ready")

    def _spec(self, bucket: str, folder: str) -> StoreSpec:
        return StoreSpec.parse(f"hdfs://{HOST}:{self.port}/{bucket}/{folder}")

    def _end(self) -> None:
        super()._end()
        shutil.rmtree(self.folder, ignore_errors=True)


class LocalYarn(LocalHdfs):
    """The same, and YARN with one node by Hadoop's MiniYARNCluster; a HADOOP_CONF_DIR is in `conf`."""

    _beside = ("yarn",)

    @property
    def conf(self) -> Path:
        """What clients are given as HADOOP_CONF_DIR."""
        return self.folder / "conf"

    @property
    def containers(self) -> Path:
        """Below which processes of applications run and log."""
        return self.folder / "data"

    def _command(self) -> list[str]:
        java = Path(shutil.which("java") or "java").resolve()
        # Containers are started with the JAVA_HOME of their node.
        return ["env", f"JAVA_HOME={java.parents[1]}", *super()._command()]
