"""The Iceberg source with Spark: a table is copied into another, across the death of the job."""

from __future__ import annotations

from collections import Counter

import pyarrow as pa

from flinkish_spark import IcebergSink
from flinkish_spark.sources import Discovery, IcebergSource
from tests.support.iceberg_rig import catalog_of, catalog_properties, rows_in
from tests.support.jobs import await_that, environment, running
from tests.support.two_phase_app import crash_at


def test_a_copy_of_a_table_has_each_row_once_although_the_job_dies(spark, tmp_path) -> None:
    catalog, properties = catalog_of(tmp_path), catalog_properties(tmp_path)
    schema = pa.schema([("id", pa.int64()), ("tags", pa.map_(pa.string(), pa.int32()))])
    catalog.create_table("shop.orders", schema)

    def append(*ids: int) -> None:
        rows = [{"id": one, "tags": [("n", one)] if one % 2 else None} for one in ids]
        catalog.load_table("shop.orders").append(pa.Table.from_pylist(rows, schema))

    def copied() -> list[int]:
        found = rows_in(catalog.load_table("shop.copies"))
        assert all(tags == f'[["n", {one}]]' for one, tags in found if one % 2)
        return sorted(one for one, _ in found.elements())

    def job(**settings):
        env = environment(spark, tmp_path / "job", trigger_interval_ms=100)
        source = IcebergSource("lake.shop.orders", properties, discover_every_ms=100, **settings)
        stream = env.from_source(source, uid="orders")
        stream.sink_to(IcebergSink("lake.shop.copies", properties, create_table=True), uid="copies")
        return env

    append(1, 2)
    crash_at(job(), "decision:after:1")
    append(3)
    with running(job()) as client:
        await_that(lambda: copied() == [1, 2, 3], client)
        table = catalog.load_table("shop.orders")
        table.maintenance.expire_snapshots().by_id(table.snapshots()[0].snapshot_id).commit()
        append(4, 5)
        await_that(lambda: copied() == [1, 2, 3, 4, 5], client)
        client.stop_with_checkpoint()
        assert client.wait(timeout_ms=120_000)
    once = environment(spark, tmp_path / "once", trigger_interval_ms=100)
    source = IcebergSource("lake.shop.orders", properties, discovery=Discovery.ONCE)
    stream = once.from_source(source, uid="orders")
    stream.sink_to(IcebergSink("lake.shop.once", properties, create_table=True), uid="once")
    once.execute()
    assert Counter(one for one, _ in rows_in(catalog.load_table("shop.once"))) == Counter([1, 2, 3, 4, 5])
