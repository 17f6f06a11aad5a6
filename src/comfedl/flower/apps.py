"""The two apps that Flower runs: the server's, and each site's."""

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

from comfedl.config.schema import parse_config, read_config
from comfedl.data.federated import FederatedData
from comfedl.engines.embedded import Embedded
from comfedl.flower import serialization
from comfedl.flower.client import Store, answer, said
from comfedl.flower.server import serve
from comfedl.training.validation import check_fit, make_learner
from comfedl.utils.errors import ComfedlError, ConfigError, DataError
from comfedl.utils.files import write_atomic

logger = logging.getLogger("comfedl")

Load = Callable[[Mapping[str, Any]], FederatedData]


def server_app(config: str | Path | None = None, out: str | Path | None = None) -> ServerApp:
    """A ServerApp that trains as a config says.

    Args:
        config: the TOML file; the run's own config (``flwr run -c 'config="..."'``) comes before it.
        out: the run's folder; ``-c 'out="..."'`` comes before it. Default: runs/NAME-OF-CONFIG.

    Further keys of the run's config are ``resume`` and ``force``, both true or false.
    """
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        logging.getLogger("comfedl").setLevel(logging.INFO)
        options = context.run_config
        path = Path(str(options.get("config") or config or ""))
        if not path.name:
            raise ConfigError("There is no config; give it to server_app, or with flwr run -c 'config=\"FILE\"'.")
        folder = Path(str(options.get("out") or out or Path("runs") / path.stem))
        report = options.get("report")
        said: dict[str, object] = {"ok": True}
        try:
            serve(grid, read_config(path), folder, bool(options.get("resume")), bool(options.get("force")))
        except BaseException as error:
            said = {"error": str(error) if isinstance(error, ComfedlError) else f"{type(error).__name__}: {error}"}
            raise
        finally:
            if report:
                write_atomic(Path(str(report)), json.dumps(said).encode())

    return app


def client_app(data: Load, state: str | Path | None = None, mods: Sequence[Any] = ()) -> ClientApp:
    """A ClientApp that does what methods ask of a client, on this site's own data.

    Args:
        data: a function that is given the SuperNode's ``--node-config`` as a dict and returns a ``FederatedData`` of
            one client, whose name is the site's. It is called for every message, in a fresh process.
        state: the folder for what the client keeps between rounds; the key ``state`` of the node's config comes before
            it. Default: comfedl-site in the working folder.
        mods: Flower's mods, around every message.
    """
    app = _Site(mods=list(mods))

    @app.query("who")
    def who(message: Message, context: Context) -> Message:
        fed = _load(data, context)
        body = {"name": fed.names[0], "samples": int(fed.train.sizes[0]), "shape": list(fed.train.x.shape[1:])}
        return Message(serialization.content(body), reply_to=message)

    @app.train("step")
    def step(message: Message, context: Context) -> Message:
        fed = _load(data, context)
        body, tensors = serialization.opened(message.content)
        folder = Path(str(context.node_config.get("state") or state or "comfedl-site"))
        engine = site_engine(str(body["config"]), fed)
        content = answer(engine, Store(folder, fed.names[0], str(body["run"])), body, tensors)
        return Message(content, reply_to=message)

    return app


def site_engine(text: str, fed: FederatedData) -> Embedded:
    """The embedded engine of a site's one client, under a config as TOML."""
    config = parse_config(tomllib.loads(text))
    algorithm = config.make_algorithm()
    model = config.make_model_for(tuple(fed.train.x.shape[1:]))
    learner, initial, _ = make_learner(model, config.loss, algorithm)
    first = next(iter(initial["params"].values()))
    local = fed.to(first.dtype, first.device)
    check_fit(learner, initial, local)
    start = algorithm.client_state(initial)
    return Embedded(local, learner, algorithm.steps(), config.seed, start, vectorize="serial")


def _load(data: Load, context: Context) -> FederatedData:
    fed = data(dict(context.node_config))
    if not isinstance(fed, FederatedData) or len(fed) != 1:
        found = f"{len(fed)} clients" if isinstance(fed, FederatedData) else f"a {type(fed).__name__}"
        raise DataError(f"The site's data function gave {found}, but it must give a FederatedData of one client.")
    return fed


class _Site(ClientApp):
    """A ClientApp that always replies, whatever happens in it: without a reply a SuperNode waits for ever."""

    def __call__(self, message: Message, context: Context) -> Message:
        try:
            reply = super().__call__(message, context)
            if not isinstance(reply, Message):
                raise ConfigError(f"A mod gave {type(reply).__name__} in place of a reply.")
        except (Exception, SystemExit) as error:  # the site's own function may raise anything
            logger.exception("This site cannot answer.")
            return Message(serialization.content({"error": said(error)}), reply_to=message)
        return reply
