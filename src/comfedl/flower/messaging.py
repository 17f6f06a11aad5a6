"""Messages out, replies in: whoever does not answer in time, or answers with an error, is named with the reason."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid
from torch import Tensor

from comfedl.flower import serialization

POLL, SELDOM = 0.2, 1.0  # seconds between two looks for replies, at first and later; Flower's own loop sleeps three

Answer = tuple[dict[str, Any], dict[str, Tensor]]
# Flower's errors by their numbers, as a site's owner would say it.
TOO_LATE = 3
REASONS = {5: "its SuperNode is gone", 8: "its process died in the middle of the work"}


def exchange(
    grid: Grid, contents: Mapping[int, RecordDict], kind: str, group: str, deadline: float
) -> dict[int, Answer | str]:
    """Send each node its content and wait for the replies; what is not a usable reply is a reason instead.

    Replies are matched by the message that they answer, since Flower's own errors do not say which node they are of.
    """
    nodes = list(contents)
    messages = [Message(contents[node], node, kind, ttl=deadline, group_id=group) for node in nodes]
    sent = list(grid.push_messages(messages)) if messages else []
    found: dict[int, Answer | str] = {}
    silent = f"no answer came in {deadline:g} seconds"
    waiting = {name: node for name, node in zip(sent, nodes, strict=False) if name}
    until, pause = time.monotonic() + deadline, POLL
    while waiting:
        for reply in grid.pull_messages(list(waiting)):
            node = waiting.pop(reply.metadata.reply_to_message_id, None)
            if node is not None:
                late = reply.has_error() and reply.error.code == TOO_LATE
                found[node] = silent if late else _read(reply)
        if not waiting or time.monotonic() >= until:
            break
        time.sleep(pause)
        pause = min(1.1 * pause, SELDOM)
    for node in nodes:
        if node not in found:
            found[node] = silent if node in waiting.values() else "the message could not be sent"
    return found


def _read(reply: Message) -> Answer | str:
    if reply.has_error():
        code, said = reply.error.code, (reply.error.reason or "").strip().splitlines()
        return REASONS.get(code, f"Flower reports error {code}" + (f" ({said[-1][:200]})" if said else ""))
    try:
        return serialization.opened(reply.content)
    except serialization.Unreadable as error:
        return f"its reply is refused: {error}"
