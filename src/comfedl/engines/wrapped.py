"""An engine that runs another one's clients; a subclass changes what it needs to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from comfedl.core.protocol import Engine, Replies, T
from comfedl.utils.tree import Tree


class Wrapped(Engine):
    """Hands everything on to the engine within."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.names, self.sizes, self.held_out = engine.names, engine.sizes, engine.held_out
        self.is_leader, self.defers_replies = engine.is_leader, engine.defers_replies
        self.simulates_faults = engine.simulates_faults

    def run(self, step: str, clients: Sequence[int], message: dict[str, Tree], round: int) -> Replies:
        return self._engine.run(step, clients, message, round)

    def run_deferred(
        self, step: str, clients: Sequence[int], message: dict[str, Tree], round: int
    ) -> Callable[[], Replies]:
        return self._engine.run_deferred(step, clients, message, round)

    def states(self) -> dict[int, Tree]:
        return self._engine.states()

    def commit_round(self) -> None:
        self._engine.commit_round()

    def capture_states(self) -> Callable[[], dict[int, Tree]]:
        return self._engine.capture_states()

    def restore(self, states: Mapping[int, Tree]) -> None:
        self._engine.restore(states)

    def can_save(self, error: BaseException) -> bool:
        return self._engine.can_save(error)

    def broadcast(self, make: Callable[[], T]) -> T:
        return self._engine.broadcast(make)

    def finish(self, error: BaseException | None) -> None:
        self._engine.finish(error)
