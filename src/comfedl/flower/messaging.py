"""Sends messages to sites and collects the replies; a site without a usable reply gets a reason instead."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid
from torch import Tensor

from comfedl.flower import serialization
from comfedl.utils.errors import MalformedMessage

FIRST_POLL, SLOWEST_POLL = 0.2, 0.5  # seconds between polls for replies; Flower's own loop waits three

Answer = tuple[dict[str, Any], dict[str, Tensor]]
Check = Callable[[int, RecordDict, RecordDict, Mapping[str, Any]], str | None]
"""Why a node's reply to a question is not to be trusted, given also its decoded text; None if it is."""
# Flower's error codes, in words.
EXPIRED = 3
REASONS = {5: "its SuperNode is gone", 8: "its process died during the step"}


def exchange(
    grid: Grid,
    contents: Mapping[int, RecordDict],
    kind: str,
    group: str,
    deadline: float,
    limits: Mapping[int, int],
    check: Check | None = None,
) -> dict[int, Answer | MalformedMessage | str]:
    """Send each node its content and wait for the replies: the decoded answer of each node, or why there is none.

    ``limits`` is the most bytes that each node's reply may have; one that cannot be read is a ``MalformedMessage``. A
    reply that ``check`` does not trust counts as none: it may not be the node's own.
    Replies are matched by message id, since Flower's error replies do not name their node.
    """
    nodes = list(contents)
    messages = [Message(contents[node], node, kind, ttl=deadline, group_id=group) for node in nodes]
    sent = list(grid.push_messages(messages)) if messages else []
    answers: dict[int, Answer | MalformedMessage | str] = {}
    timed_out = f"no answer within {deadline:g} seconds"
    waiting = {message: node for message, node in zip(sent, nodes, strict=False) if message}
    for reply in replies_within(grid, waiting, deadline):
        node = waiting.pop(reply.metadata.reply_to_message_id, None)
        if node is not None:
            expired = reply.has_error() and reply.error.code == EXPIRED
            answers[node] = timed_out if expired else _answer(reply, limits[node])
            answer = answers[node]
            if check is not None and not reply.has_error() and not isinstance(answer, str):
                # One that cannot be read is held against the site only if the site has signed it.
                body = answer[0] if isinstance(answer, tuple) else {}
                answers[node] = check(node, contents[node], reply.content, body) or answer
    for node in nodes:
        if node not in answers:
            answers[node] = timed_out if node in waiting.values() else "the message could not be sent"
    return answers


def replies_within(grid: Grid, messages: Iterable[str], seconds: float) -> Iterator[Message]:
    """The replies to the messages of these ids as they come, as long as some are missing and there is time."""
    waiting, end, pause = set(messages), time.monotonic() + seconds, FIRST_POLL
    while waiting:
        for reply in grid.pull_messages(sorted(waiting)):
            waiting.discard(reply.metadata.reply_to_message_id)
            yield reply
        if not waiting or time.monotonic() >= end:
            break
        time.sleep(pause)
        pause = min(1.1 * pause, SLOWEST_POLL)


class PromptGrid:
    """A grid whose ``send_and_receive`` does not sleep for three seconds between its looks for replies."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid

    def __getattr__(self, name: str) -> Any:
        return getattr(self._grid, name)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Send messages and wait for the replies; those that are there when the time is over."""
        sent = [name for name in self._grid.push_messages(messages) if name]
        return list(replies_within(self._grid, sent, math.inf if timeout is None else timeout))


def _answer(reply: Message, limit: int) -> Answer | MalformedMessage | str:
    if reply.has_error():
        code, lines = reply.error.code, (reply.error.reason or "").strip().splitlines()
        last = f" ({serialization.shortened(lines[-1])})" if lines else ""
        return REASONS.get(code, f"Flower reports error {code}{last}")
    try:
        return serialization.decode(reply.content, limit)
    except MalformedMessage as error:
        return error
