"""A REST server for job directories, with Flink's paths and field names; and a web page that uses it."""
