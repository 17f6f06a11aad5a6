"""Read tables from files: CSV, and Parquet and Arrow with pyarrow."""

from __future__ import annotations

import codecs
import csv
import io
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from comfedl.data.cell_format import CellFormat
from comfedl.data.table import Table
from comfedl.utils.errors import DataError

PARQUET, ARROW = (".parquet", ".pq"), (".arrow", ".feather", ".ipc")
TABLES = (".csv", ".tsv", *PARQUET, *ARROW)
SAMPLE = 50  # lines that the delimiter is chosen by
MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)

Lines = list[tuple[int, list[str]]]


def read_table(path: Path, format: CellFormat | None = None) -> Table:
    """Read a table by its file's suffix: Parquet, Arrow or Feather, and otherwise CSV."""
    kind = path.suffix.lower()
    return _read_arrow(path, format or CellFormat()) if kind in (*PARQUET, *ARROW) else read_csv(path, format)


def read_csv(path: Path, format: CellFormat | None = None) -> Table:
    """Read a CSV file; the delimiter is a comma, a semicolon or a tab.

    Lines of a single cell before the table, such as a title, are left out with a note.
    """
    format = format or CellFormat()
    text, encoding_notes = _read_text(path, format)
    delimiter = _find_delimiter(text, format)
    try:
        reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
        lines = [(reader.line_num, [cell.strip() for cell in row]) for row in reader if row]
    except csv.Error as error:
        raise DataError(f"{path} cannot be read as CSV ({error}); give a text file.") from None
    lines, notes = _without_title(lines, path.name)
    lines = _without_trailing(lines, format)
    notes = (*notes, *encoding_notes)
    names, lines = _take_header(lines, path, format)
    if not lines:
        raise DataError(f"{path} has no rows; give a header line with the column names, and one line per sample.")
    for number, row in lines:
        if len(row) != len(names):
            what = "the config names" if isinstance(format.header, tuple) else "the header has"
            if format.header is False:
                what = "the first line has"
            raise DataError(
                f"Line {number} of {path} has {len(row)} cells, but {what} {len(names)}; the delimiter was taken to be "
                f"{delimiter!r}."
            )
    cells = np.array([row for _, row in lines], dtype=object)
    columns = {name: cells[:, i] for i, name in enumerate(names)}
    if format.header is None:
        _refuse_data_as_header(names, columns, path, format)
    return Table(columns, path.name, untyped=True, format=format, notes=notes)


def _read_text(path: Path, format: CellFormat) -> tuple[str, tuple[str, ...]]:
    """The file's text; and a note if its bytes are probably those of another encoding."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise DataError(f"There is no file {path}; check the name.") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read as CSV ({error}); give a text file.") from None
    encoding = next((name for mark, name in MARKS if data.startswith(mark)), format.encoding)
    try:
        text = data.decode(encoding)
    except (UnicodeError, ValueError):
        other = "cp1252" if format.encoding != "cp1252" else "utf-8"
        raise DataError(
            f"{path} cannot be read as CSV: it is not text in {encoding}; save it as UTF-8, or name its encoding under "
            f'[data], such as encoding = "{other}".'
        ) from None
    return text, _note_utf8(data, text, encoding, path.name)


def _note_utf8(data: bytes, text: str, encoding: str, source: str) -> tuple[str, ...]:
    """Note a file that is read in an encoding of one byte per letter, although it looks like UTF-8."""
    if data.isascii() or len(text) != len(data) or encoding in ("ascii", "utf-8", "utf-8-sig"):
        return ()
    try:
        meant = data.decode("utf-8")
    except UnicodeDecodeError:
        return ()
    place = next(i for i, letter in enumerate(meant) if not letter.isascii())  # all before it take one byte each
    return (
        f"{source} is read in {encoding}, as the config or the run says, but it looks like UTF-8: "
        f"{text[place : place + len(meant[place].encode())]!r} is probably {meant[place]!r}. For training set "
        f'encoding = "utf-8"; new rows of a run can be saved in {encoding}, or in UTF-8 with a byte order mark.',
    )


def _without_trailing(lines: Lines, format: CellFormat) -> Lines:
    """Leave out a last column that is empty everywhere, of a file that ends each line with a delimiter."""
    fewest = len(format.header) if isinstance(format.header, tuple) else 1
    if format.header is False or len({len(row) for _, row in lines}) != 1:
        return lines
    while len(lines[0][1]) > fewest and all(row[-1] == "" for _, row in lines):
        lines = [(number, row[:-1]) for number, row in lines]
    return lines


def _find_delimiter(text: str, format: CellFormat) -> str:
    """The delimiter by which the most lines have the same number of cells."""
    sample = [line for line in io.StringIO(text[: 1 << 20], newline=None).readlines(1 << 16) if line.strip()][:SAMPLE]

    def score(delimiter: str) -> tuple[int, int]:
        try:
            widths = [len(row) for row in csv.reader(sample, delimiter=delimiter) if row]
        except csv.Error:
            return 0, 0
        width, lines = max(Counter(widths).items(), key=lambda pair: (pair[1], pair[0]), default=(1, 0))
        return (lines, width) if width > 1 else (0, 0)

    scores = {delimiter: score(delimiter) for delimiter in ",;\t"}
    if format.decimal == "," and max(scores[";"], scores["\t"]) > (0, 0):
        del scores[","]
    return max(scores, key=lambda delimiter: scores[delimiter])


def _without_title(lines: Lines, source: str) -> tuple[Lines, tuple[str, ...]]:
    """Leave out lines of one cell that stand before a table of several columns."""
    width = Counter(len(row) for _, row in lines).most_common(1)[0][0] if lines else 1
    start = next((i for i, (_, row) in enumerate(lines) if len(row) > 1), 0)
    if width > 1:
        titles, lines = lines[:start], [*lines[start:]]
        lines = [(number, row) for number, row in lines if row != [""]]
        shown = [row[0][:60] for _, row in titles if row[0]]
        if shown:
            more = f" and {len(shown) - 1} more" if len(shown) > 1 else ""
            return lines, (f"{source} begins with a line of one cell ({shown[0]!r}){more}, which is left out.",)
    return lines, ()


def _take_header(lines: Lines, path: Path, format: CellFormat) -> tuple[list[str], Lines]:
    """The column names, and the lines of samples."""
    if not lines:
        return [], []
    first = lines[0][1]
    if format.header is False:
        return [str(k + 1) for k in range(len(first))], lines
    if isinstance(format.header, tuple):
        names = list(format.header)
        return names, lines[1:] if sorted(first) == sorted(names) else lines
    for i, name in enumerate(first):
        if not name or name in first[:i]:
            fault = f"occurs twice ({name!r})" if name else f"of column {i + 1} is empty"
            raise DataError(
                f"In the header of {path} a name {fault}; give each column a distinct name, or, if the file has no "
                'header line, header = ["age", ...] with the names, or header = false for "1", "2", ...'
            )
    return first, lines[1:]


def _refuse_data_as_header(
    names: Sequence[str], columns: dict[str, NDArray[Any]], path: Path, format: CellFormat
) -> None:
    """Refuse a first line that looks like data: numbers above numbers, or values that occur again below."""

    def fits(name: str) -> bool:
        below = columns[name][:1000]
        if format.number(name) is not None:
            return all(format.number(cell) is not None for cell in below[below != ""])
        return name in below

    fractions = any(
        (number := format.number(name)) is not None and number != int(number) for name in names if _finite(name, format)
    )
    matching = sum(fits(name) for name in names)
    numeric = sum(format.number(name) is not None for name in names)
    if 2 * matching > len(names) and (matching > numeric or fractions):
        shown = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
        raise DataError(
            f"The first line of {path} looks like data, not like column names ({shown}); if the file has no header "
            'line, name its columns with header = ["age", ...] or call them "1", "2", ... with header = false; if '
            "these are the names, set header = true."
        )


def _finite(text: str, format: CellFormat) -> bool:
    number = format.number(text)
    return number is not None and bool(np.isfinite(number))


def _read_arrow(path: Path, format: CellFormat) -> Table:
    with _arrow_errors(path):
        table = _arrow_table(path)
        columns = {name: to_numpy(table.column(k)) for k, name in enumerate(table.column_names)}
    check_columns(path, table.column_names, table.num_rows)
    return Table(columns, path.name, format=format)


@contextmanager
def _arrow_errors(path: Path) -> Iterator[None]:
    """Report what is wrong with a file that pyarrow reads."""
    try:
        import pyarrow as pa
    except ImportError:
        raise DataError(
            f"{path} is read with pyarrow, which is not installed; run: pip install pyarrow (or give a CSV file)."
        ) from None
    if not path.is_file():
        raise DataError(f"There is no file {path}; check the name.")
    try:
        yield
    except DataError:
        raise
    except (pa.ArrowException, OSError, ValueError, TypeError, OverflowError) as error:
        text = " ".join(str(error).split())[:200]
        raise DataError(f"{path} cannot be read ({text}); give a Parquet, Arrow or Feather file, or CSV.") from None


@contextmanager
def opened_parquet(path: Path) -> Iterator[Any]:
    """A Parquet file of which only the description has been read."""
    with _arrow_errors(path):
        from pyarrow import parquet

        with parquet.ParquetFile(path) as file:
            yield file


def check_columns(path: Path, names: Sequence[str], rows: int) -> None:
    """Check the columns' names, and that there are rows."""
    if not names or not rows:
        raise DataError(f"{path} has no rows; give a table with one row per sample.")
    twice = next((name for i, name in enumerate(names) if not name or name in names[:i]), None)
    if twice is not None:
        raise DataError(f"{path} has two columns {twice!r}, or one without a name; rename one.")


def _arrow_table(path: Path) -> Any:
    import pyarrow as pa
    from pyarrow import feather, parquet

    if path.suffix.lower() in PARQUET:
        return parquet.ParquetFile(path).read()
    try:
        return feather.read_table(path)
    except pa.ArrowInvalid:
        with pa.memory_map(str(path)) as source:  # Arrow's stream format, which Hugging Face's caches have
            return pa.ipc.open_stream(source).read_all()


def to_numpy(column: Any) -> NDArray[Any]:
    """A column as numbers, booleans, dates or objects; NaN, NaT or None where a value is missing."""
    import pyarrow as pa

    kind = column.type
    if pa.types.is_dictionary(kind):
        column = column.cast(kind.value_type)
        kind = column.type
    if pa.types.is_decimal(kind):
        column = column.cast(pa.float64())
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        return np.asarray(column.to_numpy())
    if pa.types.is_boolean(kind) and not column.null_count:
        return np.asarray(column.to_numpy())
    if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
        naive = column.cast(pa.timestamp("us"))
        return np.asarray(naive.to_numpy()).astype("datetime64[us]")
    values = np.empty(len(column), dtype=object)
    for row, value in enumerate(column.to_pylist()):  # a list must stay one value
        values[row] = value
    return values
