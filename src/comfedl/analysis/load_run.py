"""Load a run: the trained model, ready to use."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from comfedl.config.data_schema import SampleSpec
from comfedl.config.schema import Config, parse_config, read_settings
from comfedl.core.learner import Params
from comfedl.data.tabular import Encoding
from comfedl.models.functional import with_tensors
from comfedl.training import checkpoint
from comfedl.training.personal_models import MODELS, PersonalModels, file_name
from comfedl.training.result import MOST_NAMED
from comfedl.training.run_folder import recover_replaced
from comfedl.utils.errors import ConfigError, RunFolderError, nearest


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
    """

    path: Path
    tensors: Params
    config: Config | None
    encoding: Encoding | None
    given: nn.Module | None = None
    unfinished: str | None = None

    @cached_property
    def module(self) -> nn.Module:
        """The untrained model, built from the config unless it was given."""
        if self.given is not None:
            return self.given
        return self.settings.build_model(self._sample_spec.shape, self._sample_spec.outputs)

    @property
    def outputs(self) -> int:
        """The number of the model's outputs."""
        return self._sample_spec.outputs

    @property
    def input_dtype(self) -> torch.dtype:
        """The dtype of the training inputs."""
        return self._sample_spec.dtype

    @cached_property
    def _sample_spec(self) -> SampleSpec:
        config = self.settings
        return config.data.sample_spec(config.seed, config.loss_name, self.encoding)

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
        try:
            return with_tensors(self.module, tensors)
        except (KeyError, RuntimeError) as error:
            raise RunFolderError(f"The tensors of {source} do not fit the model ({error}).") from None

    @cached_property
    def clients(self) -> Sequence[str]:
        """The client names, from the records."""
        with (self.path / "clients.jsonl").open(encoding="utf-8") as file:
            return sorted({json.loads(line)["client"] for line in file})

    def personal(self, client: str) -> Params:
        """The tensors of a client's personal model."""
        folder = self.path / "personal"
        packed = PersonalModels(folder) if (folder / MODELS).exists() else None  # runs with many clients use one file
        if packed is not None and client in packed:
            return packed[client]
        file = folder / f"{file_name(client)}.safetensors"
        if file.exists():
            return read_tensors(file)
        if client not in (self.clients if packed is None else packed.names):
            suggestions = self.clients if len(self.clients) <= MOST_NAMED else []
            raise ConfigError(f"{client!r} is not a client of this run; {nearest(client, suggestions)}.")
        raise RunFolderError(f"{self.path} has no personal models (save_personal = false); leave the client out.")

    @property
    def has_personal(self) -> bool:
        """Whether personal models were saved."""
        return (self.path / "personal").is_dir()


def load_run(path: str | Path, model: nn.Module | None = None) -> SavedRun:
    """Load a run; ``model`` is needed if the run was started from Python, not from a config.

    A run that was stopped, or is still going on, has the model of its last checkpoint.

    >>> load_run("nowhere")
    Traceback (most recent call last):
    comfedl.utils.errors.RunFolderError: nowhere holds no run; give the folder of a run.
    """
    folder = Path(path)
    with contextlib.suppress(OSError):  # it may be somebody else's, to be read only
        recover_replaced(folder)
    if not (folder / "config.toml").is_file():
        raise RunFolderError(f"{folder} holds no run; give the folder of a run.")
    settings = read_settings(folder / "config.toml")
    unfinished = None
    if (folder / "summary.json").is_file():
        tensors = read_tensors(folder / "model.safetensors")
    elif (saved := checkpoint.read_model(folder / "checkpoint")) is not None:
        unfinished = (
            f"The run in {folder} has not finished: this is its model after round {saved[0]} of "
            f"{settings.get('rounds')}; --resume goes on."
        )
        tensors = saved[1]
    else:
        raise RunFolderError(f"The run in {folder} has neither finished nor a checkpoint; continue it with --resume.")
    from_config = {"data", "model", "algorithm"} <= settings.keys()
    encoding = None
    if (folder / "data.json").exists():
        try:
            encoding = Encoding.from_dict(json.loads((folder / "data.json").read_text("utf-8")))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RunFolderError(f"{folder / 'data.json'} cannot be read ({error}).") from None
    return SavedRun(folder, tensors, parse_config(settings) if from_config else None, encoding, model, unfinished)


def read_tensors(file: Path) -> Params:
    """The tensors of a .safetensors file."""
    try:
        tensors: Params = load_file(file)
    except FileNotFoundError:
        raise RunFolderError(f"There is no model file {file}; check the name.") from None
    except (OSError, SafetensorError) as error:
        raise RunFolderError(f"{file} cannot be read as a model ({error}); give a .safetensors file.") from None
    return tensors
