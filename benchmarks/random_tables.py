"""Random tables: columns, cells and bytes as they come, most of them nearly right and some of them nonsense."""

from __future__ import annotations

import csv
import io
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

Draw = random.Random
Cell = Callable[[Draw], str]

KINDS: Mapping[str, Cell] = {
    "number": lambda draw: f"{draw.gauss(50, 10):.2f}",
    "count": lambda draw: str(draw.randint(-3, 200)),
    "huge": lambda draw: f"{draw.choice([1, -1])}e{draw.randint(-320, 320)}",
    "constant": lambda draw: "7",
    "category": lambda draw: draw.choice(["low", "mid", "high"]),
    "yes": lambda draw: draw.choice(["True", "False", "yes", "no"]),
    "date": lambda draw: f"20{draw.randint(10, 26)}-{draw.randint(1, 12):02}-{draw.randint(1, 28):02}",
    "german date": lambda draw: f"{draw.randint(1, 28):02}.{draw.randint(1, 12):02}.20{draw.randint(10, 26)}",
    "german": lambda draw: f"{draw.gauss(5000, 3000):,.2f}".translate(str.maketrans(",.", ".,")),
    "comma": lambda draw: f"{draw.randint(0, 9)},{draw.randint(10, 99)}",
    "word": lambda draw: "".join(draw.choices("abcdefgh", k=5)),
    "unicode": lambda draw: draw.choice(["naïve", "日本", "\u202eabc", "😀", "a\u0301", "ß"]),
    "blank": lambda draw: draw.choice(["", " ", "?", "NA", "nan", "NULL", "-"]),
    "quoted": lambda draw: draw.choice(['say "hi"', "a,b", "line\nbreak", "=1+1", "'", "\t", "../x", "CON"]),
    "long": lambda draw: "9" * draw.choice([30, 400, 5000]),
}
LIKELY = ("number", "count", "category")
FORMAT: Mapping[str, Callable[[Draw], Any]] = {
    "na_values": lambda draw: draw.choice([*[["?", "-"]] * 5, ["?", -3, 7], {"c0": ["low"]}, "?", [[]], {"zz": ["?"]}]),
    "decimal": lambda draw: draw.choice([",", ",", ".", ";", 3]),
    "thousands": lambda draw: draw.choice([".", ",", " ", "'", "x", ""]),
    "dates": lambda draw: draw.choice([["c0"], {"c0": "%d.%m.%Y"}, {"c1": "%Y-%m-%d"}, {"c0": "%d"}, ["zz"], "c0"]),
    "header": lambda draw: draw.choice([True, False, ["a", "b"], [f"n{k}" for k in range(7)], "c0", 3]),
    "encoding": lambda draw: draw.choice(["latin-1", "cp1252", "utf-16", "zip", ""]),
}
"""How cells are written, as a user says it: right, wrong, or of another file."""
IMPUTE: Callable[[Draw], Any] = lambda draw: draw.choice([  # noqa: E731
    *["median", "most-frequent"] * 4, {"c0": "median"}, {"c0": 0, "c1": "mid"}, {"c0": True}, {"zz": 1}, "mean", 0,
])  # fmt: skip
ENCODINGS = (*("utf-8",) * 20, *("utf-8-sig",) * 3, "latin-1", "utf-16")


def draw_table(draw: Draw, path: Path) -> tuple[dict[str, Any], str]:
    """Write a table, and return the [data] table that reads it and the loss."""
    columns = {f"c{k}": _column(draw) for k in range(draw.choice([0, 1, 2, 3, 4, 5, 30]))}
    clients = ("ward", (lambda draw: draw.choice("abc")) if draw.random() < 0.8 else _column(draw))
    task = draw.choice(["cross_entropy", "cross_entropy", "bce", "mse", "huber"])
    labels: Mapping[str, Cell] = {
        "cross_entropy": lambda draw: draw.choice(["ill", "well"]),
        "bce": lambda draw: draw.choice("01"),
        "mse": KINDS["number"],
        "huber": KINDS["number"],
    }
    columns |= dict([clients]) | {"y": labels[task] if draw.random() < 0.9 else _column(draw)}
    names = list(columns)
    draw.shuffle(names)
    rows = [
        [columns[name](draw) for name in names]
        for _ in range(draw.choice([0, 1, 2, 5, 20, 60, 60, 60, 60, 60, 60, 60]))
    ]
    data: dict[str, Any] = {"name": "csv", "path": path.name, "client": "ward", "target": "y"}
    if draw.random() < 0.1:
        columns["part"] = lambda draw: draw.choice(["train", "validation", "test", "rest"])
        data["split"] = "part"
    more = {
        "drop": lambda: draw.sample([*names, "z"], 1),
        "scale": lambda: draw.random() < 0.5,
        "scale_target": lambda: draw.random() < 0.5,
        "missing": lambda: draw.choice(["error", *["drop"] * 4, "none"]),
        "validation": lambda: draw.choice([0.0, 0.3, 0.9, 1.0]),
        "test": lambda: draw.choice([0.0, 0.3]),
    }
    data |= {key: value() for key, value in more.items() if draw.random() < (0.5 if key == "missing" else 0.1)}
    if draw.random() < 0.3:
        data["impute"] = IMPUTE(draw)
    for key, value in FORMAT.items():
        if draw.random() < (0.3 if key == "na_values" else 0.05):
            data[key] = value(draw)
    if data.get("header") is False and draw.random() < 0.7:
        data |= {"client": names.index("ward") + 1, "target": names.index("y") + 1}
    if draw.random() < 0.1:
        path = path.with_suffix(draw.choice([".parquet", ".feather", ".arrow"]))
        data["path"] = path.name
        path.write_bytes(_damaged(draw, _as_arrow(draw, names, rows, path.suffix)))
    else:
        path.write_bytes(_damaged(draw, _written(draw, names, rows)))
    return data, task


def _as_arrow(draw: Draw, names: Sequence[str], rows: Sequence[Sequence[str]], suffix: str) -> bytes:
    """The same table as Parquet or Arrow, with the types that cells have by their looks."""
    import pyarrow as pa
    from pyarrow import csv as arrow_csv, feather, parquet

    text = io.StringIO()
    csv.writer(text).writerows([names, *rows])
    options = arrow_csv.ParseOptions(newlines_in_values=True)
    try:
        table = arrow_csv.read_csv(io.BytesIO(text.getvalue().encode()), parse_options=options)
    except pa.ArrowInvalid:
        table = pa.table({name: [row[k] for row in rows] for k, name in enumerate(names)})
    if draw.random() < 0.1:
        table = table.append_column("list", pa.array([[1, 2]] * len(table), pa.list_(pa.int64())))
    file = io.BytesIO()
    (parquet.write_table if suffix == ".parquet" else feather.write_feather)(table, file)
    return file.getvalue()


def _column(draw: Draw) -> Cell:
    """A kind of cells, of which some may be of another kind."""
    main = KINDS[draw.choice(LIKELY if draw.random() < 0.9 else [*KINDS])]
    if draw.random() < 0.85:
        return main
    other, share = KINDS[draw.choice([*KINDS])], draw.choice([0.02, 0.2, 0.5])
    return lambda draw: (other if draw.random() < share else main)(draw)


def _written(draw: Draw, names: Sequence[str], rows: Sequence[Sequence[str]]) -> bytes:
    text = io.StringIO()
    writer = csv.writer(
        text, delimiter=draw.choice(",,,,,,;\t"), lineterminator=draw.choice(["\n", "\n", "\r\n", "\r"])
    )
    header = list(names)
    if draw.random() < 0.05:
        header[draw.randrange(len(header))] = draw.choice(["", header[0], " ward", "y\n"])
    if draw.random() < 0.97:
        writer.writerow(header)
    ragged = draw.randrange(len(rows)) if rows and draw.random() < 0.05 else None
    for k, row in enumerate(rows):
        writer.writerow(row if k != ragged else draw.choice([row[:-1], [*row, "extra"], []]))
    return text.getvalue().encode(draw.choice(ENCODINGS), errors="replace")


def _damaged(draw: Draw, data: bytes) -> bytes:
    """The bytes of a file, of which one in ten is damaged."""
    if draw.random() > 0.1 or not data:
        return data
    place = draw.randrange(len(data))
    return draw.choice([
        lambda: data[:place],
        lambda: data[:place] + draw.choice([b"\0", b"\xff", b'"', b"\n\n", b"\r", b'"' * 7]) + data[place:],
        lambda: draw.randbytes(len(data)),
        lambda: b"",
        lambda: data + b"," * 1000,
    ])()  # fmt: skip
