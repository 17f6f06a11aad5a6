"""The embedded engine: all clients live in this process."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch
from torch import Tensor

from comfedl.core.learner import Learner
from comfedl.core.protocol import Engine, Outcome, Replies, Step, check_finite
from comfedl.data.federated import FederatedData
from comfedl.engines.client_states import States
from comfedl.engines.kernels import accelerate
from comfedl.engines.replies import LocalReplies, Part, StackedReplies, certain, defined, repeated, stacked, unstacked
from comfedl.engines.sampling import Drawn, Given, Sizes, alike, portions
from comfedl.engines.stacked import Stacked
from comfedl.engines.thread_pool import ThreadPool
from comfedl.utils import checks, rng, tree
from comfedl.utils.errors import ConfigError, Diverged
from comfedl.utils.tree import Tree

logger = logging.getLogger("comfedl")

__all__ = ["Embedded", "LocalReplies"]

# How many clients at most run at once: more leave the processor's cache and gain nothing.
MOST = 50
# How often a client's parameters and batches are in memory at once: models before and after, gradients, activations.
COPIES = 6
# Up to how many clients it is kept what each of them gives for a step: for more it takes memory, and little time.
KEPT = 10_000


class Embedded(Engine):
    """Runs client steps, many clients at once where that is faster; a client's state is kept here.

    Args:
        state: what a client starts with; the engine shares it between clients until they change it.
        vectorize: "stack" runs dense models of many clients as batched matrix products, "vmap" any model by
            torch.func.vmap, "serial" one client after another; "auto" stacks where it can. The numbers are the same,
            to rounding.
        memory_mb: how much memory the clients that run at once may take, roughly.
        workers: how many threads at most share the clients out; "auto" is as many as torch would use. The numbers are
            the same.
        keep_memory: have the C library keep up to ``memory_mb`` of freed memory for the next round, in large pages if
            the system has them. This is a setting of the whole process (mallopt, madvise); False leaves it alone.
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
        workers: int | str = "auto",
        keep_memory: bool = True,
    ) -> None:
        checks.positive("memory_mb", memory_mb)
        if workers != "auto":
            checks.at_least("workers", workers, 1)
        self.names, self.sizes = data.names, data.train.sizes
        self._data, self._steps, self._seed, self._memory = data, steps, seed, memory_mb * 1e6
        keep_bytes = int(memory_mb * 1e6) if keep_memory else 0
        self._one, self._many, reason, self._thread_safe = accelerate(learner, data, steps, vectorize, keep_bytes)
        logger.info("Clients run %s.", reason)
        threads = torch.get_num_threads() if workers == "auto" else int(workers)
        self._threads = ThreadPool(threads if self._thread_safe else 1)
        self._learners = {0: (self._one, self._many)}  # by the thread that uses them: a module is not for two at a time
        self._initial = state
        self._states = States()
        self._lock = threading.Lock()  # of the states, which the threads put away
        self._given: dict[str, Given] = {}  # of each step, for those who were asked last
        self._scratch: dict[int, Tree] = {}
        self._round, self._bytes = 0, 0

    def run(self, step: str, clients: Sequence[int], message: dict[str, Tree], round: int) -> Replies:
        self._bytes = max(self._bytes, tree.nbytes(message))
        if round != self._round:
            self._round, self._scratch = round, {}
        return self._run(step, clients, message, round)

    def held(self) -> dict[int, Tree]:
        """What clients hold for the rest of the round."""
        return self._scratch

    def hold(self, round: int, scratch: Mapping[int, Tree]) -> None:
        """Have clients hold this for the rest of a round, where its steps are not all done by one engine."""
        self._round, self._scratch = round, dict(scratch)

    def states(self) -> dict[int, Tree]:
        return self._states.settled()

    def settle(self) -> None:
        self._states.settle()

    def restore(self, states: Mapping[int, Tree]) -> None:
        self._states.restore(states)

    def _run(self, step: str, clients: Sequence[int], message: dict[str, Tree], round: int) -> Replies:
        named = self._steps[step]
        asked = list(dict.fromkeys(clients))
        given = self._given.get(step)
        if given is None or given.asked != asked:
            given = Given(self._data, named.draws, asked)
            if len(asked) <= KEPT:
                self._given[step] = given
        drawn = Drawn(given, step, self._seed, round)
        received = self._one.to_layout(message)
        chunks = list(self._chunks(named, given))
        if len(chunks) > 1:
            self._equip()

        def outcome_of(worker: int, ks: Sizes) -> Outcome:
            one, many = self._learners[worker]
            noise = partial(self._noise, named.noise or step, round)
            if len(ks) > 1:
                assert many is not None
                outcome = self._together(many, named, drawn, ks, message, noise)
            else:
                outcome = self._alone(one, named, drawn, int(ks[0]), received, noise)
            if outcome.state is not None:  # put away at once, lest all clients' are here twice
                with self._lock:
                    self._states.put(drawn.clients[ks].tolist(), outcome.state)
            return outcome._replace(state=None)

        parts: list[Part] = []
        failed: dict[int, Diverged] = {}  # by the client's place among those that were asked
        with _threads_for(self._bytes, self._threads.workers > 1 and len(chunks) > 1):
            outcomes = self._threads.run(step, outcome_of, chunks)
        for ks, outcome in zip(chunks, outcomes, strict=True):
            who: list[int] = drawn.clients[ks].tolist()
            failed |= self._failed(round, ks.tolist(), who, outcome._replace(reply=certain(outcome.reply)))
            parts += defined(Part(who, outcome.reply, finite=True))  # or the run ends here
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

    def _equip(self) -> None:
        """Learners for every thread, made while none is in use: inside vmap a module cannot be copied."""
        one, many = self._learners[0]
        for worker in range(len(self._learners), self._threads.workers):
            self._learners[worker] = one.copy(), None if many is None else many.copy()

    def _noise(self, purpose: str, round: int, client: int) -> int:
        """The seed of a client's dropout and the like."""
        return rng.key(self._seed, f"{purpose}/torch", round, self.names[client]) >> 1

    def _chunks(self, named: Step, given: Given) -> Iterator[Sizes]:
        """The clients that run at once, as places in ``given``."""
        if self._many is None or not named.elementwise:
            yield from np.arange(len(given.clients))[:, None]
            return
        stateless = [not self._has_state(i) for i in given.asked]
        most = int(self._memory / (COPIES * (self._bytes + given.nbytes)))
        for ks in alike(given, stateless, self._many.ragged):
            for portion in portions(given.whole[ks], max(1, min(MOST, most))):
                yield ks[portion]

    def _alone(
        self,
        learner: Learner,
        named: Step,
        drawn: Drawn,
        k: int,
        message: dict[str, Tree],
        noise: Callable[[int], int],
    ) -> Outcome:
        """One client's step."""
        client = int(drawn.clients[k])
        state = self._state(client)
        state = None if state is None else tree.map(torch.clone, state)  # it may be a view of what is kept
        state = learner.to_layout(state)
        if self._thread_safe:
            outcome = named.run(learner, message, state, drawn.of_one(k))
        else:
            # Dropout and the like draw from torch's own generator: it is keyed too, and given back as it was.
            with torch.random.fork_rng(devices=self._devices()):
                # Where only the CPU's generator is drawn from, torch.manual_seed would be ten times the work.
                seed = noise(client)
                torch.manual_seed(seed) if self._devices() else torch.default_generator.manual_seed(seed)
                outcome = named.run(learner, message, state, drawn.of_one(k))
        reply, state, scratch = map(learner.from_layout, (outcome.reply, outcome.state, outcome.scratch))
        return outcome._replace(reply=reply, state=state, scratch=scratch)

    def _together(
        self,
        learner: Stacked,
        named: Step,
        drawn: Drawn,
        ks: Sizes,
        message: dict[str, Tree],
        noise: Callable[[int], int],
    ) -> Outcome:
        """The step of many clients, their tensors stacked."""
        count = len(ks)
        received = {
            # A lone number is the same for all, and stays one.
            name: part if isinstance(part, Tensor) and part.ndim == 0 else repeated(part, count)
            for name, part in message.items()
        }
        who: list[int] = drawn.clients[ks].tolist()
        states = [self._state(i) for i in who]
        state = None if states[0] is None else stacked(states)
        learner.seed(noise, who)
        try:
            outcome = named.run(learner, received, state, drawn.of_many(ks))
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
def _threads_for(size: int, shared: bool) -> Iterator[None]:
    """One thread a client for a small model or where threads share clients out, torch's own choice otherwise."""
    threads = torch.get_num_threads()
    if threads == 1 or (size > SMALL and not shared):
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
