"""Rules of the optimizer: each decides one thing about a logical plan, without a session or a DataFrame."""
