"""Delta tables: sources, the sink with its writer and committer, the manifest."""
