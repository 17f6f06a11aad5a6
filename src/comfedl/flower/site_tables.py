"""Tables at sites: the server asks each site for a summary of its table, and makes one encoding of all of them.

A site answers with counts, means and variances (``data/site_summary.py``), and writes what it said into ``sent.jsonl``
in its own folder. The encoding is kept in the run's folder, in ``data.json``, and goes out with every step.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from flwr.serverapp import Grid

from comfedl.config.data_schema import table_task
from comfedl.config.schema import Config, SitesConfig
from comfedl.data.federated import FederatedData
from comfedl.data.site_columns import TableSpec
from comfedl.data.site_summary import Summary, encoding_from, find_absurd, read_summary, weighted
from comfedl.data.site_table import SiteRows, SiteTable, told
from comfedl.data.tabular import Encoding
from comfedl.flower import serialization
from comfedl.flower.messaging import exchange
from comfedl.flower.registry import SiteRegistry
from comfedl.utils.errors import ConfigError, DataError, MalformedMessage, RunFolderError
from comfedl.utils.read_back import read_object

logger = logging.getLogger("comfedl")

ASKED, ENCODING, DATA = "asked", "encoding", "data.json"
PER_CATEGORY = 1 << 10  # bytes, of the longest text in JSON
SENT = "sent.jsonl"


def site_table(node: Mapping[str, Any]) -> SiteTable:
    """This site's table, from the SuperNode's ``--node-config``: the data function of a site that has a CSV file.

    ``site`` is the site's name and ``table`` the path of its file (CSV, Parquet or Arrow). ``settings`` may name a TOML
    file that says how the file is written (``na_values``, ``decimal``, ``thousands``, ``dates``, ``header``,
    ``encoding``), what its columns are called in the server's config (``rename``), and what the site says of it:
    ``min_count`` and ``categories`` ("all", "listed" or "none"). The node config may have these keys as well.
    """
    return SiteTable.of(node)


# The site.


def rows_asked(table: SiteTable, body: Mapping[str, Any]) -> SiteRows:
    """The rows of a site's table, as a message of the server asks for them."""
    asked = body.get("table")
    if not isinstance(asked, dict):
        raise ConfigError("This site has a table, but the server's config does not say its columns (data.columns).")
    spec = asked[ASKED]
    return table.rows(TableSpec.of(spec["options"], int(spec["seed"]), str(spec["task"])))


def data_asked(source: SiteTable | FederatedData, body: Mapping[str, Any]) -> FederatedData:
    """The site's data for a step; those of a table in the encoding that the message has."""
    if isinstance(source, FederatedData):
        if "table" in body:
            raise ConfigError(
                "The server's config has data.columns, but this site's data function does not give a table; use "
                "comfedl.flower.site_table."
            )
        return source
    rows = rows_asked(source, body)
    return rows.federated(Encoding.from_dict(body["table"][ENCODING]))


def summarise(table: SiteTable, body: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The summary that the site sends, which it also writes down."""
    summary = rows_asked(table, body).summary()
    logger.warning("Site %r sends of its table: %s.", table.name, told(summary))  # a SuperNode shows no less
    folder.mkdir(parents=True, exist_ok=True)
    line = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "site": table.name, **summary.to_dict()}
    with open(os.open(folder / SENT, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
    return summary.to_dict()


# The server.


def table_question(config: Config) -> dict[str, Any]:
    """What the server says to sites of their tables, besides what it asks; nothing if they have none."""
    if not isinstance(config, SitesConfig) or not config.data.has_tables:
        return {}
    seed = config.seed if config.data.seed is None else config.data.seed
    asked = {"options": config.data.table_options(), "seed": seed, "task": table_task(config.loss_name)}
    return {"table": {ASKED: asked}}


def with_encoding(question: Mapping[str, Any], encoding: Encoding | None) -> dict[str, Any]:
    """The same with the encoding, for the steps."""
    return {} if encoding is None else {"table": {**question["table"], ENCODING: encoding.to_dict()}}


def saved_encoding(folder: Path | None) -> Encoding | None:
    """The encoding of the run to resume, if it has one already."""
    if folder is None or not (folder / DATA).exists():
        return None
    try:
        return Encoding.from_dict(read_object(folder / DATA))
    except (ValueError, KeyError, TypeError) as error:
        raise RunFolderError(f"{folder / DATA} cannot be read ({error}); start a new run with --force.") from None


def gather_encoding(
    grid: Grid,
    registry: SiteRegistry,
    config: SitesConfig,
    deadline: float,
    record: Callable[[dict[str, Any]], None],
) -> Encoding:
    """Ask every connected site for its summary, and make the encoding; what is wrong with a summary is recorded.

    A site whose summary cannot be used has no part in the encoding, and may still train with it.
    """
    spec = config.table_spec()
    assert spec is not None
    nodes = registry.nodes()
    body = serialization.encode({"question": "table", **registry.fresh(), **table_question(config)})
    named = sum(1000 if column.categories is None else len(column.categories) for column in spec.columns)
    limit = (1 << 20) + PER_CATEGORY * (named + len(spec.columns))
    contents, limits = dict.fromkeys(nodes.values(), body), dict.fromkeys(nodes.values(), limit)
    answers = exchange(grid, contents, "query.table", "table", deadline, limits, registry.check_reply)
    found: dict[str, Summary] = {}
    left_out: dict[str, str] = {name: "it is not connected" for name in registry.names if name not in nodes}
    for name, node in sorted(nodes.items()):
        answer = answers[node]
        if not isinstance(answer, tuple):
            left_out[name] = f"refused: {answer}" if isinstance(answer, MalformedMessage) else answer
        elif "error" in answer[0]:
            left_out[name] = serialization.shortened(answer[0]["error"])
        else:
            most = registry.known.samples[name]
            if registry.outer_share is not None:  # set aside after the encoding is made
                most = int(most / (1 - registry.outer_share)) + 2
            try:
                found[name] = read_summary(answer[0].get("summary"), spec, most)
            except MalformedMessage as error:
                left_out[name] = f"refused: {error}"
    absurd = find_absurd(found)
    left_out |= {name: f"refused: {why}" for name, why in absurd.items()}
    used = [name for name in registry.names if name in found and name not in absurd]
    for name, why in left_out.items():
        logger.warning("Site %r has no part in the encoding of the tables: %s.", name, why)
    record({"round": 0, "step": "table", "answered": used, "absent": left_out})
    if len(used) < max(1, config.quorum * len(registry.names)):
        reasons = "; ".join(f"{name}: {why}" for name, why in left_out.items())
        raise DataError(f"Only {len(used)} of {len(registry.names)} sites gave a summary of their tables ({reasons}).")
    shares = {name: registry.sizes[i] / registry.known.samples[name] for i, name in enumerate(registry.names)}
    encoding, fitted = encoding_from([weighted(found[name], float(shares[name])) for name in used], spec)
    for fit in fitted.values():
        for note in fit.notes:
            logger.warning("%s", note)
    return encoding
