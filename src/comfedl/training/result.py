"""The result of a run."""

from __future__ import annotations

import copy
import pickle
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from comfedl.core import client_statistics
from comfedl.core.client_statistics import Row
from comfedl.core.learner import Model, Params
from comfedl.core.privacy import Spent
from comfedl.data.client_names import find
from comfedl.models.functional import with_tensors
from comfedl.training.client_scorer import MOST_DRAWN, MOST_SCORED, ClientScorer
from comfedl.training.client_table import MOST_LISTED, SPLITS, ClientTable, number, without_rows
from comfedl.utils import checks
from comfedl.utils.errors import ConfigError, nearest

# Which intervals a table by client has.
ALL, OF_LIBRARY, CLOSED_FORMS = KINDS = ("all", "all but of one's own functions", "without a bootstrap")
MOST_NAMED = 1000  # with more clients, error messages do not look for similar names


NO_CLIENTS = "The run has no scores of single clients, since under secure aggregation only means over them are known."


@dataclass(repr=False)
class Result:
    """The result of a run.

    Attributes:
        params: the global model's parameters, with the dtype and device of the model given.
        buffers: its buffers (BatchNorm's running statistics), empty for most models.
        rounds: one row per evaluated round: "round", "train.loss.mean", "validation.accuracy.worst", "objective",
            "effective_clients", "up_bytes", "down_bytes" and so on.
        clients: one row per evaluated round and client: "round", "client", "train.loss", "weight" and so on. A list, or
            with more than 100,000 rows a sequence that makes rows on access.
        traffic: bytes sent in training, up from the clients and down to them.
        seconds: how long the run took.
        best_round: the best round by ``EarlyStopping``; without it, the last.
        stopped: why the run stopped before its last round, in a sentence; None if it did not.
        round: the round of ``params``: the last, or with ``EarlyStopping(restore_best=True)`` the best.
        last: the model after the last round, if it is another one.
        samples: split -> the number of samples of every client, as far as the engine knows it.
        counts_samples: whether an accuracy is a share of a client's samples, as far as that is known.
        privacy: what the run has used of its privacy: epsilon and delta after all its rounds; None without privacy.

    It can be pickled, without what only this process has: personal models, and the data behind some intervals.
    """

    params: Params
    buffers: Params
    rounds: list[Row]
    clients: Sequence[Row]
    traffic: dict[str, int]
    seconds: float
    names: Sequence[str] = field(repr=False)
    ask_personal: Callable[[Sequence[int]], Iterator[Model]] = field(repr=False)
    module: nn.Module | None = field(default=None, repr=False)
    best_round: int = 0
    stopped: str | None = None
    round: int = 0
    last: Model | None = field(default=None, repr=False)
    samples: Mapping[str, NDArray[np.int64]] = field(default_factory=dict, repr=False, compare=False)
    scorer: ClientScorer | None = field(default=None, repr=False, compare=False)
    counts_samples: bool = field(default=True, repr=False, compare=False)
    privacy: Spent | None = None
    bounds: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict, repr=False, compare=False)

    def clients_table(self, split: str | None = None, *, with_own: bool = True) -> ClientTable:
        """One row per client: samples, measures with their 95 % intervals, weight; see ``ClientTable``.

        Accuracy has Wilson's interval, the loss Student's, other measures those of a bootstrap, whose draws depend on
        the run's seed alone. With more than 1000 clients only accuracy has one.

        Args:
            split: the split to judge the clients on: by default validation, else test, else train.
            with_own: whether functions of your own have an interval too, for which each is called 200 times a client.
        """
        return self._table(split, ALL if with_own else OF_LIBRARY)

    def table_at_end(self, split: str | None = None) -> ClientTable:
        """``clients_table`` with the intervals that take about a second at most: what a run writes and says itself."""
        return self._table(split, OF_LIBRARY if self._bootstraps_at_end else CLOSED_FORMS)

    @cached_property
    def _bootstraps_at_end(self) -> bool:
        """Whether bootstraps of all clients and splits stay within the budget of a run's end."""
        start, stop = self._last_rows()
        if self.scorer is None or stop - start > MOST_SCORED:
            return True
        model, places = (
            Model(params=self.params, buffers=self.buffers),
            [*self._places(self.clients[start:stop]).values()],
        )
        return sum(self.scorer.bootstrap_work(model, places, split) for split in self.judged_splits) <= MOST_DRAWN

    def _table(self, split: str | None, kind: str) -> ClientTable:
        start, stop = self._last_rows()
        rows = self.clients[start:stop]
        available = splits_of(rows)
        if not available:
            raise ConfigError(NO_CLIENTS)
        chosen = split or available[0]
        checks.one_of("split", chosen, available)
        if len(rows) <= MOST_SCORED and self.scorer is not None and (chosen, kind) not in self.bounds:
            model = Model(params=self.params, buffers=self.buffers)
            self.bounds[chosen, kind] = {
                name: self.scorer.intervals(model, place, chosen, kind == ALL, kind != CLOSED_FORMS)
                for name, place in self._places(rows).items()
            }
        # A pickled result has those that were asked for before.
        bounds = next((self.bounds[chosen, one] for one in (kind, *KINDS) if self.bounds.get((chosen, one))), None)
        return ClientTable.of(chosen, rows, self._samples(rows), bounds, self.counts_samples)

    @property
    def splits(self) -> list[str]:
        """The splits that a client of the table has scores on, the one to judge the clients on first."""
        start, stop = self._last_rows()
        return splits_of(self.clients[start : min(stop, start + MOST_SCORED)])

    @property
    def judged_splits(self) -> list[str]:
        """Those of them with held-out data, or else train."""
        return [name for name in self.splits if name != "train"] or self.splits

    def notes(self) -> list[str]:
        """Sentences for the user: which clients cannot be judged, how sure it is who is worst, and the privacy."""
        return [*self._about_clients(), *([] if self.privacy is None else [str(self.privacy)])]

    def _about_clients(self) -> list[str]:
        start, stop = self._last_rows()
        if start == stop:
            return [NO_CLIENTS]
        if stop - start > MOST_SCORED:  # rows of all would take long, and much memory
            said = []
            for name in splits_of(self.clients[start : start + MOST_SCORED]):
                empty = np.flatnonzero(self.samples.get(name, np.ones(1)) == 0)
                some = [self.names[int(k)] for k in empty[:MOST_LISTED]]
                said += without_rows(name, len(self.names), some, len(empty))
            return said
        rows = self.clients[start:stop]
        others = [name for name in splits_of(rows) if name != "train"][1:]
        tables = [
            ClientTable.of(name, rows, self._samples(rows), counts_samples=self.counts_samples) for name in others
        ]
        return [*self.table_at_end().notes(), *(text for table in tables for text in table.unjudged())]

    def _places(self, rows: Sequence[Row]) -> dict[str, int]:
        return {str(row["client"]): find(self.names, str(row["client"])) or 0 for row in rows}

    def _samples(self, rows: Sequence[Row]) -> dict[str, dict[str, int]]:
        """split -> client -> samples, of the clients of these rows."""
        places = self._places(rows)
        return {name: {client: int(sizes[k]) for client, k in places.items()} for name, sizes in self.samples.items()}

    def _last_rows(self) -> tuple[int, int]:
        """Where the clients' rows of the returned model's round begin and end."""
        of_round = int(self.row["round"] or 0)

        def number_of(row: Row) -> int:
            return int(row["round"] or 0)

        ends = (bisect(self.clients, of_round, key=number_of) for bisect in (bisect_left, bisect_right))
        return next(ends), next(ends)

    def __repr__(self) -> str:
        row = self.row
        key = next((key[: -len(".mean")] for key in _telling(row)), "")
        split, _, measure = key.partition(".")
        about = [f"{self.rounds[-1]['round']} rounds"]
        if self.round and self.round != self.rounds[-1]["round"]:
            about.append(f"model of round {self.round}")
        if key:
            found = {
                kind: number(float(row[f"{key}.{kind}"] or 0)) for kind in ("mean", "worst") if f"{key}.{kind}" in row
            }
            worst = f", {found['worst']} for the worst" if "worst" in found else ""
            about.append(f"{split} {measure.replace('_', ' ')} {found['mean']} for the average client{worst}")
        size = sum(part.numel() for part in self.params.values())
        if self.privacy is not None and self.privacy.epsilon is not None:
            about.append(f"epsilon {self.privacy.epsilon:.3g} at delta {self.privacy.delta:g}")
        about += [f"{len(self.names):,} clients", f"{size:,} parameters", f"{self.seconds:.1f} s"]
        return f"<Result: {'; '.join(about)}>"

    def __getstate__(self) -> dict[str, Any]:
        """What can be pickled: not the engine behind the personal models, nor the data."""
        state = {one.name: getattr(self, one.name) for one in fields(self)} | {"ask_personal": _gone, "scorer": None}
        try:
            pickle.dumps(self.module)
        except Exception:  # a class of a notebook, or a function within another: torch and pickle raise what they like
            state["module"] = None
        return state

    def __copy__(self) -> Result:
        return replace(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Result:
        shared = ("ask_personal", "scorer", "names")  # of the engine, which a copy still asks
        copies = {
            one.name: copy.deepcopy(getattr(self, one.name), memo) for one in fields(self) if one.name not in shared
        }
        return replace(self, **copies)

    def state_dict(self, client: str | None = None) -> Params:
        """Parameters and buffers for ``model.load_state_dict``: the global model's, or a client's personal model's."""
        model = Model(params=self.params, buffers=self.buffers) if client is None else self.personal_model(client)
        return {**model["params"], **model["buffers"]}

    def to_module(self, client: str | None = None) -> nn.Module:
        """The trained model in evaluation mode: the global one, or a client's personal one."""
        if self.module is None:
            raise ConfigError(
                "This result has no module (the run trained a dict of tensors, or the module could not be pickled with "
                "the result); its tensors are in result.params."
            )
        return with_tensors(self.module, self.state_dict(client))

    def personal(self, client: str) -> Params:
        """The parameters of a client's personal model: adapted from the global one, or kept by the client."""
        return self.personal_model(client)["params"]

    def personal_model(self, client: str) -> Model:
        """A client's personal model, with its buffers."""
        place = find(self.names, client) if isinstance(client, str) else None
        if place is None:
            few = len(self.names) <= MOST_NAMED
            known = nearest(str(client), self.names) if few else f"they go from {self.names[0]!r} to {self.names[-1]!r}"
            raise ConfigError(f"{client!r} is not a client of this run; {known}.")
        return next(self.ask_personal([place]))

    @property
    def row(self) -> Row:
        """The row of the returned model's round."""
        return next((row for row in self.rounds if row["round"] == self.round), self.rounds[-1])

    def summary(self) -> dict[str, Any]:
        """The row of the returned model's round, nested, with traffic and time."""
        last = self.row
        early = self.stopped is not None or self.round != self.rounds[-1]["round"]
        stop = {"round": self.round, "best_round": self.best_round, "stopped": self.stopped}
        return {
            "rounds": self.rounds[-1]["round"],
            **(stop if early else {}),
            **client_statistics.nested(last),
            # Under secure aggregation, not all of these are known.
            **{name: last[name] for name in ("objective", "effective_clients", "eval_clients") if name in last},
            **({} if self.privacy is None else {"privacy": self.privacy.summary()}),
            "traffic": self.traffic,
            "seconds": round(self.seconds, 3),
        }


def splits_of(rows: Sequence[Row]) -> list[str]:
    """The splits that clients were evaluated on, the one to judge them on first."""
    found = {key.partition(".")[0] for row in rows[:MOST_SCORED] for key in row}
    return [name for name in ("validation", "test", "train") if name in found]


def _telling(row: Row) -> list[str]:
    """The keys of means over clients, the one that says most first."""
    means = [key for key in row if key.count(".") == 2 and key.endswith(".mean") and "personal_" not in key]
    order = ("validation", "test", "train")
    return sorted(
        means,
        key=lambda key: (
            order.index(key.partition(".")[0]) if key.partition(".")[0] in SPLITS else len(order),
            key.split(".")[1] != "accuracy",
            key.split(".")[1] == "loss",
        ),
    )


def _gone(clients: Sequence[int]) -> Iterator[Model]:
    """In the place of what a pickled result cannot ask any more."""
    raise ConfigError(
        "This result was pickled, without the clients' personal models; call result.personal(...) before, or save the "
        "run with fit(out=...) and read it with load_run."
    )
