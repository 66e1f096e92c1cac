"""Kafka: sources, the sink and its halves, the client below them, the drop-in format, chained jobs."""
