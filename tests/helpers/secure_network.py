"""Sites of secure aggregation and their server, with a network that loses what it is told to."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping

import numpy as np

from comfedl.secure.ring import Words, total
from comfedl.secure.server import Answer, SecureServer
from comfedl.secure.settings import SecureAggregation
from comfedl.secure.site import Ask, Refused, SecureSite

TASK = b"the task"
Change = Callable[[str, str, Ask], Answer]


class Network:
    """Sites that are nothing but JSON between two messages; ``lost`` maps a stage to the sites that miss it."""

    def __init__(self, count: int, settings: SecureAggregation | None = None, length: int = 6) -> None:
        self.names = [f"site {k}" for k in range(count)]
        generator = np.random.default_rng(count)
        self.words = {
            name: [
                generator.integers(0, 2**64, size=length, dtype=np.uint64),
                generator.integers(0, 2**32, size=3, dtype=np.uint32),
            ]
            for name in self.names
        }
        self.like = [(np.dtype("<u8"), length), (np.dtype("<u4"), 3)]
        self.stored = {name: json.dumps(SecureSite(name).state) for name in self.names}
        self.lost: Mapping[str, Collection[str]] = {}
        self.change: Change = lambda stage, name, answer: answer
        self.alter_ask: Change = lambda stage, name, ask: ask
        self.stages: list[str] = []
        self.whole = False
        self.masked: dict[str, list[Words]] = {}
        self.server = SecureServer(settings or SecureAggregation(), self.send)

    def site(self, name: str) -> SecureSite:
        return SecureSite(name, json.loads(self.stored[name]))

    def send(self, stage: str, asks: Mapping[str, Ask]) -> dict[str, Answer]:
        self.stages.append(stage)
        answers: dict[str, Answer] = {}
        for name, ask in asks.items():
            if name in self.lost.get(stage, ()):
                continue
            given, site = json.loads(json.dumps(self.alter_ask(stage, name, ask))), self.site(name)
            try:
                if stage == "mask":
                    self.masked[name] = site.mask(given, TASK, self.words[name], self.whole)
                    answer: Answer = {"words": self.masked[name]}
                else:
                    answer = json.loads(json.dumps(site.answer(given)))
            except Refused as error:
                answer = str(error)
            self.stored[name] = json.dumps(site.state)
            answers[name] = self.change(stage, name, answer) if isinstance(answer, dict) else answer
        return answers

    def sum(self, whole: bool = False) -> tuple[list[str], bool]:
        """Who is in the sum, and whether it is the plain one."""
        self.whole = whole
        found = self.server.sum(self.names, "Round 1", TASK, self.like, whole)
        plain = [total(parts) for parts in zip(*(self.words[name] for name in found.sites), strict=True)]
        return found.sites, all(np.array_equal(*pair) for pair in zip(found.words, plain, strict=True))
