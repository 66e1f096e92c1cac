"""The drop-in format: Spark's own `format("kafka")` with exactly-once writes, by changing one word."""
