"""HTML pages that need nothing else: own style, light and dark, phone to desk."""

import html
import math
from collections.abc import Iterable, Sequence

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --paper: #ffffff; --line: #d8dde5;
  --soft: #5b6675; --card: #f6f8fa; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e8ee; --paper: #12161c; --line: #333c48; --soft: #9aa6b5; --card: #1a2029; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 72rem; padding: 1rem; background: var(--paper);
  color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin: 0 0 .5rem; }
main { display: grid; gap: 1rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 28rem), 1fr)); }
section { background: var(--card); border: 1px solid var(--line); border-radius: .5rem;
  padding: 1rem; min-width: 0; }
figure { margin: 0 0 1rem; } figure svg { width: 100%; height: auto; display: block; }
figcaption, .note { color: var(--soft); font-size: .875rem; }
.wide { overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-size: .9rem; }
th, td { text-align: left; padding: .25rem .75rem .25rem 0; border-bottom: 1px solid var(--line);
  vertical-align: top; overflow-wrap: anywhere; }
td + td { font-variant-numeric: tabular-nums; }
"""

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<h1>{title}</h1>
<main>
{body}
</main>
</body>
</html>
"""
PAGE_BEGINS = _PAGE.partition("\n")[0]


def page(title: str, sections: Iterable[tuple[str, str, str]]) -> str:
    """Return a whole HTML page of (id, heading, body) sections."""
    parts = [
        f'<section id="{name}"><h2>{html.escape(heading)}</h2>{body}</section>'
        for name, heading, body in sections
    ]
    return _PAGE.format(title=html.escape(title), style=_STYLE, body="\n".join(parts))


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return an HTML table; the first column names the row."""
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in heads)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return (
        f'<div class="wide"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def figure(svg: str, caption: str) -> str:
    """Return a plot with its caption."""
    return f"<figure>{svg}<figcaption>{html.escape(caption)}</figcaption></figure>"


def note(text: str) -> str:
    """Return a paragraph that stands where a plot has no data."""
    return f'<p class="note">{html.escape(text)}</p>'


def shown(value: float, digits: int = 3) -> str:
    """Return a number with some significant digits, `n/a` when there is none."""
    if not math.isfinite(value):
        return "n/a"
    if abs(value) >= 10**digits:
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"
