"""Delta tables: sources, the sink, what it stages and commits, its manifest."""
