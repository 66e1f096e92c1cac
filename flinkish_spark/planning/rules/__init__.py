"""The rules that make a logical plan of a stream graph, one a file; `optimizer.py` has their order."""
