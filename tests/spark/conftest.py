"""Databases for tests of the JDBC sink."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from flinkish_spark.testing.mariadb import LocalMariaDb, unpack_mariadb
from flinkish_spark.testing.postgres import LocalPostgres, unpack_postgres
from tests.conftest import BUILD
from tests.databases import TestDatabase

_NUMBERS = itertools.count()


@pytest.fixture(scope="session")
def postgres() -> Iterator[LocalPostgres]:
    """One server for all tests. Whoever kills or pauses a server takes one of its own."""
    with LocalPostgres(unpack_postgres(BUILD / "postgres")) as server:
        yield server


@pytest.fixture
def postgres_database(postgres: LocalPostgres) -> Iterator[TestDatabase]:
    """A database of the test's own."""
    name = f"test_{next(_NUMBERS)}"
    with postgres.connect() as connection:
        connection.execute(f"CREATE DATABASE {name}")
    url = postgres.url.replace(f"/{postgres.database}", f"/{name}")
    found = TestDatabase(url, postgres.user, postgres.password)
    yield found
    found.close()


@pytest.fixture(scope="session")
def mariadb() -> Iterator[LocalMariaDb]:
    """One server for all tests."""
    with LocalMariaDb(unpack_mariadb(BUILD / "mariadb")) as server:
        yield server


@pytest.fixture
def mariadb_database(mariadb: LocalMariaDb) -> Iterator[TestDatabase]:
    """A database of the test's own."""
    name = f"test_{next(_NUMBERS)}"
    with mariadb.connect() as connection, connection.cursor() as cursor:
        cursor.execute(f"CREATE DATABASE {name} CHARACTER SET utf8mb4")
    url = mariadb.url.replace(f"/{mariadb.database}", f"/{name}")
    found = TestDatabase(url, mariadb.user, mariadb.password)
    yield found
    found.close()


@pytest.fixture
def sqlite_database(tmp_path: Path) -> Iterator[TestDatabase]:
    found = TestDatabase(f"jdbc:sqlite:{tmp_path / 'database'}")
    yield found
    found.close()


@pytest.fixture(params=["sqlite", "postgres", "mariadb"])
def database(request: pytest.FixtureRequest) -> TestDatabase:
    """Each of the databases that run here."""
    found = request.getfixturevalue(f"{request.param}_database")
    assert isinstance(found, TestDatabase)
    return found
