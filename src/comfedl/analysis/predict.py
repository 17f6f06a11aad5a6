"""After training: predictions for new rows, scores of each client, and a model for a client that was never seen."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from comfedl.algorithms.base import descend
from comfedl.analysis.load_run import SavedRun, read_tensors
from comfedl.core.client_statistics import Row, summarise_columns
from comfedl.core.objectives import Learner, LocalLoss, Model, chunks
from comfedl.data.federated import Batch
from comfedl.data.from_folders import IMAGES, read_arrays, read_image
from comfedl.data.from_tables import Shares, grouped
from comfedl.data.tabular import Encoding, Table, read_csv
from comfedl.models.losses import REGRESSIONS
from comfedl.training.personal_models import model_bytes
from comfedl.training.validation import make_learner
from comfedl.utils import checks, rng
from comfedl.utils.errors import ConfigError, DataError
from comfedl.utils.files import write_atomic


def _learner(run: SavedRun) -> tuple[Learner, Callable[[dict[str, Tensor]], Model]]:
    """The functions of a run's model, and how tensors from a file become its state."""
    learner, initial, _ = make_learner(run.module, run.settings.loss, run.settings.make_algorithm())
    if learner.module is None:
        raise ConfigError(f"{run.path} is a run of a problem of your own, which has no outputs and no metrics.")

    def state(tensors: dict[str, Tensor]) -> Model:
        filled = run.with_tensors(tensors, run.path)
        params = {name: part.detach() for name, part in filled.named_parameters()}
        return Model(
            params=params, buffers={name: part for name, part in filled.named_buffers() if name in initial["buffers"]}
        )

    return learner, state


def _kind(run: SavedRun) -> torch.dtype:
    return next(run.module.parameters()).dtype


# Predictions.


def predict(run: SavedRun, data: Path, client: str | None = None, model: Path | None = None) -> str:
    """The predictions for a file's rows as CSV: row, prediction, and the probability of each label."""
    if client is not None and model is not None:
        raise ConfigError("--client and --model are both given; give one of them.")
    learner, state = _learner(run)
    tensors = run.tensors if client is None else run.personal(client)
    whole = state(tensors if model is None else read_tensors(model))
    names, x = _inputs(run, data)
    x = x.to(_kind(run)) if x.is_floating_point() else x
    parts = []
    with torch.no_grad():
        for part, _ in chunks((x, x)):
            try:
                output, _ = learner.output(whole["params"], whole["buffers"], part, train=False)
            except (RuntimeError, ValueError, TypeError, IndexError) as error:
                raise DataError(f"The model cannot be applied to the samples of {data} ({error}).") from None
            parts.append(output)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows(_rows(run, names, torch.cat(parts).double()))
    return text.getvalue()


def _inputs(run: SavedRun, data: Path) -> tuple[list[str], Tensor]:
    """What each sample of a file or folder is called, and the model's input."""
    encoding = run.encoding
    if encoding is not None and encoding.columns:
        table = read_csv(data)
        return [str(place + 1) for place in range(len(table))], torch.from_numpy(encoding.x(table))
    if encoding is not None and encoding.image is not None:
        mode, height, width = encoding.image
        files = [data] if data.is_file() else sorted(data.iterdir()) if data.is_dir() else []
        files = [file for file in files if file.suffix.lower() in IMAGES]
        if not files:
            raise DataError(f"{data} is no image and no folder of images (PNG, JPEG).")
        try:
            images = [torch.from_numpy(read_image(file, mode, (height, width), resize=True)) for file in files]
        except OSError as error:
            raise DataError(f"An image of {data} cannot be read ({error}).") from None
        return [file.name for file in files], torch.stack(images)
    if data.suffix.lower() not in (".npz", ".safetensors"):
        raise DataError(
            f"{data} cannot be used: the run's data were no table, so its inputs must be arrays; give an .npz or "
            ".safetensors file with an array x."
        )
    (x,) = read_arrays(data, ["x"])
    return [str(place + 1) for place in range(len(x))], x if x.is_floating_point() else x.float()


def _rows(run: SavedRun, names: list[str], output: Tensor) -> Iterator[list[Any]]:
    loss, encoding = run.settings.loss, run.encoding or Encoding()
    if loss in REGRESSIONS:
        values = output.reshape(len(output), -1) * encoding.scale + encoding.mean
        several = values.shape[1] > 1
        yield ["row", *(f"prediction {k + 1}" if several else "prediction" for k in range(values.shape[1]))]
        for name, row in zip(names, values.tolist(), strict=True):
            yield [name, *(f"{value:.7g}" for value in row)]
        return
    if loss == "bce":
        one = torch.sigmoid(output.reshape(len(output)))
        chances = torch.stack([1 - one, one], dim=1)
    else:
        chances = torch.softmax(output, dim=1)
    labels = encoding.classes or tuple(str(k) for k in range(chances.shape[1]))
    yield ["row", "prediction", *(f"probability of {label}" for label in labels)]
    for name, row, best in zip(names, chances.tolist(), chances.argmax(dim=1).tolist(), strict=True):
        yield [name, labels[best], *(f"{chance:.6f}" for chance in row)]


# Scores.


@dataclass(frozen=True)
class Scores:
    """What each client's data say of a run's model: one row a client, and their summary as in the records."""

    split: str
    rows: list[Row]
    summary: dict[str, float]


def evaluate(run: SavedRun, split: str | None = None, data: Path | None = None) -> Scores:
    """Each client's scores of the global model, and of its own where that was kept.

    They are on a split of the run's data, which are made anew by its config (by default test, else validation, else
    train), or on a file of rows with labels, of which a column may name the client.
    """
    learner, state = _learner(run)
    shared = state(run.tensors)
    if data is not None:
        if split is not None:
            raise ConfigError("--split and --data are both given; give one of them.")
        split, batches = data.name, _labelled(run, data)
    else:
        split, batches = _split(run, split)
    rows: list[Row] = []
    for name, batch in batches.items():
        scores = {key: float(score) for key, score in learner.scores(shared, batch).items()}
        if run.has_personal and (data is None or name in run.clients):
            own = learner.scores(state(run.personal(name)), batch)
            scores |= {f"personal_{key}": float(score) for key, score in own.items()}
        rows.append({"client": name, "samples": len(batch[0]), **scores})
    keys = dict.fromkeys(key for row in rows for key in row if key not in ("client", "samples"))
    columns = {key: [float(row[key]) for row in rows if key in row] for key in keys}  # type: ignore[arg-type]
    return Scores(split, rows, summarise_columns(columns))


def scores_csv(scores: Scores) -> str:
    """One row a client."""
    text = io.StringIO()
    names = list(dict.fromkeys(key for row in scores.rows for key in row))
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(scores.rows)
    return text.getvalue()


def _split(run: SavedRun, split: str | None) -> tuple[str, dict[str, Batch]]:
    config = run.settings
    fed = config.make_data().to(_kind(run), torch.device("cpu"))
    there = [name for name in ("test", "validation", "train") if fed.split(name) is not None]
    split = split or there[0]
    checks.one_of("split", split, there)
    found = fed.split(split)
    assert found is not None
    return split, dict(found)


def _labelled(run: SavedRun, data: Path) -> dict[str, Batch]:
    """The samples of a file or folder with labels, by client where a table's column names it."""
    x, y, table = _samples(run, data)
    encoding = run.encoding or Encoding()
    if table is None or encoding.client is None or encoding.client not in table.columns:
        return {data.stem: (x, y)}
    names = np.array(table.texts(encoding.client), dtype=object)
    return {name: (x[rows], y[rows]) for name, rows in grouped(names).items()}


def _samples(run: SavedRun, data: Path) -> tuple[Tensor, Tensor, Table | None]:
    """Inputs and y as in training, and the table where they are one."""
    encoding, table = run.encoding or Encoding(), None
    if encoding.columns:
        table = read_csv(data)
        x, y = torch.from_numpy(encoding.x(table)), torch.from_numpy(encoding.y(table))
    elif encoding.image is not None:
        folders = [folder for folder in sorted(data.iterdir()) if folder.is_dir()] if data.is_dir() else []
        if not folders:
            raise DataError(f"{data} must be a folder with a folder of images for each class.")
        parts = [_inputs(run, folder)[1] for folder in folders]
        labels = encoding.labels([folder.name for folder in folders], str(data))
        x, y = torch.cat(parts), torch.repeat_interleave(torch.from_numpy(labels), torch.tensor([*map(len, parts)]))
    else:
        x = _inputs(run, data)[1]
        (y,) = read_arrays(data, ["y"])
    if len(x) != len(y):
        raise DataError(f"{data} has {len(x)} samples in x but {len(y)} in y; give one y for each x.")
    kind = _kind(run)
    return x.to(kind), y.to(kind) if y.is_floating_point() else y.long(), table


# A client that was never seen.


@dataclass(frozen=True)
class Personalised:
    """What adapting the global model to a new client's rows gave, on rows of it that were held out."""

    model: Model
    before: dict[str, float]
    after: dict[str, float]
    adapted_on: int
    held_out: int
    lr: float
    steps: int


def personalise(
    run: SavedRun,
    data: Path,
    out: Path,
    steps: int | None = None,
    lr: float | None = None,
    held_out: float = 0.3,
    seed: int = 0,
) -> Personalised:
    """Adapt the global model to a client that was not there in training, and write its model.

    The rows that are held out have no part in adapting. Steps and their size are those by which the run's method makes
    personal models, where they are not given.
    """
    checks.between("held_out", held_out, 0, 1)
    checks.positive("held_out", held_out)
    checks.at_least("seed", seed, 0)
    algorithm = run.settings.make_algorithm()
    own_lr, own_steps = algorithm.adaptation
    lr, steps = own_lr if lr is None else lr, own_steps if steps is None else steps
    checks.positive("lr", lr)
    checks.at_least("steps", steps, 1)
    learner, state = _learner(run)
    x, y, _ = _samples(run, data)
    labels = torch.zeros(len(y), dtype=torch.int64) if y.is_floating_point() or y.ndim > 1 else y
    parts = Shares(held_out, 0.0, seed).divide(data.stem, labels.numpy())
    if not len(parts["validation"]):
        raise DataError(f"{data} has {len(x)} row{'s' if len(x) > 1 else ''}, too few to hold some out; give more.")
    train, held = ((x[parts[name]], y[parts[name]]) for name in ("train", "validation"))
    start = state(run.tensors)
    batches = [train] * steps
    if algorithm.batch_size is not None and algorithm.batch_size < len(train[0]):
        rows = rng.subsets([rng.key(seed, "personalise")], [len(train[0])], steps, algorithm.batch_size)[0]
        batches = [(train[0][row], train[1][row]) for row in torch.from_numpy(rows)]
    frozen = {name for name, part in run.module.named_parameters() if not part.requires_grad}
    trained = {name: part for name, part in start["params"].items() if name not in frozen}
    fixed = {name: part for name, part in start["params"].items() if name in frozen}
    found = descend(LocalLoss(learner), Model(params=trained, buffers=start["buffers"]), batches, batches, lr).model
    model = Model(params={**found["params"], **fixed}, buffers=found["buffers"])
    scores = [{key: float(score) for key, score in learner.scores(at, held).items()} for at in (start, model)]
    if not all(part.isfinite().all() for part in model["params"].values()):
        raise DataError(f"Adapting with lr = {lr:g} left the finite numbers; give a smaller --lr.")
    write_atomic(out, model_bytes(model))
    return Personalised(model, scores[0], scores[1], len(train[0]), len(held[0]), lr, steps)
