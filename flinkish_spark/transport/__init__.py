"""Rows on their way between tasks: which columns, which key group, which form."""
