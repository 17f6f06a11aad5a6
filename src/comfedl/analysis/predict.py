"""Predictions of a trained model for new samples, as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from comfedl.analysis.load_run import SavedRun, read_tensors
from comfedl.analysis.saved_model import load_learner, model_errors, read_inputs
from comfedl.core.learner import chunks
from comfedl.data.tabular import Encoding
from comfedl.models.losses import REGRESSIONS
from comfedl.utils.csv_cells import without_formulas
from comfedl.utils.errors import ConfigError, DataError


def predict(run: SavedRun, data: Path, client: str | None = None, model: Path | None = None) -> str:
    """Predict the samples of a file or folder; return CSV with the prediction and the class probabilities.

    The model is the global one, a client's personal one, or that of a file.
    """
    if client is not None and model is not None:
        raise ConfigError("--client and --model are both given; give one of them.")
    learner, to_state = load_learner(run)
    tensors = run.tensors if client is None else run.personal(client)
    state = to_state(tensors if model is None else read_tensors(model))
    names, x = read_inputs(run, data)
    outputs = []
    with torch.no_grad(), model_errors(data):
        for part, _ in chunks((x, x)):
            output, _ = learner.output(state["params"], state["buffers"], part, train=False)
            outputs.append(output)
    whole = torch.cat(outputs).double()
    if not bool(whole.isfinite().all()):
        row = int((~whole.isfinite()).reshape(len(whole), -1).any(dim=1).nonzero()[0])
        raise DataError(
            f"The model's output for {names[row]!r} of {data} is NaN or infinite; check this sample's values."
        )
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows(map(without_formulas, _rows(run, names, whole)))
    return text.getvalue()


def _rows(run: SavedRun, names: list[str], output: Tensor) -> Iterator[list[Any]]:
    loss, encoding = run.settings.loss_name, run.encoding or Encoding()
    if loss in REGRESSIONS:
        values = output.reshape(len(output), -1) * encoding.scale + encoding.mean
        several = values.shape[1] > 1
        yield ["row", *(f"prediction {k + 1}" if several else "prediction" for k in range(values.shape[1]))]
        for name, row in zip(names, values.tolist(), strict=True):
            yield [name, *(f"{value:.7g}" for value in row)]
        return
    if loss == "bce":
        positive = torch.sigmoid(output.reshape(len(output)))
        probabilities = torch.stack([1 - positive, positive], dim=1)
    else:
        probabilities = torch.softmax(output, dim=1)
    labels = encoding.classes or tuple(str(k) for k in range(probabilities.shape[1]))
    yield ["row", "prediction", *(f"probability of {label}" for label in labels)]
    for name, row, best in zip(names, probabilities.tolist(), probabilities.argmax(dim=1).tolist(), strict=True):
        yield [name, labels[best], *(f"{probability:.6f}" for probability in row)]
