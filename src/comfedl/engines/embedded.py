"""The embedded engine: all clients run in this process."""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch
from torch import Tensor

from comfedl.core.learner import Batch, Learner
from comfedl.core.protocol import Engine, Outcome, Replies, Step, check_finite
from comfedl.data.federated import FederatedData
from comfedl.data.transform import TransformFunction
from comfedl.engines.batching import IntArray, StepBatches, StepPlan, chunk_slices, group_clients
from comfedl.engines.client_states import ClientStates
from comfedl.engines.kernels import accelerate
from comfedl.engines.purity import trace
from comfedl.engines.read_ahead import ReadAhead
from comfedl.engines.replies import (
    LocalReplies,
    ReplyPart,
    StackedReplies,
    drop_undefined_scores,
    expand_tree,
    required_parts,
    stack_trees,
    unstack_tree,
)
from comfedl.engines.stacked import Stacked
from comfedl.engines.thread_pool import Chunk, ThreadPool
from comfedl.utils import checks, generators, rng, tree
from comfedl.utils.errors import ConfigError, Diverged, MetricFailed
from comfedl.utils.tree import Tree

Drawn = Mapping[str, Sequence[Batch]]
"""The batches of a client, or of several that are stacked, by the name of the draw."""

logger = logging.getLogger("comfedl")

__all__ = ["Embedded", "LocalReplies"]

# Clients that run at once, at most: more would not fit the CPU cache, and are no faster.
MAX_STACKED = 50
# Copies of a client's parameters and batches in memory at once: models before and after, gradients, activations.
COPIES = 6
# A step's plan is cached for up to this many clients; for more, that saves little time and takes much memory.
MAX_CACHED = 10_000


class Embedded(Engine):
    """Runs client steps, many clients at once where that is faster, and stores the clients' states.

    Args:
        state: every client's initial state; it is shared until a client changes it.
        vectorize: "stack" runs dense models of many clients as batched matrix products, "vmap" any model with
            torch.func.vmap, "serial" one client after another; "auto" stacks if it can. The results agree up to
            rounding.
        memory_mb: roughly how much memory the clients that run at once may use.
        workers: the largest number of threads to run clients on; "auto" is torch's number of threads. The results are
            the same.
        keep_memory: let the C library keep up to ``memory_mb`` of freed memory for the next round, in large pages if
            available. This affects the whole process (mallopt, madvise); False leaves it alone.
        transforms: functions (x, generator) that change training batches, one after another.
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
        *,
        transforms: Sequence[TransformFunction] = (),
    ) -> None:
        checks.positive("memory_mb", memory_mb)
        if workers != "auto":
            checks.at_least("workers", workers, 1)
        self.names, self.sizes = data.names, data.train.sizes
        held_out = [split.sizes for split in (data.validation, data.test) if split is not None]
        self.held_out = np.sum([np.zeros_like(self.sizes), *held_out], axis=0)
        self._data, self._steps, self._seed, self._memory = data, steps, seed, memory_mb * 1e6
        keep_bytes = int(memory_mb * 1e6) if keep_memory else 0
        self._one, self._many, reason, self._thread_safe = accelerate(learner, data, steps, vectorize, keep_bytes)
        logger.info("Clients run %s.", reason)
        threads = torch.get_num_threads() if workers == "auto" else int(workers)
        self._threads = ThreadPool(threads if self._thread_safe else 1)
        self._pure: dict[str, bool] = {}  # steps whose clients may run on several threads, if that had to be seen
        self._learners = {0: (self._one, self._many)}  # one pair per thread: modules are not thread-safe
        self._initial, self._transforms = state, transforms
        self._states = ClientStates()
        self._lock = threading.Lock()  # guards the states, which worker threads write
        self._plans: dict[str, StepPlan] = {}  # of each step, for the clients asked last
        self._scratch: dict[int, Tree] = {}
        self._round, self._bytes = 0, 0

    def run(self, step: str, clients: Sequence[int], message: dict[str, Tree], round: int) -> Replies:
        self._bytes = max(self._bytes, tree.nbytes(message))
        if round != self._round:
            self._round, self._scratch = round, {}
        return self._run(step, clients, message, round)

    def held(self) -> dict[int, Tree]:
        """The clients' scratch states, which last until the end of the round."""
        return self._scratch

    def hold(self, round: int, scratch: Mapping[int, Tree]) -> None:
        """Set the clients' scratch states, if another engine ran the earlier steps of the round."""
        self._round, self._scratch = round, dict(scratch)

    def states(self) -> dict[int, Tree]:
        return self._states.committed()

    def commit_round(self) -> None:
        self._states.commit_round()

    def restore(self, states: Mapping[int, Tree]) -> None:
        self._states.restore(states)

    def _run(self, step: str, clients: Sequence[int], message: dict[str, Tree], round: int) -> Replies:
        named = self._steps[step].at_round(round)
        asked = list(dict.fromkeys(clients))
        plan = self._plans.get(step)
        if plan is None or plan.asked != asked:
            plan = StepPlan(self._data, named.draws, asked)
            if len(asked) <= MAX_CACHED:
                self._plans[step] = plan
        batches = StepBatches(plan, step, self._seed, round, self._transforms)
        received = self._one.to_layout(message)
        chunks = list(self._chunks(named, plan))
        several = self._shares_out(len(chunks)) and not plan.reading_draws
        pure = self._is_pure(named, step, batches, received, round) if several else self._thread_safe is True
        threads = several and pure
        if threads:
            self._copy_learners()

        def outcome_of(worker: int, ks: IntArray, drawn: Drawn) -> Outcome:
            one, many = self._learners[worker]
            noise = partial(self._noise_seed, named.noise or step, round)
            who: list[int] = batches.clients[ks].tolist()
            try:
                if len(ks) > 1:
                    assert many is not None
                    outcome = self._run_many(many, named, drawn, who, message, noise)
                else:
                    outcome = self._run_one(one, named, drawn, who[0], received, None if pure else noise)
            except MetricFailed as error:
                error.client = self.names[int(batches.clients[ks[error.place]])]
                raise
            if outcome.state is not None:  # stored at once, so that not all states are in memory twice
                with self._lock:
                    self._states.put(who, outcome.state)
            return outcome._replace(state=None)

        parts: list[ReplyPart] = []
        failed: dict[int, Diverged] = {}  # by the client's position among those asked
        with _torch_threads(self._bytes, threads):
            outcomes = self._outcomes(step, outcome_of, batches, chunks, threads, round)
        for ks, outcome in zip(chunks, outcomes, strict=True):
            who: list[int] = batches.clients[ks].tolist()
            required = outcome._replace(reply=required_parts(outcome.reply))
            failed |= self._find_diverged(round, ks.tolist(), who, required)
            parts += drop_undefined_scores(
                ReplyPart(who, outcome.reply, finite=True)
            )  # finite, or ``failed`` ends the run
            if outcome.scratch is not None:
                _store_scratch(self._scratch, who, outcome.scratch)
        if failed:
            raise failed[min(failed)]
        if all(len(part.clients) == 1 for part in parts):
            replies = {part.clients[0]: part.reply for part in parts}
            return LocalReplies(clients, [replies[i] for i in clients])
        stacked = [p if len(p.clients) > 1 else ReplyPart(p.clients, stack_trees([p.reply])) for p in parts]
        return StackedReplies(clients, stacked)

    def _shares_out(self, chunks: int) -> bool:
        """Whether it can pay to run chunks on several threads, with one thread of torch's for each.

        A large model uses torch's own threads well, so with fewer chunks than workers some would be idle.
        """
        if chunks == 1 or self._threads.workers == 1:
            return False
        return self._thread_safe is True or self._bytes <= SMALL or chunks >= self._threads.workers

    def _is_pure(self, named: Step, step: str, batches: StepBatches, message: dict[str, Tree], round: int) -> bool:
        """Whether a step's clients may run on several threads; seen from its first client where it is not known."""
        if self._thread_safe is True:
            return True
        if step not in self._pure:
            drawn, client = batches.of_one(0), int(batches.clients[0])
            with _torch_threads(self._bytes, True):
                against = trace(self._one, lambda one: self._run_one(one, named, drawn, client, message, None))
            self._pure[step] = against is None
            logger.info("Clients of the step %r run on %s.", step, f"one thread: {against}" if against else "threads")
        return self._pure[step]

    def _outcomes(
        self,
        step: str,
        outcome_of: Callable[[int, IntArray, Drawn], Outcome],
        batches: StepBatches,
        chunks: list[IntArray],
        threads: bool,
        round: int,
    ) -> list[Outcome]:
        """The outcome of each chunk; samples that are not in memory are read while the chunks before train.

        Where reading draws random numbers, one thread does both in turn, so that each gets its own numbers every time.
        """
        plan = batches.plan
        run_all = partial(self._on_threads, step, round=round, plan=plan) if threads else _one_by_one
        if plan.at_hand or plan.reading_draws:
            return run_all(lambda worker, ks: outcome_of(worker, ks, batches.of(ks)), chunks)
        sizes = [plan.bytes_of(ks) for ks in chunks]
        with ReadAhead(lambda j: batches.of(chunks[j]), sizes, plan.read_ahead_bytes) as ahead:

            def run(worker: int, j: int) -> Outcome:
                try:
                    return outcome_of(worker, chunks[j], ahead.take(j))
                finally:
                    ahead.done(j)

            return run_all(run, range(len(chunks)))

    def _on_threads(
        self, step: str, job: Callable[[int, Chunk], Outcome], chunks: Sequence[Chunk], round: int, plan: StepPlan
    ) -> list[Outcome]:
        """The outcomes of all chunks on several threads, which must draw no random numbers."""
        if self._thread_safe is True:
            return self._threads.run(step, job, chunks)
        before = generators.states()
        outcomes = self._threads.run(step, job, chunks)
        if generators.states() == before:
            return outcomes
        if plan.runs_code:  # a Dataset may be what drew them
            warnings.warn(
                f"Random numbers were drawn in round {round}, by a Dataset or by the step {step!r}, though not when "
                "both were tried out; clients ran on several threads, so the run cannot be repeated exactly. Leave the "
                "randomness out of the Dataset, or set workers to 1.",
                stacklevel=2,
            )
            return outcomes
        raise ConfigError(
            f"The step {step!r} drew random numbers in round {round}, but not when it was tried out, so clients ran on "
            "several threads; set workers to 1."
        )

    def _copy_learners(self) -> None:
        """One copy of the learners per thread, made while none is in use: modules cannot be copied inside vmap."""
        one, many = self._learners[0]
        for worker in range(len(self._learners), self._threads.workers):
            self._learners[worker] = one.copy(), None if many is None else many.copy()

    def _noise_seed(self, purpose: str, round: int, client: int) -> int:
        """The seed of a client's dropout and other noise."""
        return rng.key(self._seed, f"{purpose}/torch", round, self.names[client]) >> 1

    def _chunks(self, named: Step, plan: StepPlan) -> Iterator[IntArray]:
        """The clients that run at once, as positions in ``plan``."""
        if self._many is None or not named.elementwise:
            yield from np.arange(len(plan.clients))[:, None]
            return
        kinds = [self._kind_of_state(i) for i in plan.asked]
        most = int(self._memory / (COPIES * (self._bytes + plan.nbytes)))
        for ks in group_clients(plan, kinds, self._many.ragged):
            for portion in chunk_slices(plan.whole[ks], max(1, min(MAX_STACKED, most))):
                yield ks[portion]

    def _run_one(
        self,
        learner: Learner,
        named: Step,
        drawn: Drawn,
        client: int,
        message: dict[str, Tree],
        noise: Callable[[int], int] | None,
    ) -> Outcome:
        """One client's step; without ``noise`` it is not to draw random numbers."""
        state = self._state(client)
        state = None if state is None else tree.map(torch.clone, state)  # it may be a view of the stored state
        state = learner.to_layout(state)
        if noise is None:
            outcome = named.run(learner, message, state, drawn)
        else:
            # Dropout and other noise draw from torch's global generator: seed it per client, and restore it after.
            with torch.random.fork_rng(devices=self._devices()):
                # On the CPU alone, seeding its generator is ten times as fast as torch.manual_seed.
                seed = noise(client)
                torch.manual_seed(seed) if self._devices() else torch.default_generator.manual_seed(seed)
                outcome = named.run(learner, message, state, drawn)
        reply, state, scratch = map(learner.from_layout, (outcome.reply, outcome.state, outcome.scratch))
        return outcome._replace(reply=reply, state=state, scratch=scratch)

    def _run_many(
        self,
        learner: Stacked,
        named: Step,
        drawn: Drawn,
        who: list[int],
        message: dict[str, Tree],
        noise: Callable[[int], int],
    ) -> Outcome:
        """The step of many clients, on stacked tensors."""
        count = len(who)
        received = {
            # A scalar is the same for all clients, and stays one.
            name: part if isinstance(part, Tensor) and part.ndim == 0 else expand_tree(part, count)
            for name, part in message.items()
        }
        states = [self._state(i) for i in who]
        state = None if states[0] is None else stack_trees(states)
        learner.seed(noise, who)
        try:
            outcome = named.run(learner, received, state, drawn)
        except RuntimeError as error:
            if "vmap" not in str(error):
                raise
            raise ConfigError(
                'The model or the loss cannot run many clients at once; use vectorize = "serial". '
                f"The error from torch: {error}"
            ) from error
        reply = tree.map(lambda leaf: leaf.expand(count) if leaf.ndim == 0 else leaf, outcome.reply)
        return outcome._replace(reply=reply)

    def _find_diverged(self, round: int, ks: list[int], who: list[int], outcome: Outcome) -> dict[int, Diverged]:
        """The errors of those clients whose training diverged (NaN or infinity)."""
        if tree.finite([dict(outcome.watched), outcome.reply]):
            return {}
        replies = [outcome.reply] if len(who) == 1 else unstack_tree(outcome.reply, len(who))
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
        """The state for a client's next step: its scratch state in this round, or its stored one."""
        if client in self._scratch:
            return self._scratch[client]
        return self._states.view(client) if client in self._states else self._initial

    def _kind_of_state(self, client: int) -> str:
        """What ``_state`` returns: states of one kind have the same structure, and can be stacked."""
        if client in self._scratch:
            return "scratch"
        return "state" if self._initial is not None or client in self._states else "none"

    def _devices(self) -> list[torch.device]:
        """The GPU that the clients are on, if any: its generator is restored as well."""
        device = self._data.train.device
        return [device] if device.type == "cuda" else []


def _one_by_one(job: Callable[[int, Chunk], Outcome], chunks: Sequence[Chunk]) -> list[Outcome]:
    return [job(0, chunk) for chunk in chunks]


def _store_scratch(states: dict[int, Tree], who: list[int], state: Tree) -> None:
    """Store the clients' scratch states for the rest of the round."""
    if len(who) == 1:
        states[who[0]] = state
        return
    # Rows are cloned, since a view would keep all clients' rows alive; expanded tensors stay shared.
    for i, own in zip(who, unstack_tree(state, len(who)), strict=True):
        states[i] = tree.map(lambda leaf, all: leaf.clone() if all.stride(0) else leaf, own, state)


# Below this size in bytes, a model's operations are too short for several threads.
SMALL = 400_000


@contextmanager
def _torch_threads(size: int, shared: bool) -> Iterator[None]:
    """Run torch on one thread if the model is small or clients run on several threads, else on its usual number."""
    threads = torch.get_num_threads()
    if threads == 1 or (size > SMALL and not shared):
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
