"""Sites whose replies the server knows only as sums: the protocol of secure aggregation over Flower's messages.

An exchange takes two messages in most rounds: "mask" carries the steps, those of an evaluation and the next round's
training together, and "unmask" carries the keys for the next exchange.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from comfedl.core.sums import WHOLE
from comfedl.engines.sums import Codec
from comfedl.flower import serialization
from comfedl.flower.engine import Request, Sites, packed
from comfedl.flower.messaging import exchange
from comfedl.flower.reply_format import MARGIN
from comfedl.flower.secure_client import task_of
from comfedl.secure.ring import Words
from comfedl.secure.server import Answer, SecureServer, check_whole
from comfedl.secure.site import Ask
from comfedl.utils.errors import MalformedMessage


class SecureSites(Sites):
    """Sites under secure aggregation; ``codec`` is how they write what is summed."""

    def __init__(self, *arguments: Any, codec: Codec, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._codec = codec
        self._server = SecureServer(codec.settings, self._post)
        self._places = {name: place for place, name in enumerate(self.names)}
        self._group: Sequence[Request] = ()
        self._parts: list[dict[str, Any]] = []
        self._tensors: Any = None
        self._words = 0  # bytes of a site's masked numbers
        self._nodes: Mapping[str, int] = {}

    def _send(self, requests: Sequence[Request]) -> None:
        """One exchange for all requests to the same sites."""
        alike = all({*request.clients} == {*requests[0].clients} for request in requests)
        for group in [requests] if alike else [[request] for request in requests]:
            self._sum(group)

    def _sum(self, group: Sequence[Request]) -> None:
        clients = sorted({*group[0].clients})
        self._codec.settings.check_sites(len(clients))
        self._nodes = self._registry.nodes()
        names = [self.names[client] for client in clients if self.names[client] in self._nodes]
        absent = {self.names[client]: "it is not connected" for client in clients if self.names[client] not in names}
        what, whole = f"Round {group[-1].round}", any(WHOLE in request.message for request in group)
        if whole:
            check_whole([self.names[client] for client in clients], names, what, absent)
        self._group = group
        self._parts, self._tensors = packed(group)
        likes = [self._codec.like(request.step, request.message["model"]) for request in group]
        like = [part for each in likes for part in each]
        self._words = sum(kind.itemsize * length for kind, length in like)
        sent = {"config": self._config, "run": self._run, "sites": len(self.names), "asks": self._parts}
        _, tensors = serialization.decode(serialization.encode({}, self._tensors))
        found = self._server.sum(names, what, task_of(sent, tensors), like, whole)
        absent |= found.absent
        words, start = found.words, 0
        who = [self._places[name] for name in found.sites]
        for request, each in zip(group, likes, strict=True):
            own, start = words[start : start + len(each)], start + len(each)
            size = sum(kind.itemsize * length for kind, length in each) * len(who)
            request.summed = self._codec.decode(request.step, own, request.message, who, size)
            request.replies = {client: {} for client in who}
            request.absent = {self._places[name]: reason for name, reason in absent.items()}
            request.done = True
            self._report(request)

    def _post(self, stage: str, asks: Mapping[str, Ask]) -> dict[str, Answer]:
        """Send sites their asks of a stage; the one for masked numbers carries the steps."""
        contents, limits = {}, {}
        for name, ask in asks.items():
            body: dict[str, Any] = {**self._registry.fresh(), "run": self._run, "secure": ask}
            if stage == "mask":
                body |= self._body(self._places[name], self._group, self._parts) | {"sites": len(self.names)}
            contents[self._nodes[name]] = serialization.encode(body, self._tensors if stage == "mask" else None)
            limits[self._nodes[name]] = MARGIN + self._words + 1024 * len(self.names)
        round = f"round {self._group[-1].round}"
        answers = exchange(
            self._grid, contents, "train.step", round, self._deadline, limits, self._registry.check_reply
        )
        return {name: self._answer(stage, name, answers[self._nodes[name]]) for name in asks}

    def _answer(self, stage: str, name: str, answer: Any) -> Answer:
        if not isinstance(answer, tuple):
            return str(answer)
        body, tensors = answer
        if "error" in body or not isinstance(body.get("secure"), dict):
            return serialization.shortened(body.get("error", "its answer is not as the protocol has it"))
        if stage != "mask":
            found: Ask = body["secure"]
            return found
        try:
            words = [_words(tensors[part]) for part in body["words"]]
            for request, notes in zip(self._group, body["answers"], strict=True):
                self._note(self._places[name], request, notes)
        except Exception as error:  # a site may send anything
            return str(MalformedMessage(f"it cannot be read ({type(error).__name__})"))
        return {"words": words}


def _words(tensor: Tensor) -> Words:
    """The words of a tensor that holds them with a sign."""
    words = tensor.numpy()
    return words.view(np.dtype(f"<u{words.itemsize}"))
