"""The command line `flinkish`: run a program, show its checkpoints, send it requests, rewind it.

Except for `run`, `demo` and `doctor` it only reads and writes the job directory: no Spark, no JVM, no broker,
no user code. Its stable output for programs is described in `docs/command-line.md`.
"""


def main() -> None:
    """Run `flinkish`, and end the process with one of :class:`~flinkish_spark.cli.client.ExitStatus`."""
    import io
    import sys

    from flinkish_spark.cli.app import app

    if isinstance(sys.stdout, io.TextIOWrapper):
        # A character that the terminal's encoding lacks must not fail the command.
        sys.stdout.reconfigure(errors="replace")
    app(prog_name="flinkish")
