"""ClientScores of a trained model per client."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from comfedl.analysis.load_run import SavedRun
from comfedl.analysis.saved_model import float_dtype, load_learner, model_errors, read_labelled
from comfedl.core.client_statistics import Row, summarise_columns
from comfedl.data.federated import Batch
from comfedl.data.from_tables import rows_by_name
from comfedl.utils import checks
from comfedl.utils.errors import ConfigError


@dataclass(frozen=True)
class ClientScores:
    """One row of scores per client, and their summary over clients, with keys such as ``loss.worst``."""

    split: str
    rows: list[Row]
    summary: dict[str, float]


def evaluate(run: SavedRun, split: str | None = None, data: Path | None = None) -> ClientScores:
    """Score the global model on each client's data, and each client's personal model if it was saved.

    The data are a split of the run's own, rebuilt from its config (default: test, else validation, else train), or a
    file of labelled samples, in which a column may name the client.
    """
    learner, to_state = load_learner(run)
    shared = to_state(run.tensors)
    if data is not None:
        if split is not None:
            raise ConfigError("--split and --data are both given; give one of them.")
        split, batches = data.name, _from_file(run, data)
    else:
        split, batches = _from_config(run, split)
    rows: list[Row] = []
    with model_errors(split if data is None else data):
        for name, batch in batches.items():
            scores = {key: float(score) for key, score in learner.scores(shared, batch).items()}
            if run.has_personal and (data is None or name in run.clients):
                personal = learner.scores(to_state(run.personal(name)), batch)
                scores |= {f"personal_{key}": float(score) for key, score in personal.items()}
            rows.append({"client": name, "samples": len(batch[0]), **scores})
    keys = dict.fromkeys(key for row in rows for key in row if key not in ("client", "samples"))
    columns = {key: [float(row[key]) for row in rows if key in row] for key in keys}  # type: ignore[arg-type]
    return ClientScores(split, rows, summarise_columns(columns))


def _from_config(run: SavedRun, split: str | None) -> tuple[str, dict[str, Batch]]:
    fed = run.settings.make_data(encoding=run.encoding).to(float_dtype(run), torch.device("cpu"))
    available = [name for name in ("test", "validation", "train") if fed.split(name) is not None]
    split = split or available[0]
    checks.one_of("split", split, available)
    found = fed.split(split)
    assert found is not None
    return split, dict(found)


def _from_file(run: SavedRun, data: Path) -> dict[str, Batch]:
    """The labelled samples by client; one client named like the file if no column names them."""
    x, y, table = read_labelled(run, data)
    column = None if run.encoding is None else run.encoding.client
    if table is None or column is None or column not in table.columns:
        return {data.stem: (x, y)}
    names = np.array(table.strings(column), dtype=object)
    return {name: (x[rows], y[rows]) for name, rows in rows_by_name(names).items()}
