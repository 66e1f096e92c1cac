"""`python -m flinkish_spark.cli`, for when the script `flinkish` is not on the PATH."""

from __future__ import annotations

from flinkish_spark.cli import main

main()
