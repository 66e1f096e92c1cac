"""Fetch PostgreSQL from Debian's packages and unpack it into a directory; nothing is installed."""

import sys
from pathlib import Path

from flinkish_spark.testing.debian import PackagesMissing
from flinkish_spark.testing.postgres import unpack_postgres

if __name__ == "__main__":
    try:
        unpack_postgres(Path(sys.argv[1]))
    except PackagesMissing as error:
        sys.exit(f"flinkish_spark: {error}")
