"""Checkpoints of a running job: the coordinator, the decision, the commit, and the retention.

The rules are in :mod:`flinkish_spark.protocol`; here are the threads, files and calls that follow them.
"""
