"""Cells of CSV files that spreadsheets open."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

FORMULA = ("=", "+", "-", "@", "\t", "\r")


def without_formulas(row: Iterable[Any]) -> list[Any]:
    """A row in which no text is taken for a formula: an apostrophe before it, which spreadsheets do not show.

    >>> without_formulas(["=1+1", "-3.5", -3.5, "north"])
    ["'=1+1", '-3.5', -3.5, 'north']
    """
    return [f"'{cell}" if isinstance(cell, str) and _is_formula(cell) else cell for cell in row]


def _is_formula(cell: str) -> bool:
    if not cell.startswith(FORMULA):
        return False
    try:
        float(cell)
    except ValueError:
        return True
    return False
