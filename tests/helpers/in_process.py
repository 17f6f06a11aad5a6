"""A grid without a network: it hands every message to a ClientApp in this process, as bytes that are kept."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'comfedl[flower]'")

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

import comfedl as cf
from comfedl.flower.apps import client_app

Change = Callable[[Message, Message], Message | None]


class InProcess(Grid):
    """Sites by node number. ``tamper`` may change a reply, or swallow it with None.

    ``bytes`` is all that passed, ``sent`` what went to the sites.
    """

    def __init__(self, sites: Mapping[int, tuple[ClientApp, Mapping[str, Any]]]) -> None:
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
        self.sites = dict(sites)
        self.tamper: dict[int, Change] = {}
        self.seen: list[tuple[int, str]] = []
        self.bytes: list[bytes] = []
        self.sent: list[bytes] = []
        self._replies: dict[str, Message] = {}

    def set_run(self, run: Any) -> None:
        raise NotImplementedError

    @property
    def run(self) -> Any:
        raise NotImplementedError

    def create_message(self, *arguments: Any, **more: Any) -> Message:
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        return random.sample(sorted(self.sites), len(self.sites))

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        names = []
        for message in messages:
            node, name = message.metadata.dst_node_id, f"message {len(self.seen)}"
            message.metadata.__dict__["_message_id"] = name
            self.seen.append((node, message.metadata.group_id))
            names.append(name)
            app, settings = self.sites[node]
            context = Context(1, node, dict(settings), RecordDict(), {})
            carried = self._carried(message)
            self.sent.append(self.bytes[-1])
            reply: Message | None = app(carried, context)
            if node in self.tamper and reply is not None:
                reply = self.tamper[node](message, reply)
            if reply is not None:
                self._replies[name] = self._carried(reply)
        return names

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        found = [self._replies.pop(name) for name in message_ids if name in self._replies]
        return random.sample(found, len(found))

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        return self.pull_messages(self.push_messages(messages))

    def _carried(self, message: Message) -> Message:
        """A message after it was nothing but bytes, as Flower writes them."""
        self.bytes.append(message_to_proto(message).SerializeToString())
        return message_from_proto(ProtoMessage.FromString(self.bytes[-1]))


def alone(fed: cf.FederatedData, name: str) -> cf.FederatedData:
    """The data of one client."""
    splits = {split: fed.split(split, instead="none") for split in ("train", "validation", "test", "outer")}
    return cf.FederatedData(**{split: {name: part[name]} for split, part in splits.items() if part is not None})


def grid_of(fed: cf.FederatedData, state: Path, mods: Sequence[Any] = ()) -> InProcess:
    """A grid with a site for every client, under node numbers in no order."""
    app = client_app(lambda node: alone(fed, node["site"]), state, mods)
    return InProcess({(7919 * (k + 3)) % 101: (app, {"site": name}) for k, name in enumerate(fed.names)})
