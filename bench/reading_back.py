"""What a variant has written, read by its own session when nothing is timed."""

from __future__ import annotations

from pyspark.sql import functions as F

from bench.checking import work_of

#: Windows are told by their beginning, as a number.
_FIELDS = "user STRING, begins LONG, total LONG, orders LONG"


def read_back(spark, args, folder):
    """Return what `checking.check` needs: where the results are as parquet, or digests of what was copied."""
    work = work_of(args.variant)
    if work is None:
        return {"writes": "nothing"}
    if work == "copy":
        delta = "delta" in args.variant
        found = (
            spark.read.format("delta").load(str(folder / "table"))
            if delta
            else _topic(spark, args, args.sink)
        )
        return {"found": _digest(found), "wanted": _digest(_topic(spark, args, args.source))}
    value = F.from_json(F.col("value").cast("string"), _FIELDS)
    rows = _topic(spark, args, args.sink).select(value.alias("r")).select("r.*")
    if work == "sum":
        # Of a key's rows the last one counts; whoever emits less often has the same there.
        last = rows.groupBy("user").agg(F.max(F.struct("orders", "total")).alias("last"))
        rows = last.select("user", "last.total", "last.orders")
    else:
        rows = rows.select("user", "begins", "total")
    path = str(folder.parent / "results")
    rows.write.mode("overwrite").parquet(path)
    return {"results": path}


def _topic(spark, args, topic):
    reader = spark.read.format("kafka").option("kafka.bootstrap.servers", args.bootstrap_servers)
    return reader.option("subscribe", topic).option("kafka.isolation.level", "read_committed").load()


def _digest(frame):
    hashes = F.sum(F.xxhash64("value").cast("decimal(38,0)"))
    records, digest = frame.agg(F.count("*"), hashes).first()
    return {"records": records, "digest": str(digest)}
