"""Jobs as scripts in Spark's SQL: tables that are sources and sinks, views, and inserts."""
