"""`flinkish`, the command line: run a program, look at its checkpoints, ask it for something, go back.

But for `run`, `demo` and `doctor` it reads and writes the job directory and nothing else: no Spark, no JVM,
no broker, no code from a file. What it says to programs is in `docs/command-line.md` and stays as it is.
"""


def main() -> None:
    """Run `flinkish`; the process ends with one of :class:`~flinkish_spark.cli.client.ExitStatus`."""
    import io
    import sys

    from flinkish_spark.cli.app import app

    if isinstance(sys.stdout, io.TextIOWrapper):
        # A name that the terminal's encoding cannot show must not end the command.
        sys.stdout.reconfigure(errors="replace")
    app(prog_name="flinkish")
