"""Fetch PostgreSQL and MariaDB from Debian's packages into a directory; nothing is installed."""

import sys
from pathlib import Path

from flinkish_spark.testing.debian import PackagesMissing
from flinkish_spark.testing.mariadb import unpack_mariadb
from flinkish_spark.testing.postgres import unpack_postgres

if __name__ == "__main__":
    build = Path(sys.argv[1])
    try:
        unpack_postgres(build / "postgres")
        unpack_mariadb(build / "mariadb")
    except PackagesMissing as error:
        sys.exit(f"flinkish_spark: {error}")
