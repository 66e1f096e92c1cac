"""HDFS for tests: NameNode and DataNode in one JVM, on loopback."""

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
        Where Maven has put it (`make hdfs`).
    """

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
        flags = ["-Xmx400m", "-XX:TieredStopAtLevel=1", "-cp", f"{self._jars}/*"]
        return ["java", *flags, str(_PROGRAM), str(self.folder), str(self.port)]

    def _make_bucket(self, name: str) -> None:
        # Folders come with their first file.
        if not (self.folder / "ready").exists():
            raise OSError("it has not said that it is ready")

    def _spec(self, bucket: str, folder: str) -> StoreSpec:
        return StoreSpec.parse(f"hdfs://{HOST}:{self.port}/{bucket}/{folder}")

    def _end(self) -> None:
        super()._end()
        shutil.rmtree(self.folder, ignore_errors=True)
