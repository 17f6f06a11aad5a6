"""The engine for clients at real sites: sends them steps through Flower's grid and never sees their data."""

from __future__ import annotations

import logging
import secrets
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from flwr.app import RecordDict
from flwr.serverapp import Grid

from comfedl.core.protocol import Engine, Replies
from comfedl.engines.replies import LocalReplies
from comfedl.flower import serialization
from comfedl.flower.client import LOCAL_STEPS, held_name
from comfedl.flower.messaging import Answer, exchange
from comfedl.flower.registry import SiteRegistry
from comfedl.flower.reply_format import ReplyFormat
from comfedl.training.checkpoint import KEPT
from comfedl.utils.errors import ConfigError, Diverged, MalformedMessage
from comfedl.utils.tree import Tree

logger = logging.getLogger("comfedl")


Version = tuple[int, int, int]  # round, number of the request, random id of this server process


class SiteReplies(LocalReplies):
    """The replies of sites, and what is wrong with those that could not be used at all."""

    def __init__(
        self, clients: Sequence[int], replies: Sequence[dict[str, Tree]], refused: Mapping[int, str] | None = None
    ) -> None:
        super().__init__(clients, replies)
        self._refused = dict(refused or {})

    def find_faults(self, fault: Callable[[dict[str, Tree]], str | None]) -> dict[int, str]:
        def checked(reply: dict[str, Tree]) -> str | None:
            try:
                return fault(reply)
            except Exception as error:  # a site may send anything
                return f"it cannot be checked ({type(error).__name__})"

        return {**self._refused, **super().find_faults(checked)}


@dataclass
class Request:
    """A step requested from some clients, and their replies; ``refused`` ones count against their clients."""

    step: str
    clients: Sequence[int]
    message: dict[str, Tree]
    round: int
    version: Version
    held: Mapping[int, str]
    done: bool = False
    replies: dict[int, dict[str, Tree]] = field(default_factory=dict)
    diverged: dict[int, Diverged] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)
    absent: dict[int, str] = field(default_factory=dict)
    summed: Replies | None = None  # in place of the replies, under secure aggregation

    def result(self) -> Replies:
        """The replies. A site that says it diverged is refused; if all say so, the settings are at fault."""
        if self.summed is not None:
            return self.summed
        if self.diverged and self.diverged.keys() == {*self.clients}:
            raise self.diverged[min(self.diverged)]
        present = [client for client in self.clients if client in self.replies]
        return SiteReplies(present, [self.replies[client] for client in present], self.refused)


class Sites(Engine):
    """Runs client steps at sites, with one message per site and round where possible.

    A client's state stays at its site, in versions. The server only tracks the current version, and a checkpoint holds
    no more than that. A site that does not answer is left out of the step and included again in the next.

    Args:
        grid: Flower's connection to the sites.
        roll: the registry of the sites.
        config: the run's config as TOML, sent with every message.
        run: an id of the run, the same after a resume, by which sites tell the states of runs apart.
        deadline: seconds that a site has to answer.
        record: called after each step with a dict of who answered and who did not.
        format: what replies may hold.
        more: what else every message says.
    """

    defers_replies = True

    def __init__(
        self,
        grid: Grid,
        roll: SiteRegistry,
        config: str,
        run: str,
        deadline: float,
        record: Callable[[dict[str, Any]], None] | None = None,
        *,
        format: ReplyFormat,
        more: Mapping[str, Any] | None = None,
    ) -> None:
        self._more = dict(more or {})
        self.names, self.sizes = roll.names, roll.sizes
        self._grid, self._registry, self._config, self._run = grid, roll, config, run
        self._deadline, self._record, self._format = deadline, record or (lambda event: None), format
        self._process_id, self._requests = secrets.randbits(62), 0
        self._waiting: Request | None = None
        self._held: dict[int, str] = {}  # state that clients hold within the current round
        self._round = 0
        self._versions: dict[int, Version] = {}
        self._settled: dict[int, Version] = {}
        # Versions in the checkpoints that a resume may use, plus one for a checkpoint that failed to be written.
        self._checkpointed: deque[dict[int, Version]] = deque(maxlen=KEPT + 1)

    def run(self, step: str, clients: Sequence[int], message: dict[str, Tree], round: int) -> Replies:
        if step in LOCAL_STEPS:
            raise ConfigError("Personal models stay at their sites; the server cannot request them.")
        request = self._new(step, clients, message, round)
        before, self._waiting = self._waiting, None
        self._send([request] if before is None or before.done else [before, request])
        return request.result()

    def run_deferred(
        self, step: str, clients: Sequence[int], message: dict[str, Tree], round: int
    ) -> Callable[[], Replies]:
        if self._waiting is not None and not self._waiting.done:
            self._send([self._waiting])
        request = self._waiting = self._new(step, clients, message, round)

        def take() -> Replies:
            if not request.done:
                self._send([request])
            return request.result()

        return take

    def states(self) -> dict[int, Tree]:
        return self.capture_states()()

    def capture_states(self) -> Callable[[], dict[int, Tree]]:
        now = self._settled

        def give() -> dict[int, Tree]:
            self._checkpointed.append(now)
            return {client: {"version": torch.tensor(version)} for client, version in now.items()}

        return give

    def commit_round(self) -> None:
        self._settled = dict(self._versions)

    def restore(self, states: Mapping[int, Tree]) -> None:
        found = {client: state["version"].tolist() for client, state in states.items()}
        self._versions = {client: (version[0], version[1], version[2]) for client, version in found.items()}
        self.commit_round()
        self._checkpointed.append(self._settled)

    def _new(self, step: str, clients: Sequence[int], message: dict[str, Tree], round: int) -> Request:
        if round != self._round:
            self._round, self._held = round, {}
        self._requests += 1
        return Request(step, clients, message, round, (round, self._requests, self._process_id), self._held)

    def _send(self, requests: Sequence[Request]) -> None:
        """Send each client its part of the requests in one message, and collect the replies."""
        connected = self._registry.nodes()
        records: dict[tuple[int, ...], tuple[list[dict[str, Any]], Any]] = {}
        contents: dict[int, RecordDict] = {}
        sent: dict[int, tuple[int, list[Request]]] = {}
        for client in sorted({client for request in requests for client in request.clients}):
            indices = tuple(k for k, request in enumerate(requests) if client in request.clients)
            node = connected.get(self.names[client])
            if node is None:
                for k in indices:
                    requests[k].absent[client] = "it is not connected"
                continue
            if indices not in records:  # clients with the same requests share one record
                records[indices] = packed([requests[k] for k in indices])
            parts, tensors = records[indices]
            sent[client] = node, [requests[k] for k in indices]
            contents[node] = serialization.encode(self._body(client, sent[client][1], parts), tensors)
        limits = {node: self._format.limit(request.step for request in own) for node, own in sent.values()}
        group = f"round {requests[-1].round}"
        answers = exchange(
            self._grid, contents, "train.step", group, self._deadline, limits, self._registry.check_reply
        )
        for client, (node, client_requests) in sent.items():
            self._accept(client, client_requests, answers[node])
        for request in requests:
            request.done = True
            self._report(request)

    def _body(self, client: int, requests: Sequence[Request], parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """A message's text: the steps, the state to start from, and the states that may still be needed."""
        now = self._versions.get(client)
        use, held = None if now is None else _name(now), [request.held.get(client) for request in requests]
        keep = {_name(kept[client]) for kept in (*self._checkpointed, self._settled, self._versions) if client in kept}
        return {
            **self._more,
            **self._registry.fresh(),
            "config": self._config,
            "run": self._run,
            "asks": [{**part, "use": use, "hold": hold} for part, hold in zip(parts, held, strict=True)],
            "keep": sorted(keep | {hold for hold in held if hold}),
        }

    def _accept(self, client: int, requests: Sequence[Request], answer: Answer | MalformedMessage | str) -> None:
        """Store a site's answer, or the reason why there is none, in the requests."""
        parts: Any = None
        if isinstance(answer, tuple):
            body, tensors = answer
            parts = body.get("answers")
            if "error" in body:
                answer = serialization.shortened(body["error"])
            elif not isinstance(parts, list) or [isinstance(part, dict) for part in parts] != [True] * len(requests):
                answer = MalformedMessage("it does not match the request")
        if not isinstance(answer, tuple):
            for request in requests:
                if isinstance(answer, MalformedMessage):
                    request.refused[client] = str(answer)
                else:
                    request.absent[client] = answer
            return
        for request, part in zip(requests, parts, strict=True):
            try:
                self._accept_part(client, request, part, tensors)
            except MalformedMessage as error:
                request.refused[client] = str(error)
            except Exception as error:  # a site may send anything, and only it is left out
                request.refused[client] = f"it cannot be read ({type(error).__name__})"

    def _accept_part(
        self, client: int, request: Request, part: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
    ) -> None:
        round, name = request.round, self.names[client]
        if "diverged" in part:
            step, loss, weight = part["diverged"]
            at = None if step is None else min(max(int(step), 1), 2**31)
            request.diverged[client] = Diverged(round, name, at, float(loss), float(weight))
            where = "" if at is None else f" at local step {at} (loss {float(loss):.6g}, weight {float(weight):.6g})"
            request.refused[client] = f"its training diverged{where}"
        elif "error" in part:
            request.absent[client] = serialization.shortened(part["error"])
        else:
            request.replies[client] = self._format.accepted(request.step, serialization.unpack(part["reply"], tensors))
            self._note(client, request, part)

    def _note(self, client: int, request: Request, part: Mapping[str, Any]) -> None:
        """Take note of what a site says that it keeps."""
        if part.get("kept") == _name(request.version):
            self._versions[client] = request.version
        if part.get("held") == held_name(_name(request.version)):
            self._held[client] = held_name(_name(request.version))
        if part.get("anew"):
            name, round = self.names[client], request.round
            logger.warning("Site %r lost its state and starts from the initial one in round %d.", name, round)

    def _report(self, request: Request) -> None:
        absent = {self.names[client]: reason.rstrip(".") for client, reason in sorted(request.absent.items())}
        for name, reason in absent.items():
            logger.warning("Round %d: site %r is left out of %r: %s.", request.round, name, request.step, reason)
        absent |= {self.names[client]: f"refused: {reason}" for client, reason in sorted(request.refused.items())}
        answered = [self.names[client] for client in sorted(request.replies)]
        self._record({"round": request.round, "step": request.step, "answered": answered, "absent": absent})


def packed(requests: Sequence[Request]) -> tuple[list[dict[str, Any]], Any]:
    """What all sites are asked alike, and the record with its tensors."""
    packer = serialization.TensorPacker()
    parts = [
        {
            "step": request.step,
            "round": request.round,
            "version": _name(request.version),
            "message": packer.add(request.message),
        }
        for request in requests
    ]
    return parts, packer.record()


def _name(version: Version) -> str:
    round, number, process = version
    return f"round {round} turn {number} of {process:x}"
