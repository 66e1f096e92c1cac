"""Keep the classes that JVMs of tests load: `python -m tests.support.archive_classes DRIVER BROKER`.

A JVM that dies of a kill -9 is followed by another one, and each reads, verifies and links some 20,000
classes before its first micro-batch: a third of the processor time that it uses until its first checkpoint.
A broker, of which some tests start their own, is the same. `tests/conftest.py` names the files to every
driver and to every broker that a test starts; a JVM that cannot use its one (another class path, another
JDK) goes on without.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
import time
from pathlib import Path

from demo.rig import ROOT, Rig
from flinkish_spark.testing.broker import LocalBroker
from tests.support.jvm_flags import JVM_FLAGS

_PATIENCE_S = 300


def archive_broker(file: Path) -> None:
    """Start a broker, stop it and write what its JVM loaded; its storage's formatter is overwritten."""
    file.unlink(missing_ok=True)
    os.environ["JAVA_TOOL_OPTIONS"] = f"{JVM_FLAGS} -XX:ArchiveClassesAtExit={file}"
    with (
        tempfile.TemporaryDirectory(dir=ROOT / "build") as folder,
        LocalBroker(folder, jars_dir=ROOT / "build" / "broker-jars") as broker,
    ):
        broker.stop(_PATIENCE_S * 1000)
        if not file.exists():
            raise RuntimeError(f"the broker wrote no {file.name}: {broker.log.read_text()[-2000:]}")
    del os.environ["JAVA_TOOL_OPTIONS"]


def archive(file: Path) -> None:
    """Run the demo's job for a checkpoint or two and write what its JVM loaded."""
    file.unlink(missing_ok=True)
    with Rig(
        ROOT / "build" / "classes", ROOT / "demo" / "app.py", random.Random(1), interval_ms=1_000
    ) as rig:
        rig.produce(seed=1, rate=100.0)
        # SPARK_SUBMIT_OPTS reaches the driver's JVM only, not the short one that puts its command together.
        options = {"JAVA_TOOL_OPTIONS": JVM_FLAGS}
        rig.job.start({**options, "SPARK_SUBMIT_OPTS": f"-XX:ArchiveClassesAtExit={file}"})
        rig.wait_for(lambda: rig.confirmed >= 1, "a checkpoint", _PATIENCE_S)
        jvm = rig.job._jvm()
        status = rig.job.terminate(_PATIENCE_S)
        # The JVM writes when its driver is gone.
        deadline = time.monotonic() + _PATIENCE_S
        while jvm.is_running() and time.monotonic() < deadline:
            time.sleep(0.2)
        if status != 0 or not file.exists():
            raise rig.job.failed(f"ended with status {status} and wrote no {file.name}")


if __name__ == "__main__":
    archive_broker(Path(sys.argv[2]).resolve())
    archive(Path(sys.argv[1]).resolve())
