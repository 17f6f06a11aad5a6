"""The engine whose clients are at real sites: it asks them through Flower's grid and knows nothing of their data."""

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

from comfedl.core.protocol import Diverged, Engine, Replies
from comfedl.engines.replies import LocalReplies
from comfedl.flower import serialization
from comfedl.flower.client import PRIVATE
from comfedl.flower.messaging import Answer, exchange
from comfedl.flower.registry import Roll
from comfedl.training.checkpoint import KEPT
from comfedl.utils.errors import ConfigError
from comfedl.utils.tree import Tree

logger = logging.getLogger("comfedl")


@dataclass
class _Ask:
    """A step that some clients are asked for, and what has come back."""

    step: str
    clients: Sequence[int]
    message: dict[str, Tree]
    round: int
    version: tuple[int, int, int]
    held: Mapping[int, str]
    done: bool = False
    replies: dict[int, dict[str, Tree]] = field(default_factory=dict)
    diverged: dict[int, Diverged] = field(default_factory=dict)
    absent: dict[int, str] = field(default_factory=dict)

    def taken(self) -> Replies:
        """The replies, or what a client's training has raised."""
        if self.diverged:
            raise self.diverged[min(self.diverged)]
        present = [client for client in self.clients if client in self.replies]
        return LocalReplies(present, [self.replies[client] for client in present])


class Sites(Engine):
    """Runs client steps at sites, one message a site for all that a round asks of it.

    A client's state stays at its site, in versions; the server only knows which version is the right one, and that is
    what a checkpoint holds. A site that does not answer is left out of the step, and asked again in the next.

    Args:
        grid: Flower's way to the sites.
        roll: who they are.
        config: the run's config as TOML, which is sent with every message.
        run: a name for the run that is the same when it goes on, by which sites keep states apart.
        deadline: how many seconds a site has for its answer.
        record: is told, as a dict, who was asked for what and who did not answer.
    """

    lags = True

    def __init__(
        self,
        grid: Grid,
        roll: Roll,
        config: str,
        run: str,
        deadline: float,
        record: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        self.names, self.sizes = roll.names, roll.sizes
        self._grid, self._roll, self._config, self._run = grid, roll, config, run
        self._deadline, self._tell = deadline, record or (lambda event: None)
        self._start, self._turn = secrets.randbits(62), 0
        self._waiting: _Ask | None = None
        self._held: dict[int, str] = {}  # what clients hold for the round that is under way
        self._round = 0
        self._versions: dict[int, tuple[int, int, int]] = {}
        self._settled: dict[int, tuple[int, int, int]] = {}
        # What went into checkpoints that may still be gone back to, and into one whose writing has failed.
        self._given: deque[dict[int, tuple[int, int, int]]] = deque(maxlen=KEPT + 1)

    def run(self, step: str, clients: Sequence[int], message: dict[str, Tree], round: int) -> Replies:
        if step in PRIVATE:
            raise ConfigError("Personal models stay at their sites, so they cannot be asked for here.")
        ask = self._new(step, clients, message, round)
        before, self._waiting = self._waiting, None
        self._send([ask] if before is None or before.done else [before, ask])
        return ask.taken()

    def later(self, step: str, clients: Sequence[int], message: dict[str, Tree], round: int) -> Callable[[], Replies]:
        if self._waiting is not None and not self._waiting.done:
            self._send([self._waiting])
        ask = self._waiting = self._new(step, clients, message, round)

        def take() -> Replies:
            if not ask.done:
                self._send([ask])
            return ask.taken()

        return take

    def states(self) -> dict[int, Tree]:
        return self.kept()()

    def kept(self) -> Callable[[], dict[int, Tree]]:
        now = self._settled

        def give() -> dict[int, Tree]:
            self._given.append(now)
            return {client: {"version": torch.tensor(version)} for client, version in now.items()}

        return give

    def settle(self) -> None:
        self._settled = dict(self._versions)

    def restore(self, states: Mapping[int, Tree]) -> None:
        found = {client: state["version"].tolist() for client, state in states.items()}
        self._versions = {client: (version[0], version[1], version[2]) for client, version in found.items()}
        self.settle()
        self._given.append(self._settled)

    def _new(self, step: str, clients: Sequence[int], message: dict[str, Tree], round: int) -> _Ask:
        if round != self._round:
            self._round, self._held = round, {}
        self._turn += 1
        return _Ask(step, clients, message, round, (round, self._turn, self._start), self._held)

    def _send(self, asks: Sequence[_Ask]) -> None:
        """Ask each client for its part of this, in one message, and sort what comes back."""
        here = self._roll.nodes()
        records: dict[tuple[int, ...], tuple[list[dict[str, Any]], Any]] = {}
        contents: dict[int, RecordDict] = {}
        sent: dict[int, tuple[int, list[_Ask]]] = {}
        for client in sorted({client for ask in asks for client in ask.clients}):
            own = tuple(k for k, ask in enumerate(asks) if client in ask.clients)
            node = here.get(self.names[client])
            if node is None:
                for k in own:
                    asks[k].absent[client] = "it is not connected"
                continue
            if own not in records:
                packed = serialization.Packed()
                parts = [
                    {
                        "step": ask.step,
                        "round": ask.round,
                        "version": _name(ask.version),
                        "message": packed.put(ask.message),
                    }
                    for ask in (asks[k] for k in own)
                ]
                records[own] = parts, packed.record()
            parts, tensors = records[own]
            sent[client] = node, [asks[k] for k in own]
            contents[node] = serialization.content(self._body(client, sent[client][1], parts), tensors)
        found = exchange(self._grid, contents, "train.step", f"round {asks[-1].round}", self._deadline)
        for client, (node, own_asks) in sent.items():
            self._sort(client, own_asks, found[node])
        for ask in asks:
            ask.done = True
            self._report(ask)

    def _body(self, client: int, asks: Sequence[_Ask], parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """A message's text: what to do, from which state, and which states may still be needed."""
        now = self._versions.get(client)
        use, held = None if now is None else _name(now), [ask.held.get(client) for ask in asks]
        keep = {_name(kept[client]) for kept in (*self._given, self._settled, self._versions) if client in kept}
        return {
            "config": self._config,
            "run": self._run,
            "asks": [{**part, "use": use, "hold": hold} for part, hold in zip(parts, held, strict=True)],
            "keep": sorted(keep | {hold for hold in held if hold}),
        }

    def _sort(self, client: int, asks: Sequence[_Ask], answer: Answer | str) -> None:
        told: Any = None
        if not isinstance(answer, str):
            body, tensors = answer
            told = body.get("answers")
            if "error" in body:
                answer = str(body["error"])
            elif not isinstance(told, list) or len(told) != len(asks) or not all(isinstance(t, dict) for t in told):
                answer = "its reply is refused: it does not answer what was asked"
        if isinstance(answer, str):
            for ask in asks:
                ask.absent[client] = answer
            return
        for ask, part in zip(asks, told, strict=True):
            try:
                self._take(client, ask, part, tensors)
            except (serialization.Unreadable, KeyError, TypeError, ValueError) as error:
                ask.absent[client] = f"its reply is refused: {error}"

    def _take(self, client: int, ask: _Ask, part: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        if "diverged" in part:
            step, loss, weight = part["diverged"]
            error = Diverged(
                ask.round, self.names[client], None if step is None else int(step), float(loss), float(weight)
            )
            ask.diverged[client] = error
        elif "error" in part:
            ask.absent[client] = str(part["error"])
        else:
            reply = serialization.unpacked(part["reply"], tensors)
            if not isinstance(reply, dict):
                raise serialization.Unreadable("it has no parts")
            ask.replies[client] = reply
            if part.get("kept") == _name(ask.version):
                self._versions[client] = ask.version
            if part.get("held"):
                self._held[client] = str(part["held"])
            if part.get("anew"):
                logger.warning(
                    "Site %r has lost what it kept, and starts anew in round %d.", self.names[client], ask.round
                )

    def _report(self, ask: _Ask) -> None:
        absent = {self.names[client]: reason.rstrip(".") for client, reason in sorted(ask.absent.items())}
        for name, reason in absent.items():
            logger.warning("Round %d: site %r is left out of %r: %s.", ask.round, name, ask.step, reason)
        answered = [self.names[client] for client in sorted(ask.replies)]
        self._tell({"round": ask.round, "step": ask.step, "answered": answered, "absent": absent})


def _name(version: tuple[int, int, int]) -> str:
    round, turn, start = version
    return f"round {round} turn {turn} of {start:x}"
