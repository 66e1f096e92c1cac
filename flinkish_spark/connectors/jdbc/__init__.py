"""The JDBC sink: one database transaction per checkpoint, out of the write-ahead buffer."""
