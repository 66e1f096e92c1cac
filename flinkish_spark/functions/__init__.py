"""Functions of users: what they derive from."""
