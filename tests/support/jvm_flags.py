"""Options of the JVMs in tests: what starts fast, with room for the code of many jobs in one JVM."""

from __future__ import annotations

#: With one compiler a JVM has 48 MB for code by itself; eight jobs that restart may fill them, which ends it.
#: At 21 MB of classes, of which Spark alone has more, a JVM would collect all of its heap for the first time.
#: Moved to an address of chance, an archive of classes has each pointer written anew: 0.12 s of CPU a start.
JVM_FLAGS = (
    "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:ReservedCodeCacheSize=192m -XX:MetaspaceSize=256m "
    "-XX:+UnlockDiagnosticVMOptions -XX:ArchiveRelocationMode=0"
)
