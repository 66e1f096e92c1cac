"""From rounds to tables: medians, ratios to the peers, and the aims with what came of them."""

from __future__ import annotations

import statistics

from rich.console import Console
from rich.table import Table

from bench.groups import PAIRS

_MEDIANS = ("trigger_to_decision_ms", "decision_to_visible_ms", "batch_ms")


def summary_of(runs, events):
    """Return the figures of one variant over its rounds."""
    rates = [run["events_per_s"] for run in runs]
    found = {
        "rounds": len(runs),
        "events_per_s": round(statistics.median(rates)),
        "min": round(min(rates)),
        "max": round(max(rates)),
        "events_per_cpu_s": round(statistics.median(events / run["cpu_seconds"] for run in runs)),
    }
    for name in _MEDIANS:
        values = [ms for run in runs for ms in run.get(name, [])]
        if values:
            found[name] = round(statistics.median(values))
    return found


def report_of(group, results, events):
    """Return figures by variant, aims with their outcome, and medians of pairs."""
    found = {variant: summary_of(runs, events) for variant, runs in results.items()}
    for one in found.values():
        for peer in group.peers:
            for name, key in ("times", "events_per_s"), ("times_per_cpu", "events_per_cpu_s"):
                one.setdefault(name, {})[peer] = round(one[key] / found[peer][key], 2)
    aims = []
    for aim in group.aims:
        times = found[aim.variant]["events_per_s"] / found[aim.peer]["events_per_s"]
        outcome = "met" if times >= aim.at_least else "missed"
        aims.append({**vars(aim), "times": round(times, 2), "outcome": outcome})
    pairs = {}
    for variant, peer in PAIRS.items():
        if variant in results and peer in results:
            # Round by round: what disturbs the machine disturbs both of a pair.
            ratios = [
                a["events_per_s"] / b["events_per_s"]
                for a, b in zip(results[variant], results[peer], strict=True)
            ]
            pairs[variant] = {"peer": peer, "times": round(statistics.median(ratios), 3)}
    return {"variants": found, "aims": aims, "pairs": pairs}


def lines_of(report, peers):
    """Return the head and the rows of the table."""
    ratios = [f"{what} to {peer}" for peer in peers for what in ("rate", "per CPU")]
    head = ["variant", "events/s", "least-most", "events per CPU-second", *ratios]
    rows = []
    for variant, one in report["variants"].items():
        times = [f"{one[what][peer]:.2f}" for peer in peers for what in ("times", "times_per_cpu")]
        spread = f"{one['min']:,}-{one['max']:,}"
        rows.append([variant, f"{one['events_per_s']:,}", spread, f"{one['events_per_cpu_s']:,}", *times])
    return head, rows


def said_of(report):
    """Return the aims and the pairs as sentences."""
    said = [
        f"{one['variant']}: {one['times']:.2f} times {one['peer']}, aim {one['at_least']:g}: {one['outcome']}"
        for one in report["aims"]
    ]
    for variant, one in report["pairs"].items():
        said.append(f"{variant}: {one['times']:.2f} times the rate of {one['peer']}, median of the pairs")
    return said


def markdown_of(title, report, peers):
    """Return table, aims and pairs as a page."""
    head, rows = lines_of(report, peers)
    table = [head, ["---"] * len(head), *rows]
    lines = [f"| {' | '.join(row)} |" for row in table]
    return "\n".join([title, "", *lines, "", *(f"- {said}" for said in said_of(report)), ""])


def show(title, report, peers):
    """Print the same."""
    head, rows = lines_of(report, peers)
    table = Table(title=title)
    for number, name in enumerate(head):
        table.add_column(name, justify="right" if number else "left")
    for row in rows:
        table.add_row(*row)
    console = Console(width=160)
    console.print(table)
    for said in said_of(report):
        print(said)
