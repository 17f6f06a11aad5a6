"""The embedded engine: all clients live in this process."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from comfedl import checks, rng, tree
from comfedl.data.federated import FederatedData
from comfedl.engines.batches import Drawn, Sizes, alike, portions
from comfedl.engines.choice import choose
from comfedl.engines.convolution import ChannelsLast, laid_out, plain
from comfedl.engines.replies import LocalReplies, Part, StackedReplies, stacked, unstacked
from comfedl.engines.states import States
from comfedl.errors import ConfigError
from comfedl.problem import Learner
from comfedl.step import Diverged, Engine, Outcome, Replies, Step, check_finite
from comfedl.tree import Tree

logger = logging.getLogger("comfedl")

__all__ = ["Embedded", "LocalReplies"]

# How many clients at most run at once: more leave the processor's cache and gain nothing.
MOST = 25
# How often a client's parameters and batches are in memory at once: models before and after, gradients, activations.
COPIES = 6


class Embedded(Engine):
    """Runs client steps, many clients at once where that is faster; a client's state is kept here.

    Args:
        state: what a client starts with; the engine shares it between clients until they change it.
        vectorize: "stack" runs dense models of many clients as batched matrix products, "vmap" any model by
            torch.func.vmap, "serial" one client after another; "auto" stacks where it can. The numbers are the same,
            to rounding.
        memory_mb: how much memory the clients that run at once may take, roughly.
    """

    def __init__(
        self,
        data: FederatedData,
        learner: Learner,
        steps: Mapping[str, Step],
        seed: int,
        state: Tree = None,
        vectorize: str = "auto",
        memory_mb: float = 512,
    ) -> None:
        checks.positive("memory_mb", memory_mb)
        self.names, self.sizes = data.names, data.train.sizes
        self._data, self._steps, self._seed, self._memory = data, steps, seed, memory_mb * 1e6
        self._one, self._many, why = choose(vectorize, learner, data, steps.values())
        logger.info("Clients run %s.", why)
        self._initial = state
        self._states = States()
        self._scratch: dict[int, Tree] = {}
        self._round, self._bytes = 0, 0

    def run(self, step: str, clients: Sequence[int], message: dict[str, Tree], round: int) -> Replies:
        self._bytes = max(self._bytes, tree.nbytes(message))
        if round != self._round:
            self._round, self._scratch = round, {}
        # Dropout and the like draw from torch's own generator: it is keyed too, and given back as it was.
        with _threads_for(self._bytes), torch.random.fork_rng(devices=self._devices()):
            return self._run(step, clients, message, round)

    def states(self) -> dict[int, Tree]:
        return self._states.settled()

    def settle(self) -> None:
        self._states.settle()

    def restore(self, states: Mapping[int, Tree]) -> None:
        self._states.restore(states)

    def _run(self, step: str, clients: Sequence[int], message: dict[str, Tree], round: int) -> Replies:
        named = self._steps[step]
        drawn = Drawn(self._data, named.draws, step, list(dict.fromkeys(clients)), self._seed, round)
        received = laid_out(message) if isinstance(self._one, ChannelsLast) else message
        parts: list[Part] = []
        failed: dict[int, Diverged] = {}  # by the client's place among those that were asked
        for ks in self._chunks(named, drawn, message):
            who: list[int] = drawn.clients[ks].tolist()
            if len(who) > 1:
                outcome = self._together(named, drawn, ks, message)
            else:
                noise = rng.key(self._seed, f"{named.noise or step}/torch", round, self.names[who[0]]) >> 1
                outcome = self._alone(named, drawn, int(ks[0]), received, noise)
            failed |= self._failed(round, ks.tolist(), who, outcome)
            parts.append(Part(who, outcome.reply))
            if outcome.state is not None:
                self._states.put(who, outcome.state)
            if outcome.scratch is not None:
                _keep(self._scratch, who, outcome.scratch)
        if failed:
            raise failed[min(failed)]
        if all(len(part.clients) == 1 for part in parts):
            replies = {part.clients[0]: part.reply for part in parts}
            return LocalReplies(clients, [replies[i] for i in clients])
        return StackedReplies(
            clients, [part if len(part.clients) > 1 else Part(part.clients, stacked([part.reply])) for part in parts]
        )

    def _chunks(self, named: Step, drawn: Drawn, message: Tree) -> Iterator[Sizes]:
        """The clients that run at once, as places in ``drawn``."""
        if self._many is None or not named.elementwise:
            yield from np.arange(len(drawn.clients))[:, None]
            return
        stateless = [not self._has_state(i) for i in drawn.clients.tolist()]
        most = int(self._memory / (COPIES * (self._bytes + drawn.nbytes())))
        for ks in alike(drawn, stateless, self._many.ragged):
            for portion in portions(drawn.whole[ks], max(1, min(MOST, most))):
                yield ks[portion]

    def _alone(self, named: Step, drawn: Drawn, k: int, message: dict[str, Tree], noise: int) -> Outcome:
        """One client's step."""
        # Where only the CPU's generator is drawn from, torch.manual_seed would be ten times the work.
        torch.manual_seed(noise) if self._devices() else torch.default_generator.manual_seed(noise)
        state = self._state(int(drawn.clients[k]))
        state = None if state is None else tree.map(torch.clone, state)  # it may be a view of what is kept
        images = isinstance(self._one, ChannelsLast)
        outcome = named.run(self._one, message, laid_out(state) if images else state, drawn.of_one(k))
        if not images:
            return outcome
        return outcome._replace(reply=plain(outcome.reply), state=plain(outcome.state), scratch=plain(outcome.scratch))

    def _together(self, named: Step, drawn: Drawn, ks: Sizes, message: dict[str, Tree]) -> Outcome:
        """The step of many clients, their tensors stacked."""
        assert self._many is not None
        count = len(ks)
        received = {
            # A lone number is the same for all, and stays one.
            name: part if isinstance(part, Tensor) and part.ndim == 0 else stacked([part] * count)
            for name, part in message.items()
        }
        states = [self._state(i) for i in drawn.clients[ks].tolist()]
        state = None if states[0] is None else stacked(states)
        try:
            outcome = named.run(self._many, received, state, drawn.of_many(ks))
        except RuntimeError as error:
            if "vmap" not in str(error):
                raise
            raise ConfigError(
                'The model or the loss cannot be run for many clients at once; use vectorize = "serial". '
                f"torch says: {error}"
            ) from error
        reply = tree.map(lambda leaf: leaf.expand(count) if leaf.ndim == 0 else leaf, outcome.reply)
        return outcome._replace(reply=reply)

    def _failed(self, round: int, ks: list[int], who: list[int], outcome: Outcome) -> dict[int, Diverged]:
        """Which of these clients have left the finite numbers."""
        if tree.finite([dict(outcome.watched), outcome.reply]):
            return {}
        replies = [outcome.reply] if len(who) == 1 else unstacked(outcome.reply, len(who))
        failed = {}
        for place, (k, i) in enumerate(zip(ks, who, strict=True)):
            watched = outcome.watched
            if len(who) > 1:
                watched = {name: values[..., place] for name, values in watched.items()}
            try:
                check_finite(round, self.names[i], Outcome(replies[place], watched=watched))
            except Diverged as error:
                failed[k] = error
        return failed

    def _state(self, client: int) -> Tree:
        """What a client's next step gets: what it holds for this round, or what it keeps."""
        if client in self._scratch:
            return self._scratch[client]
        return self._states.view(client) if client in self._states else self._initial

    def _has_state(self, client: int) -> bool:
        return self._initial is not None or client in self._scratch or client in self._states

    def _devices(self) -> list[torch.device]:
        """The accelerator that the clients are on, if any: its generator is kept apart as well."""
        device = self._data.train.x.device
        return [device] if device.type == "cuda" else []


def _keep(states: dict[int, Tree], who: list[int], state: Tree) -> None:
    """Keep what each client holds for the rest of the round."""
    if len(who) == 1:
        states[who[0]] = state
        return
    # Each gets tensors of its own, lest one client's state holds on to all others'; but they share what is shared.
    for i, own in zip(who, unstacked(state, len(who)), strict=True):
        states[i] = tree.map(lambda leaf, all: leaf.clone() if all.stride(0) else leaf, own, state)


# Below this many bytes a model's operations are too short to share: a second thread only waits for the first.
SMALL = 400_000


@contextmanager
def _threads_for(size: int) -> Iterator[None]:
    """One thread for a small model, torch's own choice for a large one."""
    threads = torch.get_num_threads()
    if threads == 1 or size > SMALL:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
