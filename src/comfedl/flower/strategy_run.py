"""A strategy's run: the method's state, the sites as they come, and a round over replies that have arrived."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from flwr.app import Message, MetricRecord

from comfedl.algorithms.base import Algorithm, State
from comfedl.algorithms.context import RoundContext
from comfedl.core import client_vector
from comfedl.core.learner import Model
from comfedl.core.protocol import Engine, Replies
from comfedl.core.reply_validation import ReplyValidator
from comfedl.engines.replies import LocalReplies
from comfedl.flower.app_replies import Layout, SiteReply, name_in
from comfedl.flower.strategy_folder import Lines, Saved, StrategyFolder
from comfedl.utils.errors import MalformedMessage
from comfedl.utils.tree import Tree

LOSSES = "losses"  # where a method's state has the table of losses


class StrategyRun:
    """What a run has come to; with a folder, all of it is kept there.

    Attributes:
        done: the last round whose training is done.
        sites: in the order in which they came; the method knows them by their places in it.
        lines: the history, by round and phase.
        asked, connected: the nodes that the current round's training asked, and those that it could have asked.
    """

    def __init__(self, layout: Layout, state: State) -> None:
        self.layout, self.state, self.done = layout, state, 0
        self.validator = ReplyValidator(state["model"], [], 0)
        self.sites: list[str] = []
        self.asked: list[int] = []
        self.connected: list[int] = []
        self.lines: Lines = {}
        self._sizes: dict[str, int] = {}
        self._site_of: dict[int, str] = {}
        self._folder: StrategyFolder | None = None

    def keep_in(self, folder: StrategyFolder, resume: bool) -> None:
        """Keep the run in a folder, and continue the one that is there."""
        saved = folder.open(resume, self.state)
        self._folder = folder
        if saved is not None:
            self.done, self.state, self.lines = saved.round, saved.state, saved.lines
            table = saved.state.get(LOSSES)
            # The names are written before the state, which may therefore know fewer.
            self.sites = saved.sites if table is None else saved.sites[: len(client_vector.to_tensor(table))]
            self._site_of = {node: site for node, site in saved.nodes.items() if site in self.sites}

    def identified(
        self, messages: Iterable[Message], key: str
    ) -> list[tuple[Message, str] | tuple[Message, MalformedMessage]]:
        """The site of each reply, by the name that it states or that its node stated before, or why it is none.

        A site's name stays with its node as long as that answers; of nodes that are new, no two may state the same.
        """
        claims: list[tuple[Message, str | MalformedMessage]] = []
        for message in sorted(messages, key=node_of):
            try:
                claims.append((message, self._claimed(message, key)))
            except MalformedMessage as error:
                claims.append((message, error))
        holders = {site for message, site in claims if self._site_of.get(node_of(message)) == site}
        times = Counter(site for _, site in claims if isinstance(site, str))
        found: list[tuple[Message, str] | tuple[Message, MalformedMessage]] = []
        for message, site in claims:
            if isinstance(site, MalformedMessage):
                found.append((message, site))
            elif times[site] > 1 and self._site_of.get(node_of(message)) != site:
                what = "another node is site" if site in holders else "several nodes state that they are site"
                found.append((message, MalformedMessage(f"{what} {site!r}")))
            else:
                found.append((message, site))
        return found

    def _claimed(self, message: Message, key: str) -> str:
        node, said = node_of(message), name_in(message.content, key)
        known = self._site_of.get(node)
        if said is not None and known not in (None, said, str(node)):
            raise MalformedMessage(f"it was site {known!r} before and now states that it is {said!r}")
        return said or known or str(node)

    def advance(self, method: Algorithm, number: int, seed: int, replies: Sequence[SiteReply]) -> dict[str, float]:
        """Run a round of the method over these replies; returns each site's weight."""
        for reply in sorted(replies, key=lambda reply: reply.site):
            if reply.site not in self.sites:
                self.sites.append(reply.site)
            self._sizes[reply.site] = reply.samples
            self._site_of = {node: site for node, site in self._site_of.items() if site != reply.site}
            self._site_of[node_of(reply.message)] = reply.site
        content = {self.sites.index(reply.site): reply.content for reply in replies}
        clients, everybody = sorted(content), len(self.asked) == len(self.connected)
        engine = Arrived(
            self.sites,
            [self._sizes.get(site, 1) for site in self.sites],
            LocalReplies(clients, [content[client] for client in clients]),
        )
        participants = len(self.sites) if everybody else min(len(self.asked), len(self.sites) - 1)
        context = Received(number, seed, participants, engine, recorded=False)
        before = self.state
        if LOSSES in before:
            before = {**before, LOSSES: grown(before[LOSSES], len(self.sites))}
        self.state, participation = method.at_round(number).round(before, context)
        self.done = number
        places = zip(participation.clients, participation.weights.tolist(), strict=True)
        return {self.sites[place]: weight for place, weight in places}

    def has(self, number: int, phase: str) -> bool:
        """Whether the history has this phase of a round."""
        return (number, phase) in self.lines

    def metrics(self, number: int, phase: str) -> MetricRecord | None:
        """The metrics of a phase, from the history."""
        found = self.lines.get((number, phase), {}).get("metrics")
        return None if found is None else MetricRecord(dict(found))

    def record(
        self,
        number: int,
        phase: str,
        metrics: MetricRecord | None,
        sites: Mapping[str, Mapping[str, float]] | None = None,
    ) -> None:
        """Add a phase to the history."""
        line: dict[str, Any] = {"round": number, "phase": phase, "metrics": None if metrics is None else dict(metrics)}
        if sites is not None:
            line["sites"] = {site: dict(values) for site, values in sites.items()}
        self.lines[number, phase] = line
        if self._folder is not None:
            self._folder.add(line)

    def save(self, reported: Model) -> None:
        """Save the state after a round."""
        if self._folder is not None:
            self._folder.save(Saved(self.done, self.state, self.sites, self._site_of, self.lines), reported)

    def close(self) -> None:
        """Let others write to the folder."""
        if self._folder is not None:
            self._folder.close()


class Received(RoundContext):
    """A round whose participants have been asked already, and whose replies have been checked."""

    def sample(self, purpose: str = "clients") -> list[int]:
        assert isinstance(self.engine, Arrived)
        return list(self.engine.replies.clients)


class Arrived(Engine):
    """An engine for replies that have arrived: whichever step of training a method asks for, these are its answers."""

    def __init__(self, names: Sequence[str], sizes: Sequence[int], replies: LocalReplies) -> None:
        self.names, self.sizes, self.replies = list(names), np.array(sizes, dtype=np.int64), replies

    def run(self, step: str, clients: Sequence[int], message: dict[str, Tree], round: int) -> Replies:
        return self.replies

    def states(self) -> dict[int, Tree]:
        return {}

    def commit_round(self) -> None:
        """Clients keep nothing for the server."""

    def restore(self, states: Mapping[int, Tree]) -> None:
        """As above."""


def grown(table: Tree, clients: int) -> Tree:
    """A table of numbers by client, with NaN for those that are new."""
    numbers = client_vector.to_tensor(table)
    if len(numbers) == clients:
        return table
    return client_vector.put(client_vector.full(clients, torch.nan), range(len(numbers)), numbers)


def node_of(message: Message) -> int:
    """The node that sent a message."""
    return int(message.metadata.src_node_id)
