"""A REST server over job directories, with Flink's paths and field names; and a page over its answers."""
