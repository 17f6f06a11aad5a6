"""A run's folder read back: the trained model, ready to use."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from comfedl.config.schema import Config, parse_config, read_settings
from comfedl.core.objectives import Params
from comfedl.data.tabular import Encoding
from comfedl.models.functional import with_tensors
from comfedl.training.personal_models import MODELS, PersonalModels, file_name
from comfedl.training.result import MOST_NAMED
from comfedl.utils.errors import ConfigError, RunFolderError, nearest


@dataclass(frozen=True)
class SavedRun:
    """A run that has ended; ``load_run`` reads it.

    Attributes:
        path: its folder.
        tensors: the global model's parameters and buffers.
        config: its config, where it was run from one.
        encoding: how a table's rows became numbers, where the data were one.
    """

    path: Path
    tensors: Params
    config: Config | None
    encoding: Encoding | None
    given: nn.Module | None = None

    @cached_property
    def module(self) -> nn.Module:
        """The model with its initial parameters, by the config."""
        if self.given is not None:
            return self.given
        config = self.settings
        return config.build_model(*config.data.form(config.seed, config.loss, self.encoding))

    @property
    def settings(self) -> Config:
        """Its config; a run that has none is refused."""
        if self.config is None:
            raise ConfigError(
                f"{self.path} was not run from a config, so its model and data are not known; use it from Python, with "
                "load_run(path, model=...)."
            )
        return self.config

    def to_module(self, client: str | None = None) -> nn.Module:
        """The trained model, ready to use (in the mode of evaluation): the global one or a client's own."""
        return self.with_tensors(self.tensors if client is None else self.personal(client), self.path)

    def with_tensors(self, tensors: Params, source: Path) -> nn.Module:
        """The model with these tensors, which are from a file."""
        try:
            return with_tensors(self.module, tensors)
        except (KeyError, RuntimeError) as error:
            raise RunFolderError(f"The tensors of {source} are not those of the model ({error}).") from None

    @cached_property
    def clients(self) -> Sequence[str]:
        """The clients' names, by the last records."""
        with (self.path / "clients.jsonl").open(encoding="utf-8") as file:
            return sorted({json.loads(line)["client"] for line in file})

    def personal(self, client: str) -> Params:
        """The tensors of a client's own model."""
        folder = self.path / "personal"
        many = PersonalModels(folder) if (folder / MODELS).exists() else None
        if many is not None and client in many:
            return many[client]
        file = folder / f"{file_name(client)}.safetensors"
        if file.exists():
            return read_tensors(file)
        if client not in (self.clients if many is None else many.names):
            few = len(self.clients) <= MOST_NAMED
            raise ConfigError(
                f"{client!r} is not a client of this run; {nearest(client, self.clients if few else [])}."
            )
        raise RunFolderError(f"{self.path} has no personal models (save_personal = false); leave the client out.")

    @property
    def has_personal(self) -> bool:
        """Whether the clients' own models were kept."""
        return (self.path / "personal").is_dir()


def load_run(path: str | Path, model: nn.Module | None = None) -> SavedRun:
    """Read a run's folder; ``model`` is needed where it was not run from a config.

    >>> load_run("nowhere")
    Traceback (most recent call last):
    comfedl.utils.errors.RunFolderError: nowhere holds no run; give the folder that a run was written to.
    """
    folder = Path(path)
    if not (folder / "config.toml").is_file():
        raise RunFolderError(f"{folder} holds no run; give the folder that a run was written to.")
    if not (folder / "summary.json").is_file():
        raise RunFolderError(f"The run in {folder} has not come to its end; go on with it (--resume) first.")
    settings = read_settings(folder / "config.toml")
    whole = {"data", "model", "algorithm"} <= settings.keys()
    encoding = None
    if (folder / "data.json").exists():
        try:
            encoding = Encoding.from_dict(json.loads((folder / "data.json").read_text("utf-8")))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RunFolderError(f"{folder / 'data.json'} cannot be read ({error}).") from None
    tensors = read_tensors(folder / "model.safetensors")
    return SavedRun(folder, tensors, parse_config(settings) if whole else None, encoding, model)


def read_tensors(file: Path) -> Params:
    """The tensors of a model's file."""
    try:
        tensors: Params = load_file(file)
    except FileNotFoundError:
        raise RunFolderError(f"There is no model {file}; check the name.") from None
    except (OSError, SafetensorError) as error:
        raise RunFolderError(f"{file} cannot be read as a model ({error}); give a .safetensors file.") from None
    return tensors
