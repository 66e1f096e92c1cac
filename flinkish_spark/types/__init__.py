"""Types and values: what a user declares, and rows between Python and Arrow, exact both ways."""
