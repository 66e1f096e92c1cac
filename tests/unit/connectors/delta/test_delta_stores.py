"""Tables in a store: its outages, its names, and how often it is asked."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from flinkish_spark.connectors.delta import store_system
from flinkish_spark.connectors.delta.store_system import _Handler
from flinkish_spark.connectors.splits import SourceUnavailable
from flinkish_spark.core.errors import ConfigError
from flinkish_spark.sources import DeltaTableSource
from tests.support.folder_as_s3 import FolderAsS3
from tests.unit.connectors.delta.test_delta_table_source import Table, read


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FolderAsS3]:
    with FolderAsS3(tmp_path / "bkt") as found:
        yield found


def source_of(store: FolderAsS3, name: str = "t") -> DeltaTableSource:
    return DeltaTableSource(f"s3://bkt/{name}", store_options=store.options)


def test_an_outage_of_a_store_while_a_file_is_read_is_no_damage(store: FolderAsS3, tmp_path: Path) -> None:
    table = Table(store.folder / "t", n="long")
    table.commit(table.add("x.parquet", {"n": [1, 2]}))
    source = source_of(store)
    assert read(source, tmp_path) == [(1,), (2,)]
    store.refuse_data()
    with pytest.raises(SourceUnavailable, match="ConnectionError") as found:
        read(source, tmp_path, "other")
    assert not found.value.ends_when_repeated


def test_a_damaged_file_of_a_store_is_no_outage(store: FolderAsS3, tmp_path: Path) -> None:
    table = Table(store.folder / "t", n="long")
    table.commit(table.add("x.parquet", {"n": list(range(1_000))}))
    path = store.folder / "t" / "x.parquet"
    data = path.read_bytes()
    for at, damaged in enumerate((data[:-20], data[-900:], data[:4] + data[400:])):
        path.write_bytes(damaged)
        with pytest.raises(Exception, match=r"x\.parquet cannot be read") as found:
            read(source_of(store), tmp_path, f"job{at}")
        assert not isinstance(found.value, SourceUnavailable)


@pytest.mark.parametrize("name", ["t x", "t0/", "tü", "a+b//"])
def test_a_table_in_a_store_is_read_whatever_its_name(store: FolderAsS3, tmp_path: Path, name: str) -> None:
    """deltalake names a file with a deletion vector by its URL."""
    table = Table(store.folder / name.rstrip("/"), ["p"], features=["deletionVectors"], n="long", p="string")
    # The example of Delta's protocol: rows 3, 4, 7, 11, 18 and 29.
    letters = "^Bg9^0rr910000000000iXQKl0rr91000f55c8Xg0@@D72lkbi5=-{L"
    vector = {"storageType": "i", "pathOrInlineDv": letters, "sizeInBytes": 44, "cardinality": 6}
    more = {"deletionVector": vector, "partitionValues": {"p": "ö b"}}
    table.commit(table.add("p=ö b/x.parquet", {"n": list(range(40))}, **more))
    found = {row[0] for row in read(source_of(store, name), tmp_path)}
    assert found == set(range(40)) - {3, 4, 7, 11, 18, 29}


def test_a_store_is_connected_to_once_by_a_process(
    store: FolderAsS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    monkeypatch.setattr(store_system, "_Handler", lambda *given: made.append(given) or _Handler(*given))
    table = Table(store.folder / "t", n="long")
    table.commit(*(table.add(f"{at}.parquet", {"n": [at]}) for at in range(9)))
    assert read(source_of(store), tmp_path) == [(at,) for at in range(9)]
    assert len(made) == 1

    # What a secret is now is asked each time.
    monkeypatch.setenv("AWS_SESSION_TOKEN", "new")
    assert read(source_of(store), tmp_path, "other") == [(at,) for at in range(9)]
    assert len(made) == 2


def test_a_vector_that_does_not_fit_its_file_is_no_outage(store: FolderAsS3, tmp_path: Path) -> None:
    table = Table(store.folder / "t", features=["deletionVectors"], n="long")
    letters = "^Bg9^0rr910000000000iXQKl0rr91000f55c8Xg0@@D72lkbi5=-{L"
    vector = {"storageType": "i", "pathOrInlineDv": letters, "sizeInBytes": 44, "cardinality": 6}
    table.commit(table.add("x.parquet", {"n": list(range(20))}, deletionVector=vector))
    with pytest.raises(ConfigError, match="mask length 30 exceeds"):
        read(source_of(store), tmp_path)


def test_the_files_of_a_version_are_found_by_one_listing(store: FolderAsS3, tmp_path: Path) -> None:
    table = Table(store.folder / "t", ["p"], n="long", p="string")
    adds = [table.add(f"p=ö b/{at}.parquet", {"n": [at]}, partitionValues={"p": "ö b"}) for at in range(9)]
    table.commit(*adds)
    source = source_of(store)
    store.requests()
    assert len(source._look(None)[0]) == 9  # type: ignore[arg-type]
    assert not [one for one in store.requests() if one.startswith("HEAD") and "parquet" in one]
