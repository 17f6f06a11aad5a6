"""Load a run: the trained model, ready to use."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from comfedl.analysis.client_tables import client_table
from comfedl.analysis.read_runs import read_run
from comfedl.config.build import without_imports
from comfedl.config.data_schema import SampleSpec
from comfedl.config.schema import Config, parse_config
from comfedl.core.learner import Learner, Params, chunks
from comfedl.data.tabular import Encoding
from comfedl.models.functional import with_tensors
from comfedl.models.outputs import joined
from comfedl.training import checkpoint
from comfedl.training.client_table import ClientTable
from comfedl.training.personal_models import NAMES, PersonalModels, file_name
from comfedl.training.result import MOST_NAMED, splits_of
from comfedl.training.run_folder import recover_replaced
from comfedl.utils import checks, read_back
from comfedl.utils.errors import ConfigError, RunFolderError, nearest
from comfedl.utils.read_back import read_object, read_rows, read_toml, unreadable
from comfedl.utils.samples import Samples, count

Settings = dict[str, Any]


@dataclass(frozen=True)
class SavedRun:
    """A run, as returned by ``load_run``.

    Attributes:
        path: the run folder.
        tensors: the parameters and buffers of the global model.
        config: the config; None if the run was started from Python.
        encoding: how table rows or images became inputs; None for arrays.
        given: the model passed to ``load_run``.
        unfinished: for a run that was stopped or is still going on, a sentence that says where; else None.
        has_frozen: whether the parameters that were not trained were saved; else they are those of the model.
    """

    path: Path
    tensors: Params
    config: Config | None
    encoding: Encoding | None
    given: nn.Module | None = None
    unfinished: str | None = None
    has_frozen: bool = True

    @cached_property
    def module(self) -> nn.Module:
        """The untrained model, built from the config unless it was given."""
        if self.given is not None:
            return self.given
        shape, outputs = self._sample_spec.shape, self._sample_spec.outputs
        if ":" not in self.settings.model.name:  # a damaged config may ask for any size: compare before it takes memory
            with torch.device("meta"):
                described = self.settings.build_model(shape, outputs)
            check_shapes(described, self.tensors, self.path, self.has_frozen)
        return self.settings.build_model(shape, outputs)

    @property
    def outputs(self) -> int:
        """The number of the model's outputs."""
        return self._sample_spec.outputs

    @property
    def input_dtype(self) -> Any:
        """The dtype of the training inputs; for several tensors a tuple or dict of dtypes."""
        return self._sample_spec.dtype

    @cached_property
    def _sample_spec(self) -> SampleSpec:
        config = self.settings
        return config.data.sample_spec(config.seed, config.loss_name, self.encoding)

    @property
    def input_shape(self) -> Any:
        """The shape of one training input; for several tensors a tuple or dict of shapes."""
        return self._sample_spec.shape

    def predict(self, x: Samples, client: str | None = None) -> Any:
        """The model's output for new samples, x as in training: of the global model or of a client's personal one.

        It is what the model returns, such as logits, without a gradient; of a dict or dataclass, with the parts of all
        samples joined.
        """
        learner, module = Learner(self.module), self.to_module(client)
        params = {name: part.detach() for name, part in module.named_parameters()}
        outputs, sizes = [], []
        with torch.no_grad():
            for part, _ in chunks((x, x)):
                output, _ = learner.output(params, dict(module.named_buffers()), part, train=False)
                outputs.append(output)
                sizes.append(count(part))
        return joined(outputs, sizes)

    @property
    def settings(self) -> Config:
        """The config; an error if the run was started from Python."""
        if self.config is None:
            raise ConfigError(
                f"{self.path} was not run from a config, so its model and data are unknown; use it from Python, with "
                "load_run(path, model=...)."
            )
        return self.config

    def to_module(self, client: str | None = None) -> nn.Module:
        """The trained model in eval mode: the global one, or a client's personal one."""
        return self.with_tensors(self.tensors if client is None else self.personal(client), self.path)

    def with_tensors(self, tensors: Params, source: Path) -> nn.Module:
        """The model with these tensors, which were read from ``source``."""
        check_shapes(self.module, tensors, source, self.has_frozen)
        try:
            return with_tensors(self.module, tensors)
        except (KeyError, RuntimeError) as error:
            raise RunFolderError(f"The tensors of {source} do not fit the model ({error}).") from None

    @cached_property
    def clients(self) -> Sequence[str]:
        """The client names, from the records."""
        return sorted({str(row["client"]) for row in read_rows(self.path / "clients.jsonl")})

    def personal(self, client: str) -> Params:
        """The tensors of a client's personal model."""
        if self.unfinished is not None and client in self.clients:
            raise RunFolderError(
                f"The run in {self.path} has not finished, and personal models are saved at the end; continue it with "
                "--resume, or leave the client out."
            )
        folder = self.path / "personal"
        packed = PersonalModels(folder) if (folder / NAMES).exists() else None  # runs with many clients use one file
        if packed is not None and client in packed:
            return packed[client]
        for name in (file_name(client, distinct=True), file_name(client)):
            if f"{name}.safetensors" in self._personal_files:
                return read_tensors(folder / f"{name}.safetensors")
        if client not in (self.clients if packed is None else packed.names):
            suggestions = self.clients if len(self.clients) <= MOST_NAMED else []
            raise ConfigError(f"{client!r} is not a client of this run; {nearest(client, suggestions)}.")
        raise RunFolderError(f"{self.path} has no personal models (save_personal = false); leave the client out.")

    def clients_table(self, split: str | None = None) -> ClientTable:
        """One row per client, as the run recorded it: samples, measures with 95 % intervals, weight.

        Args:
            split: the split to judge the clients on: by default validation, else test, else train.
        """
        run = read_run(self.path)
        rows = run.final_client_rows()
        available = splits_of(rows) or ["validation", "test", "train"]  # nothing is recorded yet
        chosen = available[0] if split is None else split
        checks.one_of("split", chosen, available)
        return client_table(run, chosen, rows)

    @cached_property
    def _personal_files(self) -> frozenset[str]:
        """The names of the files as they are written: "Ward" is not "ward", whatever the file system says."""
        folder = self.path / "personal"
        return frozenset(os.listdir(folder)) if folder.is_dir() else frozenset()

    @property
    def has_personal(self) -> bool:
        """Whether personal models were saved; before a run's end they are incomplete, or those of its last end."""
        return self.unfinished is None and (self.path / "personal").is_dir()


def check_shapes(module: nn.Module, tensors: Params, source: Path, has_frozen: bool = True) -> None:
    """Check that saved tensors are those of a model, by name and shape; frozen ones need not be ``has_frozen``."""
    needed_names = {name for name, part in module.named_parameters() if has_frozen or part.requires_grad}
    own = {name: tuple(part.shape) for name, part in (*module.named_parameters(), *module.named_buffers())}
    found = {name: tuple(part.shape) for name, part in tensors.items()}
    for name in sorted(own.keys() | found.keys()):
        if own.get(name) != found.get(name) and (name in found or name in needed_names):
            given, needed = found.get(name, "missing"), own.get(name, "no part of the model")
            raise RunFolderError(
                f"The tensors of {source} do not fit the model: {name} is {given} there, and {needed} in the model."
            )


def load_run(path: str | Path, model: nn.Module | None = None, *, trust: bool = False) -> SavedRun:
    """Load a run; ``model`` is needed if the run was started from Python, not from a config.

    A run that was stopped, or is still going on, has the model of its last checkpoint.

    Args:
        path: the run's folder. It may come from somebody else: its files are read without executing anything.
        model: the model, if no config says what it is.
        trust: import the code that its config names as "module:function", such as a model or a data set of one's own.
            Without it such a run is not loaded.

    >>> load_run("nowhere")
    Traceback (most recent call last):
    comfedl.utils.errors.RunFolderError: nowhere is not a run folder; give the folder of a run.
    """
    folder = Path(path)
    with contextlib.suppress(OSError):  # it may be somebody else's, to be read only
        recover_replaced(folder)
    if not (folder / "config.toml").is_file():
        raise RunFolderError(f"{folder} is not a run folder; give the folder of a run.")
    settings = read_toml(folder / "config.toml")
    unfinished = None
    if (folder / "summary.json").is_file():
        tensors = read_tensors(folder / "model.safetensors")
    elif (saved := checkpoint.read_model(folder / "checkpoint")) is not None:
        unfinished = (
            f"The run in {folder} has not finished: this is its model after round {saved[0]} of "
            f"{settings.get('rounds')}; continue with --resume."
        )
        tensors = saved[1]
    else:
        raise RunFolderError(f"The run in {folder} has not finished and has no checkpoint; continue it with --resume.")
    from_config = {"data", "model", "algorithm"} <= settings.keys()
    encoding = read_encoding(folder)
    config = _parse(folder, settings, trust) if from_config else None
    has_frozen = settings.get("save_frozen") is not False
    return SavedRun(folder, tensors, config, encoding, model, unfinished, has_frozen)


def read_encoding(folder: Path) -> Encoding | None:
    """How a run's table became numbers; None if it has no table, or has not begun."""
    if not (folder / "data.json").exists():
        return None
    described = read_object(folder / "data.json")
    with unreadable(folder / "data.json"):
        return Encoding.from_dict(described)


def _parse(folder: Path, settings: Settings, trust: bool) -> Config:
    """The config of a run folder, whose text may be anybody's; every import that it asks for is made in here."""
    with contextlib.nullcontext() if trust else without_imports(folder), unreadable(folder / "config.toml"):
        return parse_config(settings)


def read_tensors(file: Path) -> Params:
    """The tensors of a model's file."""
    if not file.is_file():
        raise RunFolderError(f"There is no model file {file}; check the name.")
    return read_back.read_tensors(file)
