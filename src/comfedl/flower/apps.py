"""The two apps that Flower runs: one on the server, one at each site."""

from __future__ import annotations

import json
import logging
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from comfedl.config.schema import Config, parse_config, read_config
from comfedl.data.federated import FederatedData
from comfedl.data.outer_share import held_out, set_aside
from comfedl.data.site_table import SiteTable
from comfedl.engines.embedded import Embedded
from comfedl.flower import serialization
from comfedl.flower.client import StateStore, public_message, run_steps
from comfedl.flower.server import serve
from comfedl.flower.site_keys import sign
from comfedl.flower.site_tables import data_asked, rows_asked, summarise
from comfedl.training.arguments import check_fit, make_learner
from comfedl.utils.errors import ComfedlError, ConfigError, DataError
from comfedl.utils.files import write_atomic

logger = logging.getLogger("comfedl")

Load = Callable[[Mapping[str, Any]], FederatedData | SiteTable]


def server_app(config: str | Path | None = None, out: str | Path | None = None) -> ServerApp:
    """A ServerApp that trains according to a config.

    Args:
        config: the TOML file; ``flwr run -c 'config="..."'`` overrides it.
        out: the run's folder; ``-c 'out="..."'`` overrides it. Default: runs/NAME-OF-CONFIG.

    ``flwr run -c`` also takes ``resume`` and ``force``, both true or false.
    """
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        logging.getLogger("comfedl").setLevel(logging.INFO)
        options = context.run_config
        path = Path(str(options.get("config") or config or ""))
        if not path.name:
            raise ConfigError("No config is given; pass it to server_app, or use flwr run -c 'config=\"FILE\"'.")
        folder = Path(str(options.get("out") or out or Path("runs") / path.stem))
        report = options.get("report")
        outcome: dict[str, object] = {"ok": True}
        try:
            serve(grid, read_config(path), folder, bool(options.get("resume")), bool(options.get("force")))
        except BaseException as error:
            outcome = {"error": str(error) if isinstance(error, ComfedlError) else f"{type(error).__name__}: {error}"}
            raise
        finally:
            if report:
                write_atomic(Path(str(report)), json.dumps(outcome).encode())

    return app


def client_app(
    data: Load, state: str | Path | None = None, mods: Sequence[Any] = (), only_sums: bool = False
) -> ClientApp:
    """A ClientApp that runs the client's steps of a method on this site's data.

    Args:
        data: a function that takes the SuperNode's ``--node-config`` as a dict and returns a ``FederatedData`` with one
            client, named after the site, or a table (``site_table``). It is called for every message, in a fresh
            process.
        state: the folder for the client's state between rounds; the key ``state`` of the node config overrides it.
            Default: comfedl-site in the working directory.
        mods: Flower mods, applied to every message.
        only_sums: answer under secure aggregation alone, whatever the server's config says.

    If the node config names the site's private key (``key``), all replies are signed with it.
    """
    app = _ReplyingApp(mods=list(mods))

    @app.query("who")
    def who(message: Message, context: Context) -> Message:
        source = _load(data, context)
        question, _ = serialization.decode(message.content)
        share = question.get("outer_share")
        if isinstance(source, SiteTable):  # its samples have no shape before there is an encoding
            rows = rows_asked(source, question)
            name, samples, outer = source.name, rows.samples, None
            shape: tuple[int, ...] = (len(rows.spec.columns),)
        else:
            fed = data_asked(source, question)
            name, samples, shape, outer = fed.names[0], int(fed.train.sizes[0]), fed.train.shape, fed.outer
        if share is not None and outer is None:  # of one sample, 0 are left, which the server refuses
            samples -= held_out(samples, float(share)) if samples > 1 else 1
        body = {"name": name, "samples": samples, "shape": shape}
        return Message(serialization.encode(body), reply_to=message)

    def folder_of(context: Context) -> Path:
        return Path(str(context.node_config.get("state") or state or "comfedl-site"))

    @app.query("table")
    def table(message: Message, context: Context) -> Message:
        source = _load(data, context)
        question, _ = serialization.decode(message.content)
        if only_sums:
            raise ConfigError("This site takes part only under secure aggregation, but was asked about its own table.")
        if not isinstance(source, SiteTable):
            raise ConfigError("This site's data function does not give a table; use comfedl.flower.site_table.")
        summary = summarise(source, question, folder_of(context))
        return Message(serialization.encode({"summary": summary}), reply_to=message)

    @app.train("step")
    def step(message: Message, context: Context) -> Message:
        body, tensors = serialization.decode(message.content)
        fed = data_asked(_load(data, context), body)
        store = StateStore(folder_of(context), fed.names[0], str(body["run"]))
        if "secure" in body:
            from comfedl.flower.secure_client import answer_securely  # needs the package cryptography

            return Message(answer_securely(site_engine, store, fed, body, tensors), reply_to=message)
        config = read_text(str(body["config"]))
        if only_sums or config.secure is not None:
            raise ConfigError("This site takes part only under secure aggregation, but was asked for its own update.")
        return Message(run_steps(site_engine(config, fed), store, body, tensors), reply_to=message)

    return app


def read_text(text: str) -> Config:
    """The config of a message."""
    return parse_config(tomllib.loads(text))


def site_engine(config: Config, fed: FederatedData) -> Embedded:
    """An embedded engine for the site's only client."""
    algorithm = config.make_method()
    if algorithm.weighs_on_outer and fed.outer is None:
        fed = set_aside(fed, config.outer_share, config.seed)
    model = config.make_model_for(fed.train.shape)
    learner, initial, _ = make_learner(model, config.make_loss(), algorithm, config.make_metrics(), config.task)
    first = next(iter(initial["params"].values()))
    local = fed.to(first.dtype, first.device)
    check_fit(learner, initial, local)
    start = algorithm.initial_client_state(initial)
    steps, transforms = algorithm.steps(), config.make_transform()
    # The process ends after this message: there is no later round to keep freed memory for.
    return Embedded(
        local, learner, steps, config.seed, start, vectorize="serial", keep_memory=False, transforms=transforms
    )


def _load(data: Load, context: Context) -> FederatedData | SiteTable:
    fed = data(dict(context.node_config))
    if isinstance(fed, SiteTable):
        return fed
    if not isinstance(fed, FederatedData) or len(fed) != 1:
        found = f"{len(fed)} clients" if isinstance(fed, FederatedData) else f"a {type(fed).__name__}"
        raise DataError(f"The site's data function returned {found}, but it must return a FederatedData of one client.")
    return fed


class _ReplyingApp(ClientApp):
    """A ClientApp that replies even after an error: without a reply the SuperNode would wait forever."""

    def __call__(self, message: Message, context: Context) -> Message:
        try:
            reply = super().__call__(message, context)
            if not isinstance(reply, Message):
                raise ConfigError(f"A mod returned {type(reply).__name__} instead of a reply.")
            _signed(reply, message, context)
        except (Exception, SystemExit) as error:  # the site's data function may raise anything
            logger.exception("This site cannot answer.")
            return Message(serialization.encode({"error": public_message(error)}), reply_to=message)
        return reply


def _signed(reply: Message, message: Message, context: Context) -> None:
    """Sign a reply with the site's key, if the node config names one."""
    if context.node_config.get("key") and not reply.has_error():
        path = Path(str(context.node_config["key"])).expanduser()
        sign(path, context.node_id, message.content, reply.content)
