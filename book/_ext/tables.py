"""Columns of numbers in the tables that cells compute stand at the right, so digits line up."""

import html
import re

from bodies import rewrite_bodies
from sphinx.application import Sphinx

TABLE = re.compile(r'<table class="dataframe">.*?</table>', re.DOTALL)
ROW = re.compile(r"<tr>(.*?)</tr>", re.DOTALL)
CELL = re.compile(r"<(th|td)>(.*?)</\1>", re.DOTALL)
NUMBER = re.compile(r"[+\-−]?[\d.,]+(e[+\-]\d+)?( ± [\d.,]+)?( ?%| MB| s)?")


def align_numbers(body: str) -> str:
    """Mark the cells of each column that holds numbers alone, and perhaps gaps."""
    return TABLE.sub(lambda table: align_table(table[0]), body)


def align_table(table: str) -> str:
    """Mark the columns of numbers of a table."""
    head, *rows = [CELL.findall(row) for row in ROW.findall(table)]
    numeric = set()
    for column in range(len(head)):
        cells = [html.unescape(row[column][1]) for row in rows if column < len(row)]
        filled = [cell for cell in cells if cell not in ("", "–")]
        if filled and all(map(NUMBER.fullmatch, filled)):
            numeric.add(column)
    lines = [
        "".join(
            f'<{tag} class="number">{text}</{tag}>' if n in numeric else f"<{tag}>{text}</{tag}>"
            for n, (tag, text) in enumerate(cells)
        )
        for cells in (head, *rows)
    ]
    return f'<table class="dataframe"><tr>{"</tr><tr>".join(lines)}</tr></table>'


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the extension."""
    rewrite_bodies(app, align_numbers)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
