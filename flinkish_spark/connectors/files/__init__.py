"""The file sink: Parquet, JSON lines, CSV, text and Avro files that appear with their checkpoint.

Files are staged under hidden names below the target, and become visible by renames that a record in
the job directory foresees: see :mod:`flinkish_spark.connectors.files.committer`.
"""
