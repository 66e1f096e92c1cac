"""Databases for tests of the JDBC sink."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.databases import TestDatabase
from tests.support.mariadb import LocalMariaDb
from tests.support.postgres import LocalPostgres


@pytest.fixture(scope="session")
def postgres(service: Callable[[str], Any]) -> LocalPostgres:
    """One server for all tests. Whoever kills or pauses a server takes one of its own."""
    found: LocalPostgres = service("postgres")
    return found


@pytest.fixture
def postgres_database(postgres: LocalPostgres) -> Iterator[TestDatabase]:
    """A database of the test's own."""
    name = _new_name()
    with postgres.connect() as connection:
        connection.execute(f"CREATE DATABASE {name}")
    url = postgres.url.replace(f"/{postgres.database}", f"/{name}")
    found = TestDatabase(url, postgres.user, postgres.password)
    yield found
    found.close()


@pytest.fixture(scope="session")
def mariadb(service: Callable[[str], Any]) -> LocalMariaDb:
    """One server for all tests."""
    found: LocalMariaDb = service("mariadb")
    return found


@pytest.fixture
def mariadb_database(mariadb: LocalMariaDb) -> Iterator[TestDatabase]:
    """A database of the test's own."""
    name = _new_name()
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


@pytest.fixture(params=["sqlite", "postgres", pytest.param("mariadb", marks=pytest.mark.nightly)])
def database(request: pytest.FixtureRequest) -> TestDatabase:
    """Each of the databases that run here; MariaDB at night, and where a test asks for it by name."""
    found = request.getfixturevalue(f"{request.param}_database")
    assert isinstance(found, TestDatabase)
    return found


def _new_name() -> str:
    # The server is shared with other processes that run tests.
    return f"test_{uuid.uuid4().hex[:12]}"
