"""From the kept rounds of Nexmark to a page and pictures; of one run on one machine, or not at all.

python -m bench.nexmark.report     # writes nexmark.md and nexmark-*.svg beside the rounds
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

from bench.nexmark.engines import ENGINES
from bench.nexmark.ours import USES
from bench.nexmark.queries import QUERIES

#: What all queries of one page have in common.
_SAME = ("events", "batch", "active", "seed", "revision", "machine")
_FIGURES = {
    "rate": ("events a second", lambda run, events: run["events_per_s"]),
    "cpu": ("events per CPU second of the process tree", lambda run, events: events / run["cpu_seconds"]),
    "memory": ("most memory of the process tree, MiB", lambda run, events: run["peak_mib"]),
}
_PLACES = {name: place for place, name in enumerate(ENGINES)}
#: What engines say of a checkpoint: ours in two parts.
_CHECKPOINTS = ("checkpoint_ms", "trigger_to_decision_ms")


def kept(folder):
    """Return the settings that all queries share, and the rounds of each.

    Raises
    ------
    SystemExit
        There are none, or they are of different runs or machines.
    """
    shared, rounds, versions = {}, {}, {}
    for query in QUERIES:
        path = Path(folder) / f"nexmark-{query}.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        if len(lines) < 2:
            continue
        settings = json.loads(lines[0])
        own = {name: settings[name] for name in _SAME}
        if shared and own != shared:
            raise SystemExit(f"{path} is of another run or machine than the others: {own}, {shared}")
        shared, rounds[query] = own, [json.loads(line) for line in lines[1:]]
        versions |= settings["versions"]
    if not rounds:
        raise SystemExit(f"{folder} has no rounds of Nexmark")
    return {**shared, "versions": versions}, rounds


def figures(settings, rounds):
    """Return by query and variant the median, the least and the most of each figure."""
    found = {}
    for query, kept_rounds in rounds.items():
        # Engines took turns in coming first.
        for variant in sorted(kept_rounds[0], key=lambda one: (_PLACES[one.partition("@")[0]], one)):
            runs = [one[variant] for one in kept_rounds]
            own = found.setdefault(query, {})[variant] = {"results": runs[0]["results"]}
            for name, (_, of) in _FIGURES.items():
                values = [of(run, settings["events"]) for run in runs]
                own[name] = statistics.median(values), min(values), max(values)
            took = [ms for run in runs for what in _CHECKPOINTS for ms in run.get(what, ())]
            own["checkpoint"] = statistics.median(took) if took else None
    return found


def page(settings, rounds):
    """Return the tables as Markdown."""
    found = figures(settings, rounds)
    lines = [
        f"{settings['events']:,} events, {settings['active']:,} persons and auctions active, at most "
        f"{settings['batch']:,} events a micro-batch; revision {settings['revision']}; "
        f"{settings['machine']}.",
        "",
        *(
            f"- {name}: {version}; {ENGINES[name].guarantee}"
            for name, version in settings["versions"].items()
        ),
    ]
    for query, variants in found.items():
        native = variants.get("native", {}).get("rate", (None,))[0]
        lines += [
            "",
            f"**{query}** (ours: {USES[query]}; {len(rounds[query])} rounds)",
            "",
            "| engine | events/s | least-most | to native | per CPU s | peak MiB | checkpoint ms | results |",
            "|" + "---|" * 8,
        ]
        for variant, one in variants.items():
            rate, least, most = one["rate"]
            ratio = f"{rate / native:.2f}" if native else ""
            took = "" if one["checkpoint"] is None else f"{one['checkpoint']:,.0f}"
            lines.append(
                f"| {variant} | {rate:,.0f} | {least:,.0f}-{most:,.0f} | {ratio} | {one['cpu'][0]:,.0f} | "
                f"{one['memory'][0]:,.0f} | {took} | {one['results']:,} |"
            )
        for name in settings["versions"]:
            if query in ENGINES[name].cannot:
                lines.append(f"| {name} | cannot: {ENGINES[name].cannot[query]} |" + " |" * 6)
        lines += _costs(variants)
    return "\n".join([*lines, ""])


def _costs(variants):
    """Say what checkpoints cost, where an engine ran with two intervals."""
    said = []
    for variant, one in variants.items():
        name, _, interval = variant.partition("@")
        if interval and name in variants:
            cost = 1 - one["rate"][0] / variants[name]["rate"][0]
            said.append(f"- checkpoints every {interval} instead of 10 s cost {name} {cost:.0%} of its rate")
    return ["", *said] if said else []


def pictures(settings, rounds, folder):
    """Draw a bar per query and engine, with the least and the most, for each figure."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    # The same rounds give the same file.
    matplotlib.rcParams["svg.hashsalt"] = "nexmark"
    found = figures(settings, rounds)
    variants = list(dict.fromkeys(variant for one in found.values() for variant in one))
    width, made = 0.8 / len(variants), []
    for name, (what, _) in _FIGURES.items():
        figure, axes = plt.subplots(figsize=(11, 4.5))
        for number, variant in enumerate(variants):
            at = [place for place, query in enumerate(found) if variant in found[query]]
            bars = [found[query][variant][name] for query in found if variant in found[query]]
            heights = [median for median, _, _ in bars]
            ends = [[m - least for m, least, _ in bars], [most - m for m, _, most in bars]]
            places = [place + (number - (len(variants) - 1) / 2) * width for place in at]
            axes.bar(places, heights, width, yerr=ends, label=variant, capsize=2, error_kw={"linewidth": 0.8})
        axes.set_xticks(range(len(found)), list(found))
        axes.set_ylabel(what)
        axes.set_title(
            f"Nexmark: {what}; median, least and most of {len(next(iter(rounds.values())))} rounds"
        )
        axes.legend(fontsize=8, ncols=2)
        figure.text(0.01, 0.01, f"{settings['revision']}; {settings['machine']}", fontsize=7)
        figure.tight_layout(rect=(0, 0.03, 1, 1))
        path = Path(folder) / f"nexmark-{name}.svg"
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)
        made.append(path)
    return made


def write(folder):
    """Write page and pictures beside the rounds; return the page."""
    settings, rounds = kept(folder)
    text = page(settings, rounds)
    (Path(folder) / "nexmark.md").write_text(text)
    pictures(settings, rounds, folder)
    return text


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--results", default="build/bench-results")
    print(write(parser.parse_args().results))


if __name__ == "__main__":
    main()
