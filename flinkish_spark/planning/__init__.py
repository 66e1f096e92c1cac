"""The stream graph and its plan."""
