"""Run first by each Python process that a test starts: PySpark is not imported out of its zip.

Spark puts `pyspark.zip` in front of its workers' path. A zip keeps no compiled modules, so that each of some
six processes of a job compiles PySpark anew: 1.2 seconds of CPU, every time. The same files are in
site-packages, compiled. `tests/conftest.py` names this folder in PYTHONPATH.
"""

import sys

if any("site-packages" in entry for entry in sys.path):
    sys.path[:] = [entry for entry in sys.path if not entry.endswith(("/pyspark.zip", "-src.zip"))]
