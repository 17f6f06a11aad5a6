"""Secure aggregation at a site: its keys, and steps whose replies leave it only as masked numbers."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from flwr.app import RecordDict
from torch import Tensor

from comfedl.config.schema import Config, parse_config
from comfedl.core.sums import WHOLE
from comfedl.data.federated import FederatedData
from comfedl.engines.embedded import Embedded
from comfedl.engines.sums import Codec
from comfedl.flower import serialization
from comfedl.flower.client import StateStore, run_step
from comfedl.secure.ring import Words
from comfedl.secure.site import SecureSite, digest
from comfedl.training.arguments import make_learner
from comfedl.training.secure_run import check_at_sites, codec_of
from comfedl.utils.errors import ConfigError, MalformedMessage, RunFolderError
from comfedl.utils.files import write_atomic
from comfedl.utils.fingerprint import fingerprint
from comfedl.utils.lock import take_lock

MOST_SITES = 1_000_000


def answer_securely(
    make_engine: Callable[[Config, FederatedData], Embedded],
    store: StateStore,
    fed: FederatedData,
    body: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
) -> RecordDict:
    """The answer to an ask of the protocol; what the site must remember is stored before it is sent."""
    with _locked(store):
        return _answer(make_engine, store, fed, body, tensors)


def _answer(
    make_engine: Callable[[Config, FederatedData], Embedded],
    store: StateStore,
    fed: FederatedData,
    body: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
) -> RecordDict:
    site, ask = SecureSite(fed.names[0], _read(store)), dict(body["secure"])
    if ask.get("stage") != "mask":
        answer = site.answer(ask)
        _write(store, site)
        return serialization.encode({"secure": answer})
    config = parse_config(tomllib.loads(str(body["config"])))
    codec = codec_at_site(config, fed, int(body["sites"]))
    site.check_threshold(ask, codec.settings)
    engine, words, answers, written, whole = make_engine(config, fed), [], [], set(), False
    for request in body["asks"]:
        message = serialization.unpack(request["message"], tensors)
        whole |= WHOLE in message
        reply, notes = run_step(engine, store, request, message)
        written |= {str(notes[name]) for name in ("kept", "held") if name in notes}
        try:
            words += codec.encode(str(request["step"]), reply, message, int(engine.sizes[0]))
        except ValueError as error:
            raise MalformedMessage(f"{error}, so that nothing is sent") from error
        answers.append(notes)
    masked = site.mask(ask, task_of(body, tensors), words, whole)
    _write(store, site)
    store.drop_all_but({*body["keep"], *written})
    packer = serialization.TensorPacker()
    names = [packer.add(as_tensor(part)) for part in masked]
    return serialization.encode({"secure": {}, "words": names, "answers": answers}, packer.record())


def codec_at_site(config: Config, fed: FederatedData, sites: int) -> Codec:
    """How this site writes what is summed, by the config that all sites are sent."""
    if config.secure is None:
        raise ConfigError("The server asks for masked numbers, but its config has no [secure_aggregation].")
    if not 0 < sites <= MOST_SITES:
        raise MalformedMessage(f"a run of {sites} sites is not possible")
    check_at_sites(config.secure, sites)
    method = config.make_method()
    model = config.make_model_for(fed.train.shape)
    learner, _, _ = make_learner(model, config.make_loss(), method, config.make_metrics(), config.task)
    return codec_of(config.secure, method, [*learner.metrics], sites)


def task_of(body: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> bytes:
    """A digest of all that sites are told alike; masks cancel only between sites that were told the same."""
    asks = [[request[name] for name in ("step", "round", "message")] for request in body["asks"]]
    whole = fingerprint(*(part for name in sorted(tensors) for part in (name, tensors[name])))
    return digest([body["config"], body["run"], body["sites"], asks, whole])


def as_tensor(words: Words) -> Tensor:
    """Words as a tensor, which has them with a sign."""
    return torch.from_numpy(words.view(f"<i{words.itemsize}"))


@contextmanager
def _locked(store: StateStore) -> Iterator[None]:
    """One message at a time: that a site answers each stage once depends on what it wrote after the last."""
    folder = _private(store.keys.parent)
    try:
        lock = take_lock(folder, f"{store.keys.stem}.lock")
    except RunFolderError:
        raise MalformedMessage("the site is still at work on another message of this run") from None
    try:
        yield
    finally:
        if lock is not None:
            lock.close()


def _private(folder: Path) -> Path:
    """The folder; if it is new, for the site's own account only."""
    before = os.umask(0o077)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    finally:
        os.umask(before)
    return folder


def _read(store: StateStore) -> dict[str, Any] | None:
    if not store.keys.exists():
        return None
    found: dict[str, Any] = json.loads(store.keys.read_text(encoding="utf-8"))
    return found


def _write(store: StateStore, site: SecureSite) -> None:
    """Store the private keys so that only the site's own account can read them."""
    before = os.umask(0o077)
    try:
        write_atomic(store.keys, json.dumps(site.state).encode())
    finally:
        os.umask(before)
