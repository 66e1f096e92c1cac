"""Iceberg tables by pyiceberg: tasks write Parquet files, the driver commits them by one snapshot."""
