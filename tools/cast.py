"""Records a command as a picture that moves: an SVG without scripts, each line at its time.

    python -m tools.cast docs/demo.svg flinkish demo

What the command prints is taken as it comes; pauses are cut to a few seconds. A viewer that does not move
pictures, or was told not to, shows all lines.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from html import escape
from pathlib import Path

#: Longest pause that is shown, and how long the end stands before it begins again.
_LONGEST_PAUSE_S, _END_S = 2.5, 6.0
_WIDTH, _LINE, _LETTER = 110, 21, 8.0


def record(command: Sequence[str]) -> tuple[list[tuple[float, str]], int]:
    """Run a command; return its lines with the second at which each came, and its status."""
    began = time.monotonic()
    lines = [(0.0, f"$ {' '.join(command)}")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        lines.append((time.monotonic() - began, line.rstrip("\n")))
        print(lines[-1][1])
    return lines, process.wait()


def wrapped(lines: Sequence[tuple[float, str]]) -> list[tuple[float, str]]:
    """Return the lines as they stand on the screen, with long pauses cut."""
    shown: list[tuple[float, str]] = []
    at = before = 0.0
    for came, text in lines:
        at += min(came - before, _LONGEST_PAUSE_S)
        before = came
        pieces = [text[i : i + _WIDTH] for i in range(0, len(text), _WIDTH)] or [""]
        shown += [(at + 0.6, piece) for piece in pieces]
    return [(0.0, shown[0][1]), *shown[1:]]


def picture(lines: Sequence[tuple[float, str]]) -> str:
    """Return the SVG."""
    whole = lines[-1][0] + _END_S
    height = _LINE * len(lines) + 58
    width = round(_WIDTH * _LETTER) + 40
    rules, texts = [], []
    for number, (at, text) in enumerate(lines):
        share = 100 * at / whole
        rules.append(
            f"@keyframes k{number}{{0%,{share:.2f}%{{opacity:0}}{share + 0.05:.2f}%,100%{{opacity:1}}}}"
        )
        kind = "p" if text.startswith("$ ") else "g" if text.startswith("EXACTLY") else ""
        kind = "r" if "SIGKILL" in text else kind
        style = f' style="animation:k{number} {whole:.1f}s linear infinite"' if at else ""
        name = f' class="{kind}"' if kind else ""
        texts.append(f'<text x="20" y="{58 + _LINE * number}"{name}{style}>{escape(text)}</text>')
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" style="max-width:100%;height:auto">',
            f"<title>{escape(lines[0][1])}: {escape(lines[-2][1] if len(lines) > 2 else '')}</title>",
            "<style>text{font:13.3px ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace;"
            "fill:#cfd8dc;white-space:pre}.p{fill:#80cbc4;font-weight:bold}.g{fill:#a5d6a7;font-weight:bold}"
            ".r{fill:#ffab91}"
            + "".join(rules)
            + "@media (prefers-reduced-motion:reduce){text{animation:none!important}}</style>",
            f'<rect width="{width}" height="{height}" rx="8" fill="#1e272c"/>',
            '<circle cx="22" cy="20" r="6" fill="#ff5f57"/><circle cx="42" cy="20" r="6" fill="#febc2e"/>'
            '<circle cx="62" cy="20" r="6" fill="#28c840"/>',
            *texts,
            "</svg>",
            "",
        ]
    )


def main() -> None:
    file, *command = sys.argv[1:]
    lines, status = record(command)
    if status:
        sys.exit(f"the command ended with status {status}; no picture")
    Path(file).write_text(picture(wrapped(lines)), encoding="utf-8")


if __name__ == "__main__":
    main()
