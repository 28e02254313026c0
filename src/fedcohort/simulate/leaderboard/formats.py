"""Tables as HTML, LaTeX, Markdown, CSV and plain text that fits a terminal."""

from __future__ import annotations

import csv
import io
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from fedcohort.core.errors import ParameterError
from fedcohort.core.text import escape_html

DASHES = ("", "7 4", "2 3")  # solid, dashed and dotted lines
_LINE = (
    '<svg class="swatch" width="22" height="10" aria-hidden="true"><line x1="0" x2="22" y1="5" y2="5" '
    'stroke="var(--s{})" stroke-width="4" stroke-dasharray="{}"/></svg>'
)
_GAP = "  "  # between columns of text
_NOTEBOOK = (
    "<style>.fedcohort table{border-collapse:collapse;font-variant-numeric:tabular-nums}"
    ".fedcohort th,.fedcohort td{padding:4px 10px;text-align:right;white-space:nowrap}"
    ".fedcohort th:first-child,.fedcohort .wrap{text-align:left}.fedcohort thead th{white-space:normal}"
    ".fedcohort .wrap{white-space:normal;min-width:12em}.fedcohort .note,.fedcohort p{opacity:.75;font-size:.9em}"
    ".fedcohort p{max-width:75ch}.fedcohort svg{margin-right:6px}</style>"
)


@dataclass(frozen=True)
class Cell:
    """One entry: its text, a less prominent note, whether it is the best of its column, and the line to draw."""

    text: str
    note: str = ""
    best: bool = False
    color: int | None = None
    dash: int = 0


@dataclass(frozen=True)
class Table:
    """A table.

    Attributes
    ----------
    name : short name, for file names
    title : heading
    columns : heading of each column; the first is left-aligned, the others right-aligned
    rows : one tuple of cells per row
    note : what a reader must know
    wrap : columns of running text, left-aligned and wrapped
    lead : what the table shows, in a sentence or two above it
    """

    name: str
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""
    wrap: frozenset[int] = frozenset()
    lead: str = ""


def to_html(table: Table) -> str:
    """Return the table as HTML. On a narrow screen it scrolls inside its own box, also by keyboard."""
    head = "".join(
        f'<th scope="col"{_wrap_class(table, i)}>{escape_html(column).replace("-", "&#8209;")}</th>'
        for i, column in enumerate(table.columns)
    )
    body = []
    for row in table.rows:
        cells = []
        for i, cell in enumerate(row):
            # A sample of the line that a selector is drawn with.
            line = "" if cell.color is None else _LINE.format(cell.color, DASHES[cell.dash % len(DASHES)])
            text = f"<b>{escape_html(cell.text)}</b>" if cell.best else escape_html(cell.text)
            note = f' <span class="note">{escape_html(cell.note)}</span>' if cell.note else ""
            tag = "th" if i == 0 else "td"
            scope = ' scope="row"' if i == 0 else ""
            cells.append(f"<{tag}{scope}{_wrap_class(table, i)}>{line}{text}{note}</{tag}>")
        body.append(f"<tr>{''.join(cells)}</tr>")
    lead = f"<p>{escape_html(table.lead)}</p>" if table.lead else ""
    return (
        f'{lead}<div class="table" tabindex="0" role="region" aria-label="{escape_html(table.title)}"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table></div>"
    ) + (f'<p class="small">{escape_html(_note(table))}</p>' if table.note else "")


def _note(table: Table) -> str:
    """Return the note, and what bold type means: to be the best is no claim."""
    best = any(cell.best for row in table.rows for cell in row)
    return " ".join(filter(None, (table.note, "Bold: the best mean." if best else "")))


def _wrap_class(table: Table, column: int) -> str:
    return ' class="wrap"' if column in table.wrap else ""


def notebook(tables: Sequence[Table]) -> str:
    """Return tables as HTML for a notebook, with their style sheet."""
    parts = "".join(f"<h4>{escape_html(table.title)}</h4>{to_html(table)}" for table in tables)
    return f'{_NOTEBOOK}<div class="fedcohort">{parts}</div>'


# Characters that LaTeX reads as commands, and characters of our tables that its standard fonts lack.
_LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", "×": r"$\times$", "−": "$-$", "–": "--",
    "<": "$<$", ">": "$>$", "≤": r"$\leq$", "≥": r"$\geq$",
}  # fmt: skip


def _latex(text: str) -> str:
    return "".join(_LATEX.get(c, c) for c in text)


def _to_latex(table: Table) -> str:
    r"""Return the table for a paper, with ``booktabs`` rules; needs ``\usepackage{booktabs}``."""
    # Columns of running text share the width that is left.
    wide = f"p{{{0.7 / max(1, len(table.wrap)):.2f}\\linewidth}}"
    columns = "l" + "".join(wide if i in table.wrap else "r" for i in range(1, len(table.columns)))
    lines = [
        r"\begin{table}",
        r"\centering",
        rf"\begin{{tabular}}{{{columns}}}",
        r"\toprule",
        " & ".join(_latex(c) for c in table.columns) + r" \\",
        r"\midrule",
    ]
    for row in table.rows:
        lines.append(" & ".join(_cells(row, _latex, r"\textbf{{{}}}")) + r" \\")
    lines += [
        r"\bottomrule",
        r"\end{tabular}",
        rf"\caption{{{_latex(' '.join(filter(None, (f'{table.title}.', table.lead, _note(table)))))}}}",
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"


def _cells(row: Sequence[Cell], escape: Callable[[str], str], bold: str) -> list[str]:
    """Return the texts of a row: the best entries in bold, and notes in all columns but the first."""
    texts = [bold.format(escape(cell.text)) if cell.best else escape(cell.text) for cell in row]
    notes = ["", *(f" {escape(cell.note)}" if cell.note else "" for cell in row[1:])]
    return [text + note for text, note in zip(texts, notes, strict=True)]


def to_markdown(table: Table) -> str:
    """Return the table in GitHub's Markdown."""

    def escape(text: str) -> str:
        return text.replace("|", r"\|")

    lines = [
        "| " + " | ".join(escape(c) for c in table.columns) + " |",
        "|" + "|".join(":--" if i == 0 or i in table.wrap else "--:" for i in range(len(table.columns))) + "|",
    ]
    for row in table.rows:
        lines.append("| " + " | ".join(_cells(row, escape, "**{}**")) + " |")
    above, below = (f"{table.lead}\n\n" if table.lead else ""), (f"\n\n{note}" if (note := _note(table)) else "")
    return above + "\n".join(lines) + below + "\n"


def _to_csv(table: Table) -> str:
    """Return the table as CSV, with the text as shown."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(table.columns)
    for row in table.rows:
        writer.writerow([f"{c.text} {c.note}".strip() if i else c.text for i, c in enumerate(row)])
    return out.getvalue()


FORMATS: dict[str, Callable[[Table], str]] = {"latex": _to_latex, "markdown": to_markdown, "csv": _to_csv}


def paragraph(text: str, form: str) -> str:
    """Return running text for one of :data:`FORMATS`."""
    return (_latex(text) if form == "latex" else text) + "\n"


def render(table: Table, form: str) -> str:
    """Return the table in one of :data:`FORMATS`."""
    if form not in FORMATS:
        raise ParameterError(f"Tables can be written as {', '.join(FORMATS)}. Got {form!r}.")
    return FORMATS[form](table)


# -- text -----------------------------------------------------------------------------------------------------------


def to_text(table: Table, width: int = 80) -> str:
    """Return the table as text in lines of at most ``width`` characters.

    Columns that do not fit are shown below the others, with the first column again. If not even two columns fit, each
    row becomes a paragraph.
    """
    cells = [[f"{c.text} {c.note}".strip() for c in row] for row in table.rows]
    lines = [*textwrap.wrap(table.lead, width), *([""] * bool(table.lead)), table.title]
    # Cutting a column off would hide it without a word, so what does not fit follows below.
    blocks: list[list[int]] = [[0]]
    for column in range(1, len(table.columns)):
        if len(blocks[-1]) > 1 and _total_width(table, cells, [*blocks[-1], column]) > width:
            blocks.append([0])
        blocks[-1].append(column)
    if max(_total_width(table, cells, block) for block in blocks) > width:
        lines += _stacked(table, cells, width)
    else:
        lines += "\n\n".join("\n".join(_lines(table, cells, block)) for block in blocks).split("\n")
    return "\n".join(lines + textwrap.wrap(table.note, width))


def _stacked(table: Table, cells: Sequence[Sequence[str]], width: int) -> list[str]:
    """Return a paragraph for each row, with a line for each column."""
    lines = []
    for row in cells:
        lines += textwrap.wrap(row[0], width)
        for column, cell in list(zip(table.columns, row, strict=True))[1:]:
            lines += textwrap.wrap(f"{column}: {cell}", width, initial_indent="  ", subsequent_indent="    ")
    return lines


def _width(table: Table, cells: Sequence[Sequence[str]], column: int) -> int:
    words = table.columns[column].split() or [""]
    return max(*map(len, words), *(len(row[column]) for row in cells))


def _total_width(table: Table, cells: Sequence[Sequence[str]], columns: Sequence[int]) -> int:
    return sum(_width(table, cells, i) for i in columns) + len(_GAP) * (len(columns) - 1)


def _lines(table: Table, cells: Sequence[Sequence[str]], columns: Sequence[int]) -> list[str]:
    widths = [_width(table, cells, i) for i in columns]
    aligns = [str.ljust if i == 0 or i in table.wrap else str.rjust for i in columns]

    def line(texts: Iterable[str]) -> str:
        entries = zip(aligns, texts, widths, strict=True)
        return _GAP.join(align(text, width) for align, text, width in entries).rstrip()

    heads = [textwrap.wrap(table.columns[i], width) or [""] for i, width in zip(columns, widths, strict=True)]
    height = max(map(len, heads))
    head_rows = zip(*([""] * (height - len(head)) + head for head in heads), strict=True)
    return [
        *(line(row) for row in head_rows),
        line("-" * width for width in widths),
        *(line(row[i] for i in columns) for row in cells),
    ]
