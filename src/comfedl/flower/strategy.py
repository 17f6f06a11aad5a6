"""Flower strategies for apps that already exist: the server's part of a method, over replies of your own ClientApp.

A round runs the very ``round`` of the method, with an engine whose replies have already arrived. So with the same
replies the model is that of a simulation.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar, cast

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg, Result
from flwr.serverapp.strategy.strategy_utils import sample_nodes
from torch import nn

from comfedl.algorithms.base import Algorithm
from comfedl.algorithms.comfedl import ComFedL, Compositional
from comfedl.algorithms.fedavg import FedAvg
from comfedl.algorithms.qfedavg import QFedAvg
from comfedl.algorithms.robust import Robust
from comfedl.core.offset import Excess
from comfedl.core.outer_functions import KL
from comfedl.flower.app_replies import Layout, SiteReply, StatisticsBySite, read_metrics, read_reply
from comfedl.flower.messaging import PromptGrid
from comfedl.flower.strategy_folder import StrategyFolder
from comfedl.flower.strategy_run import StrategyRun, node_of
from comfedl.utils import checks, rng
from comfedl.utils.errors import ConfigError, MalformedMessage, QuorumError

logger = logging.getLogger("flwr")  # so that its lines are among those of Flower's own strategies

Read = TypeVar("Read")
EvaluateFunction = Callable[[int, ArrayRecord], MetricRecord | None]


class MethodStrategy(FlowerFedAvg):
    """A strategy that runs the server's part of one of our methods: ``Robust``, ``ComFedL``, ``QFedAvg`` or ``FedAvg``.

    The ClientApp trains as it does for Flower's ``FedAvg``. For all methods but ``FedAvg`` it also returns, as the
    metric ``loss``, the loss of the model that it received, measured before training.

    The method must be told how the clients train: its ``lr``, ``local_steps`` and ``client_optimizer`` (such as
    ``optim.SGD(momentum=0.9)``) say how far an update goes along a client's gradient. All sites should take the same
    number of steps.

    Args:
        method: the method, such as ``cf.Robust(gamma=0.1, lr=0.01, local_steps=10)``.
        model: the module whose ``state_dict`` is trained, to tell parameters from buffers. A list of the buffers' names
            does as well; None if there are none.
        loss_key: the metric with the loss of the received model.
        site_key: the key, in a ``ConfigRecord`` of the reply, of the site's name. Without it a site is its node id.
        quorum: the fraction of the sites asked that must send a usable reply, or the run ends.
        seed: the seed of who takes part if ``fraction_train`` or ``fraction_evaluate`` is below 1.
        smaller_is_better: metrics of which the largest is the worst, besides those with "loss" or "error" in the name.
        out: a folder for the state after each round, and for ``history.jsonl`` with weights and metrics by site.
        resume: continue the run in ``out``, if there is one.
        **flower: the arguments of Flower's ``FedAvg``: ``fraction_train``, ``min_available_nodes`` and so on.
    """

    def __init__(
        self,
        method: Algorithm,
        *,
        model: nn.Module | Collection[str] | None = None,
        loss_key: str = "loss",
        site_key: str = "site",
        quorum: float = 0.5,
        seed: int = 0,
        smaller_is_better: Collection[str] = (),
        out: str | Path | None = None,
        resume: bool = False,
        **flower: Any,
    ) -> None:
        known = list(inspect.signature(FlowerFedAvg).parameters)
        for name in flower:
            if name not in known:
                raise ConfigError(
                    f"{type(self).__name__} has no argument {name!r}; besides its own and the method's it takes "
                    f"those of Flower's FedAvg: {', '.join(known)}."
                )
        super().__init__(**flower)
        check_method(method)
        checks.not_below("quorum", quorum, 0)
        checks.at_most("quorum", quorum, 1)
        if resume and out is None:
            raise ConfigError("resume is True, but out is None; give the folder of the run to continue as out.")
        self.method, self.model, self.loss_key, self.site_key = method, model, loss_key, site_key
        self.quorum, self.seed = quorum, seed
        self.out, self.resume = None if out is None else Path(out), resume
        self._custom = {phase: flower.get(f"{phase}_metrics_aggr_fn") for phase in ("train", "evaluate")}
        self._statistics = StatisticsBySite(self.weighted_by_key, frozenset(smaller_is_better))
        self._run: StrategyRun | None = None

    # What Flower's loop calls.

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: EvaluateFunction | None = None,
    ) -> Result:
        """Run the rounds, as ``FedAvg.start`` does; those of a run that is continued are not asked for again.

        ``result.arrays`` is the reported model, an average of the last rounds' unless ``server_average`` is None.
        """
        self.method.check_rounds(num_rounds)
        self._run = run = self._begin(initial_arrays)
        before = run.done
        if before:
            logger.info("%s continues after round %d.", type(self).__name__, before)

        def judged(number: int, arrays: ArrayRecord) -> MetricRecord | None:
            assert evaluate_fn is not None
            if run.has(number, "server") or number < before:  # the models of earlier rounds are gone
                return run.metrics(number, "server")
            found = evaluate_fn(number, arrays)
            run.record(number, "server", found)
            return found

        try:
            if run.done > num_rounds:
                raise ConfigError(
                    f"{self.out} has {run.done} rounds already, and num_rounds is {num_rounds}; ask for "
                    f"{run.done} or more."
                )
            return super().start(
                cast(Grid, PromptGrid(grid)),
                run.layout.arrays(self.method.reported(run.state)),
                num_rounds,
                timeout,
                train_config,
                evaluate_config,
                None if evaluate_fn is None else judged,
            )
        finally:
            run.close()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The messages of a round's training: the model to train on, which need not be the reported one."""
        if self._run is None:
            self._run = self._begin(arrays)
        run = self._run
        if server_round <= run.done or self.fraction_train == 0:
            return []
        nodes, run.connected = self._sampled(grid, server_round, "clients", self.fraction_train, self.min_train_nodes)
        run.asked = nodes
        return self._messages(run.layout.arrays(run.state["model"]), config, server_round, nodes, MessageType.TRAIN)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The method's round over these replies: the reported model, and the metrics with each site's weight."""
        run = self._started()
        if server_round <= run.done:
            last = server_round == run.done
            arrays = run.layout.arrays(self.method.reported(run.state)) if last else None
            return arrays, run.metrics(server_round, "train")
        if not run.asked:
            return None, None
        replies, loss_key = list(replies), self.loss_key if "loss" in self.method.reply() else None
        if len(replies) < len(run.asked):
            silent = len(run.asked) - len(replies)
            logger.warning("Round %d: %d of %d nodes did not answer in time.", server_round, silent, len(run.asked))

        def read(message: Message, site: str) -> SiteReply:
            reply = read_reply(message, site, run.layout, self.weighted_by_key, loss_key)
            fault = run.validator.find_fault(reply.content, {})
            if fault is not None:
                raise MalformedMessage(fault)
            return reply

        usable, example = self._read(run, server_round, replies, read, is_train=True)
        if len(usable) < max(1, self.quorum * len(run.asked)):
            how = "resume" if self.out is not None else "start again, with a folder (out) to resume from"
            raise QuorumError(
                f"Round {server_round}: only {len(usable)} of {len(run.asked)} replies can be used{example}, but the "
                f"quorum is {self.quorum:g} of them; correct these sites and {how}, or lower quorum."
            )
        if server_round == 1:
            self.method.check_aggregate(len(usable))
        weights = run.advance(self.method, server_round, self.seed, list(usable.values()))
        table = {site: usable[site].metrics for site in weights}
        metrics = self._summary("train", table, [usable[site].message for site in weights])
        metrics.update({f"weight/{site}": weight for site, weight in weights.items()})
        run.record(server_round, "train", metrics, {site: {"weight": weights[site], **table[site]} for site in weights})
        reported = self.method.reported(run.state)
        run.save(reported)
        return run.layout.arrays(reported), metrics

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The messages of a round's evaluation, with the reported model."""
        if self._started().has(server_round, "evaluate") or self.fraction_evaluate == 0:
            return []
        nodes, _ = self._sampled(grid, server_round, "evaluated", self.fraction_evaluate, self.min_evaluate_nodes)
        return self._messages(arrays, config, server_round, nodes, MessageType.EVALUATE)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """The metrics: their mean weighted by samples, and over sites the mean, the worst and the worst tenth."""
        run = self._started()
        if run.has(server_round, "evaluate"):
            return run.metrics(server_round, "evaluate")

        def read(message: Message, site: str) -> tuple[Mapping[str, float], Message]:
            return read_metrics(message.content, self.weighted_by_key), message

        found, _ = self._read(run, server_round, replies, read, is_train=False)
        if not found:
            return None
        table = {site: values for site, (values, _) in sorted(found.items())}
        metrics = self._summary("evaluate", table, [found[site][1] for site in table])
        run.record(server_round, "evaluate", metrics, table)
        return metrics

    def summary(self) -> None:
        """Log the method and where the run is kept."""
        logger.info("\t├──> Method: %s", self.method)
        logger.info("\t│\t├── Metric with the received model's loss: '%s'", self.loss_key)
        logger.info("\t│\t└── Folder: %s", self.out or "none, so the run cannot be resumed")
        super().summary()

    # Its parts.

    def _begin(self, arrays: ArrayRecord) -> StrategyRun:
        layout = Layout.of(arrays, self.model)
        run = StrategyRun(layout, self.method.initial_state(layout.model(arrays), 0))
        if self.out is not None:
            settings = {"method": settings_of(self.method), "arrays": layout.signature}
            run.keep_in(StrategyFolder(self.out, settings), self.resume)
        return run

    def _started(self) -> StrategyRun:
        if self._run is None:
            raise ConfigError("The strategy has no model yet; call start(), or configure_train before aggregate_train.")
        return self._run

    def _sampled(
        self, grid: Grid, number: int, purpose: str, fraction: float, least: int
    ) -> tuple[list[int], list[int]]:
        """The nodes to ask, drawn by seed and round, and all that are connected."""
        size = max(int(len(list(grid.get_node_ids())) * fraction), least)
        _, nodes = sample_nodes(grid, self.min_available_nodes, size)  # waits until there are enough
        connected = sorted(nodes)
        if size >= len(connected):
            return connected, connected
        drawn = rng.generator(self.seed, purpose, number).choice(len(connected), size=size, replace=False)
        return [connected[place] for place in sorted(drawn.tolist())], connected

    def _messages(
        self, arrays: ArrayRecord, config: ConfigRecord, number: int, nodes: list[int], kind: str
    ) -> Iterable[Message]:
        config["server-round"] = number
        logger.info("configure_%s: Asking %s nodes", kind, len(nodes))
        record = RecordDict({self.arrayrecord_key: arrays, self.configrecord_key: config})
        return self._construct_messages(record, nodes, kind)

    def _read(
        self,
        run: StrategyRun,
        number: int,
        replies: Iterable[Message],
        read: Callable[[Message, str], Read],
        is_train: bool,
    ) -> tuple[dict[str, Read], str]:
        """The usable replies by site, and in words what is wrong with one of the others, which are all logged."""
        messages, _ = self._check_and_log_replies(list(replies), is_train, validate=False)
        found: dict[str, Read] = {}
        example = ""
        for message, site in run.identified(messages, self.site_key):
            try:
                if isinstance(site, MalformedMessage):
                    raise site
                found[site] = read(message, site)
            except MalformedMessage as error:
                example = example or f" (node {node_of(message)}: {error})"
                logger.warning("Round %d: the reply of node %d is left out: %s.", number, node_of(message), error)
        return found, example

    def _summary(self, phase: str, table: Mapping[str, Mapping[str, float]], messages: list[Message]) -> MetricRecord:
        """The metrics of a round, with those of the caller's own function in place of the weighted means."""
        found = MetricRecord()
        own = self._custom[phase]
        if own is not None:
            found.update(own([message.content for message in messages], self.weighted_by_key))
        for name, value in self._statistics.of(table, means=own is None).items():
            found.setdefault(name, value)
        return found


class RobustStrategy(MethodStrategy):
    """``Robust`` for an existing Flower app: the sites' replies weighted by their losses, towards the worst site.

    Args:
        gamma: how far the weights may move from uniform, in units of the loss: small follows the worst site, large is
            plain averaging.
        lr: the learning rate of the clients' training.
        local_steps: the number of their optimiser's steps in a round.
        memory: how much of a site's estimated loss stays from round to round. None, the default, takes the loss that a
            site sends as it is, so it should be measured on all train data. With the loss of one batch use 0.98.
        **more: further arguments of ``cf.Robust`` (``client_optimizer``, ``cap``, ``defence``, ``server_optimizer``,
            ``server_average`` and so on) and of ``MethodStrategy``. With ``server_optimizer=None`` and
            ``server_average=None`` it goes without momentum and averaging.
    """

    def __init__(
        self, gamma: float = 0.1, *, lr: float, local_steps: int, memory: float | None = None, **more: Any
    ) -> None:
        own, rest = divided(Robust, more)
        super().__init__(Robust(gamma, lr=lr, local_steps=local_steps, memory=memory, **own), **rest)


class QFedAvgStrategy(MethodStrategy):
    """``QFedAvg`` for an existing Flower app.

    Args:
        q: 0 is the plain average; a larger q is fairer and slower.
        lr: the learning rate of the clients' training.
        **more: further arguments of ``cf.QFedAvg`` and of ``MethodStrategy``.
    """

    def __init__(self, q: float = 0.2, *, lr: float, **more: Any) -> None:
        own, rest = divided(QFedAvg, more)
        super().__init__(QFedAvg(q, lr=lr, **own), **rest)


class EqualStrategy(MethodStrategy):
    """Every site counts the same, whatever its number of samples.

    Args:
        **more: arguments of ``cf.FedAvg`` and of ``MethodStrategy``.
    """

    def __init__(self, **more: Any) -> None:
        own, rest = divided(FedAvg, more)
        super().__init__(FedAvg(**{"weighting": "uniform", **own}), **rest)


def divided(method: type[Algorithm], given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments of the method, and the others."""
    names = {field.name for field in fields(method)}
    return {k: v for k, v in given.items() if k in names}, {k: v for k, v in given.items() if k not in names}


def check_method(method: Algorithm) -> None:
    """Refuse methods that need more from a client than its trained model and a loss."""
    if not isinstance(method, Robust | ComFedL | QFedAvg | FedAvg):
        given = method.name if isinstance(method, Algorithm) else repr(method)
        raise ConfigError(
            f"The strategy's method is {given}, but it must be Robust, ComFedL, QFedAvg or FedAvg; the others ask more "
            "of a client than its trained model and a loss, so deploy them with comfedl.flower.server_app."
        )
    only = "deploy it with comfedl.flower.server_app, which runs the client's part too"
    if isinstance(method, Compositional) and (method.adapt is not None or method.composition is not None):
        raise ConfigError(
            f"{method.name} has an inner map or a problem of its own, which clients must compute; {only}."
        )
    if isinstance(method, Compositional) and isinstance(method.g, KL) and isinstance(method.g.offset, Excess):
        raise ConfigError(f"The offset of {method.name} is Excess, which must know all sites at the start; {only}.")
    if isinstance(method, QFedAvg) and method.sampling != "uniform":
        raise ConfigError('sampling is "samples", but a strategy draws its nodes uniformly; use sampling = "uniform".')


def settings_of(method: Algorithm) -> dict[str, str]:
    """A method's arguments as text, by which a run that is continued is recognised."""
    given = {field.name: getattr(method, field.name) for field in fields(method)}
    return {"name": method.name} | {
        name: getattr(value, "__qualname__", None) or repr(value) for name, value in given.items()
    }
