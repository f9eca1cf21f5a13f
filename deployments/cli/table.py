"""Columns of text, lined up."""

from collections.abc import Sequence


def lined_up(rows: Sequence[Sequence[str]]) -> str:
    """The rows, one a line, each column as wide as its widest cell."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)
