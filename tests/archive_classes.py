"""`python -m tests.archive_classes FILE`: keep the classes that a job's JVM loads, for those of tests.

A JVM that dies of a kill -9 is followed by another one, and each reads, verifies and links some 20,000
classes before its first micro-batch: a third of the processor time that it uses until its first checkpoint.
`tests/conftest.py` names the file to every driver that a test starts; a JVM that cannot use it (another
class path, another JDK) goes on without.
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path

from demo.rig import ROOT, Rig
from tests.jvm_flags import JVM_FLAGS

_PATIENCE_S = 300


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
    archive(Path(sys.argv[1]).resolve())
