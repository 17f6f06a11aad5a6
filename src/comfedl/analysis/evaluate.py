"""The scores of a trained model at each client, with their 95 % intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from comfedl.analysis.load_run import SavedRun
from comfedl.analysis.own_data import note_known, own_data
from comfedl.analysis.saved_model import float_dtype, load_learner, model_errors, read_labelled
from comfedl.core.client_statistics import Row, summarise_columns
from comfedl.core.intervals import score_intervals
from comfedl.data.federated import Batch
from comfedl.data.from_tables import rows_by_name
from comfedl.training.client_table import HIGH, LOW, ClientTable
from comfedl.utils import checks, rng, samples
from comfedl.utils.errors import ConfigError


@dataclass(frozen=True)
class ClientScores:
    """The scores of a model at each client.

    Attributes:
        split: the split, or the name of a file.
        rows: one row per client with samples: "client", "samples", "accuracy", "accuracy_low", "accuracy_high" and so
            on; of a personal model "personal_accuracy".
        summary: statistics over clients, with keys such as "loss.worst".
        table: the rows as a table, with those of the clients without samples.
    """

    split: str
    rows: list[Row]
    summary: dict[str, float]
    table: ClientTable


def evaluate(run: SavedRun, split: str | None = None, data: Path | None = None) -> ClientScores:
    """Score the global model on each client's data, and each client's personal model if it was saved.

    The data are a split of the run's own, rebuilt from its config (default: test, else validation, else train), or a
    file of labelled samples, in which a column may name the client.

    Raises:
        RunFolderError: if the run's own data have changed since it began.
    """
    names: Sequence[str] = ()
    batches: Mapping[str, Batch]
    learner, to_state = load_learner(run)
    shared = to_state(run.tensors)
    if data is not None:
        if split is not None:
            raise ConfigError("--split and --data are both given; give one of them.")
        split, batches = data.name, _from_file(run, data)
    else:
        split, batches, names = _from_config(run, split)
    seed = 0 if run.config is None else run.config.seed
    found: dict[str, Row] = {}
    methods: dict[str, str] = {}
    with model_errors(split if data is None else data):
        for name, batch in batches.items():
            models = {"": shared}
            if run.has_personal and (data is None or name in run.clients):
                models["personal_"] = to_state(run.personal(name))
            row: Row = {"client": name, "samples": samples.count(batch[1])}
            draws = partial(rng.generator, seed, f"intervals {split}", 0, name)
            for prefix, model in models.items():
                bounds = score_intervals(learner, model, batch, draws)
                for key, score in learner.scores(model, batch).items():
                    row[prefix + key] = float(score)
                    if key in bounds:
                        row[f"{prefix}{key}{LOW}"], row[f"{prefix}{key}{HIGH}"], methods[key] = bounds[key]
            found[name] = row
    rows = [*found.values()]
    table = ClientTable(split, [found.get(name, {"client": name, "samples": 0}) for name in names or found], methods)
    columns = {key: [float(row[key]) for row in rows if key in row] for key in table.scores}  # type: ignore[arg-type]
    return ClientScores(split, rows, summarise_columns(columns), table)


def _from_config(run: SavedRun, split: str | None) -> tuple[str, Mapping[str, Batch], Sequence[str]]:
    fed = own_data(run).to(float_dtype(run), torch.device("cpu"))
    available = [name for name in ("test", "validation", "train") if fed.split(name) is not None]
    split = split or available[0]
    checks.one_of("split", split, available)
    found = fed.split(split)
    assert found is not None
    return split, found, fed.names


def _from_file(run: SavedRun, data: Path) -> dict[str, Batch]:
    """The labelled samples by client; one client named like the file if no column names them."""
    x, y, table = read_labelled(run, data)
    note_known(run, data, x, y)
    column = None if run.encoding is None else run.encoding.client
    if table is None or column is None or column not in table.columns:
        return {data.stem: (x, y)}
    names = np.array(table.strings(column), dtype=object)
    return {name: (x[rows], y[rows]) for name, rows in rows_by_name(names).items()}
