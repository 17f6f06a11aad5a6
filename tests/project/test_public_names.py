"""The public names: one table for Python, one set of imports for type checkers, and both say the same."""

from __future__ import annotations

import ast
from pathlib import Path

import comfedl as cf


def test_the_table_of_names_is_what_type_checkers_see() -> None:
    source = ast.parse(Path(cf.__file__).read_text(encoding="utf-8"))
    seen = {
        name.asname: f"{imported.module}.{name.name}" if imported.module == "comfedl" else imported.module
        for block in source.body
        if isinstance(block, ast.If)
        for imported in block.body
        if isinstance(imported, ast.ImportFrom)
        for name in imported.names
    }
    assert seen == cf._HOMES


def test_every_public_name_can_be_had() -> None:
    for name in cf.__all__:
        assert getattr(cf, name) is not None and name in dir(cf)
