"""Fetch PostgreSQL and MariaDB from Debian's packages into a directory; nothing is installed."""

import sys
from pathlib import Path

from tests.support.debian import PackagesMissing
from tests.support.mariadb import unpack_mariadb
from tests.support.postgres import unpack_postgres

if __name__ == "__main__":
    build = Path(sys.argv[1])
    try:
        unpack_postgres(build / "postgres")
        unpack_mariadb(build / "mariadb")
    except PackagesMissing as error:
        sys.exit(f"flinkish_spark: {error}")
