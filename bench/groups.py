"""What the bench measures together, beside whom, and what it should come to. No Spark in here."""

from __future__ import annotations

from dataclasses import dataclass, field

#: Engines by workload, ours first. `per-key` is applyInPandasWithState, `tws-*` transformWithState.
_PYTHON = ("per-key", "tws-row", "tws-pandas")
WORKLOADS = {
    "sum": ("element", "vectorised", "fold", "native", *_PYTHON),
    "session": ("ours", "fold", "native", *_PYTHON),
    "sliding": ("ours", "fold", "native", *_PYTHON),
    "timers": ("ours", "vectorised", *_PYTHON),
    "rises": ("ours", "text", *_PYTHON),
    "logins": ("ours", "text", "tws-row", "tws-pandas"),
    "unpaid": ("ours", "text", "tws-row", "tws-pandas"),
}
#: Workloads that look for a pattern.
PATTERNS = ("rises", "logins", "unpaid")
#: `text` is `ours` with everything as SQL text that is a function of Python there.
OURS = ("element", "vectorised", "fold", "ours", "text")
KEYED = tuple(f"{work}-{engine}" for work, engines in WORKLOADS.items() for engine in engines)
MAIN = (
    "flinkish-kafka",
    "flinkish-kafka-delta",
    "native-aggregate",
    "tws-row",
    "tws-row-tuned",
    "tws-pandas",
)
#: variant -> (source, sink)
DOOR = {
    "spark-source": ("kafka", "noop"),
    "door-source": ("flinkish-kafka", "noop"),
    "spark-sink": ("kafka", "kafka"),
    "door-sink": ("kafka", "flinkish-kafka"),
    "door-both": ("flinkish-kafka", "flinkish-kafka"),
}
#: Variant -> the milliseconds between two checkpoints; None for Spark's own sink.
COPY = {
    "copy-kafka-spark": None,
    "copy-kafka-10s": 10_000,
    "copy-kafka-1s": 1_000,
    "copy-kafka-atomic-10s": 10_000,
    "copy-kafka-atomic-1s": 1_000,
    "copy-delta-spark": None,
    "copy-delta-10s": 10_000,
    "copy-delta-1s": 1_000,
}
#: For each copy of ours, whom it is compared with, round by round: Spark's sink, or ours that is not atomic.
PAIRS = {
    v: v.replace("-atomic", "") if "atomic" in v else f"{v.rpartition('-')[0]}-spark"
    for v, interval in COPY.items()
    if interval is not None
}

#: How late a record may come, for watermarks.
LATE_MS = 1_000


@dataclass(frozen=True)
class Aim:
    """The rate of a variant should be so many times that of another."""

    variant: str
    peer: str
    at_least: float


@dataclass(frozen=True)
class Group:
    """Variants that are measured together; a session of each is warm while they are."""

    variants: tuple[str, ...]
    peers: tuple[str, ...] = ()
    aims: tuple[Aim, ...] = ()
    settings: dict[str, int] = field(default_factory=dict)


def _keyed(work, settings=None, engines=None, more=()):
    names = tuple(f"{work}-{engine}" for engine in engines or WORKLOADS[work])
    beside = (f"{work}-tws-row", 4.0), (f"{work}-tws-pandas", 8.0)
    aims = [Aim(name, *one) for name in names if name.partition("-")[2] in OURS for one in beside]
    return Group(
        names,
        tuple(peer for peer in (beside[0][0], beside[1][0], f"{work}-native") if peer in names),
        (*(aim for aim in aims if aim.peer in names and settings is None), *more),
        {"events": 2_500_000, "batch": 500_000, **(settings or {})},
    )


def _patterns():
    """Patterns: two rising values; three failures, then a success; an order that nobody pays."""
    groups = [_keyed(work) for work in PATTERNS]
    return Group(
        tuple(variant for group in groups for variant in group.variants),
        tuple(peer for group in groups for peer in group.peers),
        tuple(aim for group in groups for aim in group.aims),
        groups[0].settings,
    )


def _beside_native(at_least):
    return tuple(Aim(f"sum-{engine}", "sum-native", at_least) for engine in ("vectorised", "fold"))


GROUPS = {
    "main": Group(
        MAIN,
        ("tws-row", "tws-pandas"),
        (Aim("flinkish-kafka", "tws-row", 2.0), Aim("flinkish-kafka", "tws-pandas", 4.0)),
    ),
    "door": Group(tuple(DOOR), ("spark-source", "spark-sink")),
    "copy": Group(tuple(COPY), settings={"events": 6_000_000, "batch": 200_000}),
    "sum": _keyed("sum", more=_beside_native(0.8)),
    "session": _keyed("session"),
    "sliding": _keyed("sliding"),
    "timers": _keyed("timers"),
    "cep": _patterns(),
    "sum-1m": _keyed(
        "sum",
        {"keys": 1_000_000},
        ("element", "vectorised", "fold", "native"),
        _beside_native(1.5),
    ),
    # A key of a million is new in most of its records: Spark's ways in Python take minutes for few of them.
    "sum-1m-python": _keyed(
        "sum", {"keys": 1_000_000, "events": 300_000, "batch": 100_000}, ("vectorised", "fold", *_PYTHON)
    ),
}
VARIANTS = tuple(dict.fromkeys(variant for group in GROUPS.values() for variant in group.variants))


def picked(variants):
    """Return a group of a few variants, with what the first group says of them that has them all."""
    of_all = next((group for group in GROUPS.values() if set(variants) <= set(group.variants)), Group(()))
    return Group(
        tuple(variants),
        tuple(peer for peer in of_all.peers if peer in variants),
        tuple(aim for aim in of_all.aims if {aim.variant, aim.peer} <= set(variants)),
        of_all.settings,
    )
