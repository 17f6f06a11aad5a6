"""Secure aggregation in this process: every client plays a site of the protocol, and the sums are all that is used."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from comfedl.core.protocol import Engine, Replies
from comfedl.core.sums import WHOLE, SummedReplies
from comfedl.engines.faults import Faulty
from comfedl.engines.sums import Codec
from comfedl.engines.wrapped import Wrapped
from comfedl.secure.ring import Words, total
from comfedl.secure.server import Answer, Outcome, SecureServer, check_whole
from comfedl.secure.site import Ask, SecureSite, digest
from comfedl.utils import tree
from comfedl.utils.fingerprint import fingerprint
from comfedl.utils.tree import Tree

NOT_SUMMED = ("personal",)  # steps whose replies stay at their sites


class Secured(Wrapped):
    """An engine whose replies are sums, by the protocol or, without masks, by adding the same words.

    Clients that are absent or late drop out after their keys are shared, those that leave early after their numbers
    are masked.
    """

    def __init__(self, engine: Engine, codec: Codec) -> None:
        super().__init__(engine)
        self._codec = codec
        self._sites = {name: SecureSite(name) for name in (engine.names if codec.settings.masks else ())}
        self._places = {name: place for place, name in enumerate(engine.names)}
        self._server = SecureServer(codec.settings, self._send)
        self._words: Callable[[], dict[str, list[Words] | str]] = dict
        self._round, self._task, self._sent, self._whole = 0, b"", 0, False

    def run(self, step: str, clients: Sequence[int], message: dict[str, Tree], round: int) -> Replies:
        if step in NOT_SUMMED:
            return self._engine.run(step, clients, message, round)
        asked = list(dict.fromkeys(clients))
        self._codec.settings.check_sites(len(asked))

        def words() -> dict[str, list[Words] | str]:
            return self._encoded(step, self._engine.run(step, asked, message, round), message)

        names = [self.names[client] for client in asked]
        self._words, self._sent, self._round, self._whole = words, 0, round, WHOLE in message
        if self._codec.settings.masks:
            self._task = digest([step, round, fingerprint(*tree.leaves(message))])
            like = self._codec.like(step, message["model"])
            found = self._server.sum(names, f"Round {round}", self._task, like, self._whole)
        else:
            every = words()
            present = {name: own for name, own in every.items() if not isinstance(own, str)}
            if self._whole:
                absent = {name: own for name, own in every.items() if isinstance(own, str)}
                check_whole(names, present, f"Round {round}", absent)
            self._sent = sum(part.nbytes for own in present.values() for part in own)
            found = Outcome([total(parts) for parts in zip(*present.values(), strict=True)], [*present], {})
        who = [self._places[name] for name in found.sites]
        if not who:
            return SummedReplies(clients=[], weight=0.0)
        return self._codec.decode(step, found.words, message, who, self._sent)

    def run_deferred(
        self, step: str, clients: Sequence[int], message: dict[str, Tree], round: int
    ) -> Callable[[], Replies]:
        replies = self.run(step, clients, message, round)
        return lambda: replies

    def _encoded(self, step: str, replies: Replies, message: Mapping[str, Tree]) -> dict[str, list[Words] | str]:
        """The words of every client that replies, or why it sends none."""
        names = [*self._codec.steps[step].sends]
        found: dict[str, list[Words] | str] = {}
        for client, *parts in zip(replies.clients, *(replies.each(name) for name in names), strict=True):
            reply = dict(zip(names, parts, strict=True))
            try:
                found[self.names[client]] = self._codec.encode(step, reply, message, int(self.sizes[client]))
            except ValueError as error:
                found[self.names[client]] = str(error)
        return found

    def _send(self, stage: str, asks: Mapping[str, Ask]) -> dict[str, Answer]:
        words = self._words() if stage == "mask" else {}
        answers: dict[str, Answer] = {}
        for name, ask in asks.items():
            site = self._sites[name]
            if stage == "mask":
                own = words.get(name, "it does not answer")
                answers[name] = own if isinstance(own, str) else {"words": site.mask(ask, self._task, own, self._whole)}
                self._sent += 0 if isinstance(own, str) else sum(part.nbytes for part in own)
            elif stage != "unmask" or not self._left(name):
                answers[name] = site.answer(ask)
        return answers

    def _left(self, name: str) -> bool:
        engine = self._engine
        return isinstance(engine, Faulty) and engine.leaves_early(self._places[name], self._round)
