"""Files: the source, and the sink whose Parquet, JSON, CSV, text and Avro files appear with their checkpoint.

Files are staged under hidden names below the target, and become visible by renames that a record in
the job directory foresees: see :mod:`flinkish_spark.connectors.files.committer`.
"""
