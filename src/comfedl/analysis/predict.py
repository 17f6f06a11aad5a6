"""Predictions of a trained model for new samples, as CSV."""

from __future__ import annotations

import csv
import dataclasses
import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from comfedl.analysis.load_run import SavedRun, read_tensors
from comfedl.analysis.saved_model import float_dtype, load_learner, logger, model_errors, read_inputs, read_rows
from comfedl.core.learner import Learner, Model, Params, chunks
from comfedl.data.from_tables import rows_by_name
from comfedl.data.table import Table
from comfedl.data.tabular import Encoding
from comfedl.models.losses import REGRESSIONS, Loss
from comfedl.models.outputs import logits
from comfedl.utils.csv_cells import without_formulas
from comfedl.utils.errors import ConfigError, DataError, nearest
from comfedl.utils.samples import Samples, count

Columns = Mapping[str, Sequence[str]]
Outputs = Mapping[str, Tensor]
GLOBAL = "global"  # the model of a row whose client has none


class NewSamples(NamedTuple):
    """Samples to predict: their names, the model's inputs, and the table that they come from, if it is one."""

    names: Sequence[str]
    x: Samples
    table: Table | None


def predict(
    run: SavedRun,
    data: Path,
    client: str | None = None,
    model: Path | None = None,
    client_column: str | None = None,
    keep: Sequence[str] | None = None,
) -> str:
    """Predict the samples of a file or folder; return CSV with the prediction and the class probabilities.

    The model is the global one, a client's personal one, that of a file, or with ``client_column`` for each row the
    personal one of the client that this column names (the global one for clients that are not the run's). Columns of a
    table that the model does not use are written too, or those that ``keep`` names.
    """
    given = {"--client": client, "--model": model, "--client-column": client_column}
    chosen = [name for name, value in given.items() if value is not None]
    if len(chosen) > 1:
        raise ConfigError(f"{chosen[0]} and {chosen[1]} are both given; give one of them.")
    learner, to_state = load_learner(run, scores=False)
    samples = _read(run, data)
    kept = _kept(run, samples, data, keep)
    if client_column is None:
        tensors = run.tensors if client is None else run.personal(client)
        tensors = tensors if model is None else read_tensors(model)
        output, models = _apply(learner, to_state(tensors), samples.x, data), {}
    else:
        output, used = _apply_own(run, learner, to_state, samples, data, client_column)
        models = {"model": used}
    bad = torch.stack([~part.isfinite().reshape(len(part), -1).all(dim=1) for part in output.values()]).any(dim=0)
    if bool(bad.any()):
        row = int(bad.nonzero()[0])
        raise DataError(
            f"The model's output for {samples.names[row]!r} of {data} is NaN or infinite; check this sample's values."
        )
    predicted = _predictions(run, output)
    written = {"row": samples.names, **models, **predicted}
    carried = {f"input {name}" if name in written else name: cells for name, cells in kept.items()}
    columns: Columns = {"row": samples.names, **carried, **models, **predicted}
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(without_formulas(columns))
    writer.writerows(without_formulas(row) for row in zip(*columns.values(), strict=True))
    return text.getvalue()


def _read(run: SavedRun, data: Path) -> NewSamples:
    encoding = run.encoding
    if encoding is None or not encoding.columns:
        return NewSamples(*read_inputs(run, data), None)
    table = read_rows(encoding, data)
    x = torch.from_numpy(encoding.x(table)).to(float_dtype(run))
    return NewSamples([str(table.place(row)) for row in range(len(table))], x, table)


def _kept(run: SavedRun, samples: NewSamples, data: Path, keep: Sequence[str] | None) -> Columns:
    """The columns to be carried over: by default those that the model does not use."""
    if samples.table is None or run.encoding is None:
        if keep is not None:
            raise ConfigError(f"--keep names a column, but {data} is not a table; leave it out.")
        return {}
    table, inputs = samples.table, {column.name for column in run.encoding.columns}
    for name in keep or ():
        if name not in table.columns:
            raise ConfigError(f"--keep names {name!r}, but {data} has no such column; {nearest(name, table.columns)}.")
    names = [name for name in table.columns if name not in inputs] if keep is None else list(dict.fromkeys(keep))
    return {name: table.written(name) for name in names}


def _apply(learner: Learner, state: Model, x: Samples, data: Path) -> Outputs:
    """What the model returns for all samples: one tensor, or its logits, under the name "", else its parts by name."""
    found: list[Outputs] = []
    with torch.no_grad(), model_errors(data):
        for part, _ in chunks((x, x)):
            output, _ = learner.output(state["params"], state["buffers"], part, train=False)
            found.append(_parts(output, count(part)))
    return {name: torch.cat([each[name] for each in found]).double() for name in found[0]}


def _parts(output: Any, size: int) -> Outputs:
    """The tensors of an output that have a row for each sample."""
    known = logits(output)
    if isinstance(known, Tensor):
        return {"": known}
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        output = {field.name: getattr(output, field.name) for field in dataclasses.fields(output)}
    pairs = output.items() if isinstance(output, Mapping) else enumerate(output, start=1)
    rows = {str(name): part for name, part in pairs if isinstance(part, Tensor) and part.ndim and len(part) == size}
    if not rows:
        raise DataError(f"The model returns a {type(output).__name__} of which no tensor has a row for each sample.")
    return rows


def _apply_own(
    run: SavedRun,
    learner: Learner,
    to_state: Callable[[Params], Model],
    samples: NewSamples,
    data: Path,
    column: str,
) -> tuple[Outputs, Sequence[str]]:
    """Apply each row's own client's model; return the outputs, and the client whose model it was."""
    if samples.table is None:
        raise ConfigError(f"--client-column names a column, but {data} is not a table; give --client instead.")
    names = np.array(samples.table.texts(column), dtype=object)
    known, used = {*run.clients}, np.full(len(names), GLOBAL, dtype=object)
    output: dict[str, Tensor] = {}
    for name, rows in rows_by_name(np.where([name in known for name in names], names, "")).items():
        state = to_state(run.personal(name) if name in known else run.tensors)
        found = _apply(learner, state, samples.x[torch.from_numpy(rows)], data)
        for part, values in found.items():
            whole = output.setdefault(part, values.new_zeros((len(names), *values.shape[1:])))
            whole[torch.from_numpy(rows)] = values
        used[rows] = name if name in known else GLOBAL
    strangers = sorted({*names.tolist()} - known)
    if strangers:
        count = int((used == GLOBAL).sum())
        shown = ", ".join(repr(name) if name else "none given" for name in strangers[:5]) + (
            ", ..." if len(strangers) > 5 else ""
        )
        logger.warning(
            "%s: the clients of %d of %d rows are not clients of this run (%s); they get the global model.",
            data.name, count, len(names), shown,
        )  # fmt: skip
    return output, used.tolist()


def _predictions(run: SavedRun, outputs: Outputs) -> Columns:
    """The predicted values, or the labels and their probabilities; of several outputs, their numbers as they are."""
    own = run.settings.loss_name != run.settings.loss and not isinstance(run.settings.make_loss(), Loss)
    if [*outputs] != [""] or (own and outputs[""].ndim > 2):
        return {
            f"{name or 'output'} {k}" if part[0].numel() > 1 else name: [f"{value:.7g}" for value in column]
            for name, part in outputs.items()
            for k, column in enumerate(part.flatten(1).T.tolist() if part.ndim > 1 else [part.tolist()], start=1)
        }
    output = outputs[""]
    loss, encoding = run.settings.loss_name, run.encoding or Encoding()
    if loss in REGRESSIONS:
        values = output.reshape(len(output), -1) * encoding.scale + encoding.mean
        several = values.shape[1] > 1
        return {
            f"prediction {k + 1}" if several else "prediction": [f"{value:.7g}" for value in column]
            for k, column in enumerate(values.T.tolist())
        }
    if loss == "bce" and output[0].numel() > 1:
        likely = [*enumerate(torch.sigmoid(output.flatten(1)).T.tolist(), start=1)]
        decided = {f"prediction {k}": [str(int(p > 0.5)) for p in of] for k, of in likely}
        return decided | {f"probability {k}": [f"{p:.6f}" for p in of] for k, of in likely}
    if output.ndim > 2:  # of a sequence: the likeliest class at each position
        likeliest = output.argmax(dim=-1).flatten(1).T.tolist()
        return {f"prediction {k}": [str(label) for label in of] for k, of in enumerate(likeliest, start=1)}
    if loss == "bce":
        positive = torch.sigmoid(output.reshape(len(output)))
        probabilities = torch.stack([1 - positive, positive], dim=1)
    else:
        probabilities = torch.softmax(output, dim=1)
    labels = encoding.classes or tuple(str(k) for k in range(probabilities.shape[1]))
    best = [labels[k] for k in probabilities.argmax(dim=1).tolist()]
    chances = {
        f"probability of {label}": [f"{probability:.6f}" for probability in column]
        for label, column in zip(labels, probabilities.T.tolist(), strict=True)
    }
    return {"prediction": best, **chances}
