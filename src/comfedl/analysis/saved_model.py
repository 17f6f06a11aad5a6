"""A saved run's model as pure functions, and new data in the form that the model was trained on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from comfedl.analysis.load_run import SavedRun
from comfedl.core.learner import Learner, Model, Params
from comfedl.data.from_folders import IMAGES, read_arrays, read_image
from comfedl.data.table import Table
from comfedl.data.table_files import read_table
from comfedl.data.tabular import Encoding
from comfedl.models.losses import Loss, is_balanced
from comfedl.training.arguments import make_learner
from comfedl.training.run_folder import read_digest
from comfedl.utils import samples, tree
from comfedl.utils.errors import ComfedlError, ConfigError, DataError
from comfedl.utils.samples import Samples

logger = logging.getLogger("comfedl")


def load_learner(run: SavedRun, scores: bool = True) -> tuple[Learner, Callable[[Params], Model]]:
    """The functions of a run's model, and a function that turns saved tensors into its state.

    Without ``scores`` the loss is not used, so what it takes from the data of training is not needed.
    """
    config = run.settings
    loss, algorithm = config.make_loss(), config.make_algorithm()
    learner, initial, _ = make_learner(run.module, loss, algorithm, config.make_metrics(), config.task)
    if isinstance(loss, Loss) and scores:
        labels = torch.zeros(0)
        if is_balanced(loss):
            fed = config.make_data(encoding=run.encoding)
            labels = fed.train.all_y()
            if read_digest(run.path) not in (None, fed.digest()):
                logger.warning("The balanced weights of the loss are those of the run's data as they are now.")
        learner.loss_function = loss.resolved(labels, run.outputs)
    if learner.module is None:
        raise ConfigError(f"{run.path} trained a Composition, which has no outputs and no metrics.")

    def to_state(tensors: Params) -> Model:
        bad = next((name for name, part in tensors.items() if not tree.finite(part)), None)
        if bad is not None:
            raise DataError(
                f"The model has NaN or infinity in {bad!r}, so it has diverged or is damaged; train it again."
            )
        module = run.with_tensors(tensors, run.path)
        params = {name: part.detach() for name, part in module.named_parameters()}
        buffers = {name: part for name, part in module.named_buffers() if name in initial["buffers"]}
        return Model(params=params, buffers=buffers)

    return learner, to_state


def float_dtype(run: SavedRun) -> torch.dtype:
    """The dtype of the model's parameters, to which floating-point data are converted."""
    return next(run.module.parameters()).dtype


@contextmanager
def model_errors(source: Path | str) -> Iterator[None]:
    """Report an error of the model's code as an error of the data it was applied to."""
    try:
        yield
    except ComfedlError:
        raise
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        raise DataError(f"The model cannot be applied to the samples of {source} ({error}).") from None


def read_inputs(run: SavedRun, data: Path) -> tuple[list[str], Samples]:
    """The name of each sample of a file or folder, and the model's inputs."""
    encoding = run.encoding or Encoding()
    if encoding.columns:
        table = read_rows(encoding, data)
        names, x = [str(table.place(row)) for row in range(len(table))], torch.from_numpy(encoding.x(table))
    elif encoding.image is not None:
        mode, height, width = encoding.image
        files = [data] if data.is_file() else sorted(data.iterdir()) if data.is_dir() else []
        files = [file for file in files if file.suffix.lower() in IMAGES]
        if not files:
            raise DataError(f"{data} is neither an image nor a folder of images (PNG, JPEG).")
        images = [torch.from_numpy(read_image(file, mode, (height, width), resize=True)) for file in files]
        names, x = [file.name for file in files], torch.stack(images)
    else:
        if data.suffix.lower() not in (".npz", ".safetensors"):
            raise DataError(
                f"{data} cannot be used: the run was not trained on a table but on arrays; give an .npz or "
                ".safetensors file with an array x, or one for each of the model's inputs."
            )
        arrays = _read_each(run, data)
        return [str(row + 1) for row in range(samples.count(arrays))], arrays
    return names, x.to(float_dtype(run))


def _read_each(run: SavedRun, data: Path) -> Samples:
    """The array x of a file, or one for each of the model's inputs: by name, or x0, x1 and so on by position."""
    trained_on = run.input_dtype
    keys = list(trained_on) if isinstance(trained_on, dict) else None
    if isinstance(trained_on, tuple):
        keys = [f"x{k}" for k in range(len(trained_on))]
    kinds = [trained_on] if keys is None else [*tree.leaves(trained_on)]
    found: dict[str, Tensor] = {}
    for name, array, kind in zip(keys or ["x"], read_arrays(data, keys or ["x"]), kinds, strict=True):
        # Indices, say of an nn.Embedding, and masks must stay what they are.
        if not kind.is_floating_point and array.is_floating_point():
            wanted = str(kind).removeprefix("torch.")
            raise DataError(f"{name} of {data} has floating-point numbers, but the model was trained on {wanted}.")
        found[name] = array.to(float_dtype(run) if kind.is_floating_point else kind)
    lengths = {name: len(array) for name, array in found.items()}
    if len({*lengths.values()}) > 1:
        given = ", ".join(f"{length} rows in {name}" for name, length in lengths.items())
        raise DataError(f"{data} has {given}; give as many of each.")
    if keys is None:
        return found["x"]
    return found if isinstance(trained_on, dict) else tuple(found.values())


def read_rows(encoding: Encoding, data: Path, labelled: bool = False) -> Table:
    """The rows of a file that can be encoded, read as those of training were; what was left out is said."""
    table, notes = encoding.usable(read_table(data, encoding.format), labelled)
    for note in notes:
        logger.warning("%s", note)
    return table


def read_labelled(run: SavedRun, data: Path) -> tuple[Samples, Tensor, Table | None]:
    """Inputs and y in the form of training, and the table if the data are one."""
    encoding, table = run.encoding or Encoding(), None
    if encoding.columns:
        table = read_rows(encoding, data, labelled=True)
        x, y = torch.from_numpy(encoding.x(table)).to(float_dtype(run)), torch.from_numpy(encoding.y(table))
    elif encoding.image is not None:
        folders = [folder for folder in sorted(data.iterdir()) if folder.is_dir()] if data.is_dir() else []
        if not folders:
            raise DataError(f"{data} must be a folder with a folder of images for each class.")
        parts = [read_inputs(run, folder)[1] for folder in folders]
        labels = torch.from_numpy(encoding.labels([folder.name for folder in folders], str(data)))
        x, y = torch.cat(parts), torch.repeat_interleave(labels, torch.tensor([*map(len, parts)]))
    else:
        x = read_inputs(run, data)[1]
        (y,) = read_arrays(data, ["y"])
    if samples.count(x) != len(y):
        raise DataError(f"{data} has {samples.count(x)} samples in x but {len(y)} in y; give one y for each x.")
    return x, y.to(float_dtype(run)) if y.is_floating_point() else y.long(), table
