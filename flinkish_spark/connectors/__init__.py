"""One record per confirmed checkpoint, for readers of several sinks; `base` is the contract."""
