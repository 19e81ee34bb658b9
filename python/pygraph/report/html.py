"""The report as one self-contained HTML page: no scripts, no files beside it, light and dark."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from pygraph.report.explanation import Report
from pygraph.report.wording import (
    GRAPH_COLUMNS,
    KERNEL_COLUMNS,
    graph_cells,
    headline,
    kernel_cells,
    loop_sentence,
)

_STRIP_WIDTH = 1000.0
_SMALLEST_PART = 0.4  # of those 1000, so that short gaps are seen

_STYLE = """
:root { color-scheme: light dark; --graph: #2a7a4b; --gap: #c8452e; --line: #8884; --soft: #8881; }
@media (prefers-color-scheme: dark) { :root { --graph: #4cb37a; --gap: #ea6a52; } }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2.5rem auto; max-width: 72rem; padding: 0 1.5rem; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
.device, figcaption { opacity: .7; }
.shares { display: flex; flex-wrap: wrap; gap: 1rem; margin: 1.5rem 0; }
.share { border: 1px solid var(--line); border-radius: 8px; padding: .8rem 1.2rem; }
.share b { display: block; font-size: 1.8rem; line-height: 1.2; }
figure { margin: 0; } svg { width: 100%; height: 64px; display: block; border-radius: 6px; }
.graph { fill: var(--graph); } .gap { fill: var(--gap); } rect:hover { opacity: .75; }
.key { display: inline-block; width: .8em; height: .8em; border-radius: 2px; margin: 0 .3em 0 1em; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
th, td { text-align: left; padding: .35rem .7rem; border-bottom: 1px solid var(--line);
  vertical-align: top; }
th { font-weight: 600; background: var(--soft); } td.number, th.number { text-align: right; }
code { font-size: .85em; overflow-wrap: anywhere; }
"""


def render(report: Report) -> str:
    shares = "".join(
        f'<div class="share"><b>{share.fraction:.1%}</b>'
        f"{'of GPU time' if share.unit == 'us' else f'of {escape(share.unit)}'} in graphs</div>"
        for share in report.shares
    )
    sentences = "".join(f"<p>{escape(line)}</p>" for line in headline(report))
    sections = [
        _section("Graphs", GRAPH_COLUMNS, (graph_cells(row) for row in report.graphs), numbers_from=2),
        _section(
            "Kernels", KERNEL_COLUMNS, (kernel_cells(row) for row in report.kernels), numbers_from=3
        ),
        _section(
            "Cuts and refusals",
            ("where", "kind", "why", "what would remove it"),
            ([cut.where or "-", cut.kind, cut.reason, cut.remedy or "-"] for cut in report.cuts),
        ),
        _section(
            "Transformations applied",
            ("where", "transformation", "what"),
            ([note.where or "-", note.transform, note.what] for note in report.transformations),
        ),
    ]
    loops = "".join(
        f"<h2>A training loop</h2><p>{escape(loop_sentence(loop))}</p><pre>{escape(loop.code)}</pre>"
        for loop in report.loops
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>PyGraph: {escape(report.program)}</title><style>{_STYLE}</style></head><body>"
        f'<h1>{escape(report.program)}</h1><div class="device">{escape(report.device)}</div>'
        f'<div class="shares">{shares}</div>{sentences}{_strip(report)}{"".join(sections)}'
        f"{loops}</body></html>\n"
    )


def _strip(report: Report) -> str:
    if not report.strip:
        return ""
    total = sum(part.width for part in report.strip) or 1.0
    widths = [max(part.width / total * _STRIP_WIDTH, _SMALLEST_PART) for part in report.strip]
    scale = _STRIP_WIDTH / sum(widths)
    bars, left = [], 0.0
    for part, width in zip(report.strip, widths, strict=True):
        title = escape(f"{part.kind}: {part.label} ({part.width:,.1f} {report.strip_unit})")
        bars.append(
            f'<rect class="{part.kind}" x="{left:.3f}" y="0" width="{width * scale:.3f}" height="64">'
            f"<title>{title}</title></rect>"
        )
        left += width * scale
    return (
        f'<h2>The program</h2><figure><svg id="strip" viewBox="0 0 {_STRIP_WIDTH:.0f} 64" '
        f'preserveAspectRatio="none" role="img" aria-label="graphs and gaps">{"".join(bars)}</svg>'
        f"<figcaption>GPU work in order, to scale by {escape(report.strip_unit)}."
        '<span class="key" style="background:var(--graph)"></span>in a graph'
        '<span class="key" style="background:var(--gap)"></span>outside</figcaption></figure>'
    )


def _section(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], numbers_from: int | None = None
) -> str:
    def cell(tag: str, i: int, text: str) -> str:
        is_number = numbers_from is not None and i >= numbers_from
        content = f"<code>{escape(text)}</code>" if i == 0 and tag == "td" else escape(text)
        return f"<{tag}{' class=number' if is_number else ''}>{content}</{tag}>"

    body = "".join(
        "<tr>" + "".join(cell("td", i, text) for i, text in enumerate(row)) + "</tr>" for row in rows
    )
    if not body:
        return ""
    head = "".join(cell("th", i, text) for i, text in enumerate(columns))
    return (
        f'<h2>{escape(title)}</h2><div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )
