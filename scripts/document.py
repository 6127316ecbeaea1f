"""A report as blocks, and its two renderings: Markdown, and HTML in one file that needs nothing else."""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Heading:
    """A heading; level 2 is a section."""

    text: str
    level: int = 2


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    text: str
    strong: bool = False


@dataclass(frozen=True)
class Bullets:
    """A list."""

    items: Sequence[str]


@dataclass(frozen=True)
class Code:
    """Text to copy."""

    text: str


@dataclass(frozen=True)
class Grid:
    """A table; a column is its group (columns of one group stand under one heading) and its name."""

    columns: Sequence[tuple[str, str]]
    rows: Sequence[Sequence[str]]
    left: int = 2
    """How many columns on the left are labels."""


@dataclass(frozen=True)
class Picture:
    """A PNG beside the document."""

    file: str
    caption: str


@dataclass(frozen=True)
class Folded:
    """Details under a title, closed at first where the format can."""

    title: str
    blocks: Sequence[Block]
    file: str = ""
    """That holds the same: Markdown points to it instead."""


Block = Heading | Text | Bullets | Code | Grid | Picture | Folded


def markdown(title: str, blocks: Sequence[Block]) -> str:
    """The document as Markdown, its pictures as links."""
    return f"# {title}\n\n" + "\n".join(_markdown_block(block) for block in blocks)


def _markdown_block(block: Block) -> str:
    match block:
        case Heading(text, level):
            return f"{'#' * level} {text}\n"
        case Text(text, strong):
            return f"**{text}**\n" if strong else f"{text}\n"
        case Bullets(items):
            return "".join(f"- {item}\n" for item in items)
        case Code(text):
            return f"```\n{text}\n```\n"
        case Picture(file, caption):
            return f"![{caption}]({file})\n"
        case Folded(name, _, file) if file:
            return f"**{name}**: [{file}]({file})\n"
        case Folded(name, inner):
            return f"**{name}**\n\n" + "\n".join(map(_markdown_block, inner))
        case Grid(columns, rows, left):
            many = len({group for group, _ in columns if group}) > 1
            head = [f"{group}: {name}" if many and group else name for group, name in columns]
            lines = [head, [":--" if i < left else "--:" for i in range(len(head))], *rows]
            return "".join(f"| {' | '.join(c.replace('|', chr(92) + '|') for c in line)} |\n" for line in lines)


STYLE = """
:root { color-scheme: light dark; --ink: #1c1e21; --dim: #5c6370; --paper: #fff; --line: #d8dce1; --band: #f3f5f7;
  --good: #00694b; --bad: #a33f00; --same: #00558a }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e6ea; --dim: #9aa2ae; --paper: #16181c; --line: #363b44;
  --band: #1f2329; --good: #4fcfa4; --bad: #ff9a5c; --same: #6cb8ee } }
body { margin: 0 auto; padding: 1rem 1rem 4rem; max-width: 68rem; color: var(--ink); background: var(--paper);
  font: 1rem/1.55 system-ui, sans-serif; overflow-wrap: break-word }
h1 { font-size: 1.5rem; line-height: 1.25 } h2 { font-size: 1.2rem; margin-top: 2.4rem } h3 { font-size: 1.02rem }
p, ul { max-width: 46rem } ul { padding-left: 1.2rem } .headline { font-size: 1.1rem; font-weight: 600 }
.scroll { overflow-x: auto; margin: .8rem 0 } table { border-collapse: collapse; font-size: .82rem;
  font-variant-numeric: tabular-nums } th, td { padding: .3rem .6rem; text-align: right; white-space: nowrap;
  border-bottom: 1px solid var(--line) } th { color: var(--dim); font-weight: 600 } .label { text-align: left }
th.group { text-align: center; border-left: 1px solid var(--line) } .first { border-left: 1px solid var(--line) }
tbody tr:nth-child(even) { background: var(--band) } .better { color: var(--good); font-weight: 600 }
.worse { color: var(--bad); font-weight: 600 } .equivalent { color: var(--same); font-weight: 600 }
figure { margin: 1rem 0 } img { max-width: 100%; height: auto; background: #fff; border-radius: 4px }
figcaption { color: var(--dim); font-size: .85rem } pre { overflow-x: auto; padding: .7rem; background: var(--band) }
summary { cursor: pointer; color: var(--dim); margin: .6rem 0 }
"""


def page(title: str, blocks: Sequence[Block], folder: Path) -> str:
    """The document as one HTML file, its pictures within.

    Args:
        title: of the document.
        blocks: what it holds.
        folder: where the pictures are.
    """
    body = "\n".join(_html_block(block, folder) for block in blocks)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        f"<h1>{html.escape(title)}</h1>\n{body}\n</body>\n</html>\n"
    )


def _html_block(block: Block, folder: Path) -> str:
    match block:
        case Heading(text, level):
            return f"<h{level}>{html.escape(text)}</h{level}>"
        case Text(text, strong):
            return f"<p{' class=headline' if strong else ''}>{html.escape(text)}</p>"
        case Bullets(items):
            return "<ul>" + "".join(f"<li>{html.escape(item)}</li>" for item in items) + "</ul>"
        case Code(text):
            return f"<pre>{html.escape(text)}</pre>"
        case Picture(file, caption):
            data = base64.b64encode((folder / file).read_bytes()).decode()
            alt = html.escape(caption)
            return (
                f'<figure><img alt="{alt}" src="data:image/png;base64,{data}"><figcaption>{alt}</figcaption></figure>'
            )
        case Folded(name, inner):
            body = "\n".join(_html_block(b, folder) for b in inner)
            return f"<details><summary>{html.escape(name)}</summary>\n{body}\n</details>"
        case Grid():
            return _html_table(block)


def _html_table(grid: Grid) -> str:
    groups: list[tuple[str, int]] = []
    first = set()
    for i, (group, _) in enumerate(grid.columns):
        if groups and groups[-1][0] == group:
            groups[-1] = group, groups[-1][1] + 1
        else:
            groups.append((group, 1))
            if group:
                first.add(i)
    head = ""
    if first:
        head = "<tr>" + "".join(
            f'<th{" class=group" if group else ""} colspan="{n}">{html.escape(group)}</th>' for group, n in groups
        )
        head += "</tr>\n"

    def cell(i: int, text: str, tag: str) -> str:
        classes = [c for c, yes in (("label", i < grid.left), ("first", i in first)) if yes]
        classes += [text] if text in ("better", "worse", "equivalent") else []
        named = f' class="{" ".join(classes)}"' if classes else ""
        return f"<{tag}{named}>{html.escape(text)}</{tag}>"

    head += "<tr>" + "".join(cell(i, name, "th") for i, (_, name) in enumerate(grid.columns)) + "</tr>"
    rows = "\n".join("<tr>" + "".join(cell(i, c, "td") for i, c in enumerate(row)) + "</tr>" for row in grid.rows)
    return f'<div class="scroll"><table>\n<thead>\n{head}\n</thead>\n<tbody>\n{rows}\n</tbody>\n</table></div>'
