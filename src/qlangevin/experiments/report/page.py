"""Write a document as one HTML page with style and figures inside; it loads nothing and runs no script."""

from __future__ import annotations

import base64
import re
from html import escape

from .document import Block, Code, Document, Given, Heading, Note, Picture, Section, Table, Text, printable

__all__ = ["write_page"]

KINDS = {"png": "image/png", "svg": "image/svg+xml", "jpg": "image/jpeg", "jpeg": "image/jpeg", "gif": "image/gif"}
CLASSES = {"holds": "good", "does not hold": "bad", "undecided": "soft", "paper": "soft"}
FOLD = 6  # lines up to which code is shown unfolded

STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #59616b; --paper: #ffffff; --frame: #8a9098; --rule: #d9dde2;
  --shade: #f4f6f8; --good: #0b6b4b; --bad: #a83a00; --note: #fff6e0; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e7eb; --soft: #a3abb5; --paper: #14171b; --frame: #79818b;
  --rule: #333a43; --shade: #1d2228; --good: #4fc79b; --bad: #ff9a63; --note: #2f2814; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.2rem 1rem 4rem; max-width: 56rem; background: var(--paper); color: var(--ink);
  font: 1rem/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
  overflow-wrap: break-word; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0.6rem 0 1rem; }
h2 { font-size: 1.3rem; line-height: 1.25; margin: 3rem 0 0.8rem; padding-top: 0.9rem; border-top: 1px solid var(--rule); }
p { margin: 0.7rem 0; }
a { color: inherit; }
nav ul { padding-left: 1.1rem; columns: 2 16rem; margin: 0.5rem 0; }
.note { background: var(--note); border-left: 4px solid #e69f00; padding: 0.6rem 0.8rem; }
figure { margin: 1.6rem 0; }
figure svg, figure img { display: block; width: 100%; max-width: 40rem; height: auto; }
figure img { background: #ffffff; }
svg * { stroke-linejoin: round; stroke-linecap: butt; }
figcaption, .title { color: var(--soft); font-size: 0.9rem; }
figcaption { margin-top: 0.5rem; max-width: 40rem; }
.wide { overflow-x: auto; margin: 0 0 1.2rem; }
table { border-collapse: collapse; font-size: 0.875rem; font-variant-numeric: tabular-nums; }
.title { margin: 1.4rem 0 0.3rem; }
th, td { padding: 0.3rem 0.7rem 0.3rem 0; text-align: left; vertical-align: top; white-space: nowrap; }
thead th { border-bottom: 1.5px solid var(--frame); }
tbody tr { border-bottom: 1px solid var(--rule); }
tbody th { font-weight: normal; position: sticky; left: 0; background: var(--paper); }
tbody tr.heading th { font-weight: 600; padding-top: 0.9rem; position: static; }
.wordy th, .wordy td { white-space: normal; min-width: 13rem; }
.wordy td:nth-child(2), .wordy th:nth-child(2) { white-space: nowrap; min-width: 0; }
.wordy tbody th { position: static; }
td.good { color: var(--good); font-weight: 600; } td.bad { color: var(--bad); font-weight: 600; } .soft { color: var(--soft); }
@media (max-width: 40rem) {
  .wordy thead { display: none; }
  .wordy table, .wordy tbody, .wordy tr, .wordy th, .wordy td { display: block; padding-right: 0; }
  .wordy tr { padding: 0.4rem 0; }
  .wordy th, .wordy td { min-width: 0; padding: 0.1rem 0; }
}
pre { background: var(--shade); padding: 0.7rem; overflow-x: auto; font-size: 0.8rem; line-height: 1.45; }
summary { cursor: pointer; margin: 1rem 0; }
@media print {
  :root { color-scheme: light; --ink: #000000; --soft: #444444; --paper: #ffffff; --frame: #8a9098; --rule: #cccccc;
    --shade: #f4f4f4; --good: #0b6b4b; --bad: #a83a00; --note: #fff6e0; }
  @page { margin: 16mm; }
  html { font-size: 9.5pt; }
  body { max-width: none; padding: 0; }
  nav { display: none; }
  figure, tr, .note { break-inside: avoid; }
  h2, h2 + p, h2 + p + .note, .title, tr.heading { break-after: avoid; }
  figure svg, figure img { max-width: 13cm; max-height: 20cm; }
  .wide { overflow: visible; }
  table { font-size: 7pt; }
  th { white-space: normal; }
  th, td { padding: 0.15rem 0.4rem 0.15rem 0; }
  pre { white-space: pre-wrap; }
  details::details-content { content-visibility: visible; height: auto; }
}
"""

# Forbids loading and scripts, whatever markup a result may smuggle in.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"


def write_page(document: Document) -> str:
    """Return the document as an HTML page."""
    body = [f"<h1>{_text(document.title)}</h1>", *_blocks(document.opening, "opening")]
    if len(document.sections) > 1:
        links = "".join(f'<li><a href="#s{i}">{_text(s.title)}</a></li>' for i, s in enumerate(document.sections))
        body.append(f"<nav><ul>{links}</ul></nav>")
    body += [line for i, section in enumerate(document.sections) for line in _section(section, f"s{i}")]
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<title>{_text(document.title)}</title>
<style>{STYLE}</style>
</head>
<body>
{chr(10).join(body)}
</body>
</html>
"""


def _text(text: str) -> str:
    """Escape a text; numbers are kept on one line with their errors and units."""
    return re.sub(r" (?=[±%])|(?<=±) ", "\u00a0", escape(printable(text)))


def _section(section: Section, name: str) -> list[str]:
    return [f'<section id="{name}">', f"<h2>{_text(section.title)}</h2>", *_blocks(section.blocks, name), "</section>"]


def _blocks(blocks: tuple[Block, ...], name: str) -> list[str]:
    return [_block(block, f"{name}-{i}") for i, block in enumerate(blocks)]


def _block(block: Block, name: str) -> str:
    if isinstance(block, Text):
        return f"<p>{_text(block.text)}</p>"
    if isinstance(block, Note):
        return f'<p class="note">{_text(block.text)}</p>'
    if isinstance(block, Code):
        code = f"<pre>{_text(chr(10).join(block.lines))}</pre>"
        return _folded("Commands", code) if len(block.lines) > FOLD else code
    if isinstance(block, Picture):
        return _figure(block.image.inline(name, _text(block.alt)), block.caption)
    if isinstance(block, Given):
        data = base64.b64encode(block.content).decode()
        image = f'<img src="data:{KINDS[block.suffix]};base64,{data}" alt="{_text(block.alt)}">'
        return _figure(image, block.caption)
    return _folded(block.title, _table(block)) if block.folded else _table(block)


def _figure(image: str, caption: str) -> str:
    return f"<figure>{image}<figcaption>{_text(caption)}</figcaption></figure>"


def _folded(title: str, content: str) -> str:
    return f"<details><summary>{_text(title)}</summary>{content}</details>"


def _table(table: Table) -> str:
    head = "".join(f'<th scope="col"{_kind(text)}>{_text(text)}</th>' for text in table.head)
    rows = "\n".join(_row(row, table.head) for row in table.rows)
    kind, name = "wide wordy" if table.wordy else "wide", _text(table.title)
    title = "" if table.folded else f'<p class="title">{name}</p>'  # a folded table shows its title in the summary
    return (
        f'{title}<div class="{kind}" tabindex="0" role="region" aria-label="{name}">'
        f'<table aria-label="{name}"><thead><tr>{head}</tr></thead>\n<tbody>{rows}</tbody></table></div>'
    )


def _row(row: tuple[str, ...] | Heading, head: tuple[str, ...]) -> str:
    if isinstance(row, Heading):
        return f'<tr class="heading"><th scope="colgroup" colspan="{len(head)}">{_text(row.text)}</th></tr>'
    cells = "".join(
        f"<td{_kind(text) or _kind(column)}>{_text(text)}</td>" for text, column in zip(row[1:], head[1:], strict=True)
    )
    return f'<tr><th scope="row">{_text(row[0])}</th>{cells}</tr>'


def _kind(text: str) -> str:
    """Return the class of a cell, which colours verdicts and the paper's own figures."""
    return f' class="{CLASSES[text]}"' if text in CLASSES else ""
