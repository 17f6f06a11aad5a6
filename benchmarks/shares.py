"""Where the time of a round goes, and how far it is from the arithmetic limit.

    OMP_NUM_THREADS=1 python -m benchmarks.shares [W1 W2 W3 "W4 first" "W4 exact" W6]

The limit is the number of floating-point operations in the model's matrix products and (direct) convolutions, at the
speed of one large matrix product on one thread, measured in the same run. The shares are from torch's profile of a few
rounds, which sees torch operations but not Python.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from benchmarks.ours import ours, seconds
from benchmarks.workloads import STEPS, WORKS, Work, build

# Their products are all in linear layers and convolutions, which the limit counts.
IMAGES = [name for name, work in WORKS.items() if name != "W0" and work.vocabulary is None]
KINDS = {
    "products": (
        "bmm",
        "mm",
        "addmm",
        "baddbmm",
        "baddbmm_",
        "convolution",
        "mkldnn_convolution",
        "convolution_backward",
    ),
    "gathering batches": ("index_select",),
    "normalising, pooling": (
        "native_batch_norm",
        "native_batch_norm_backward",
        "batch_norm_update_stats",
        "max_pool2d_with_indices",
    ),
}


def flops(work: Work) -> float:
    """The operations of a round: per layer three products for a gradient, and six for a Hessian-vector product.

    The first layer takes two for either, since its input has no gradient and does not change.
    """
    shapes: dict[nn.Module, int] = {}
    net = build(work)
    for layer in net.modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            layer.register_forward_hook(lambda layer, _, out: shapes.__setitem__(layer, math.prod(out.shape[1:])))
    net(torch.zeros(2, *work.shape))
    per = [2.0 * size * math.prod(layer.weight.shape[1:]) for layer, size in shapes.items()]
    gradient, product = 3 * sum(per) - per[0], 6 * sum(per) - 4 * per[0]
    step = {None: gradient, "first": 2 * gradient, "exact": 2 * gradient + product}[work.maml]
    return work.clients * STEPS * work.batch * step


def speed() -> float:
    """Operations per second of one large matrix product."""
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)

    def once() -> float:
        start = time.perf_counter()
        a @ b
        return 2 * 1024**3 / (time.perf_counter() - start)

    return statistics.median(once() for _ in range(15))


def main() -> None:
    parser = argparse.ArgumentParser(description="Where the time goes.")
    parser.add_argument("works", nargs="*", default=IMAGES, help="some of " + ", ".join(IMAGES))
    asked = parser.parse_args().works
    if others := sorted({*asked} - {*IMAGES}):
        parser.error(f"it measures {', '.join(IMAGES)}, not {', '.join(others)}.")
    torch.set_num_threads(1)
    per_second = speed()
    print(f"one large product: {per_second / 1e9:.0f} GFLOP/s on one thread\n")
    print("| workload | ms per round | limit, ms | times the limit | " + " | ".join(KINDS) + " | other operations |")
    print("|---|---|---|---|" + "---|" * (len(KINDS) + 1))
    for name in asked:
        work = WORKS[name]
        round = ours(work, "auto")
        round()
        rounds = max(3, int(1 / seconds(round, 1)))
        spent = statistics.median(seconds(round, max(1, rounds // 5)) for _ in range(5)) * 1e3
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            for _ in range(min(rounds, 10)):
                round()
        times = {event.key.removeprefix("aten::"): event.self_cpu_time_total for event in seen.key_averages()}
        whole = sum(times.values())
        shares = [sum(times.get(op, 0.0) for op in ops) / whole for ops in KINDS.values()]
        limit = flops(work) / per_second * 1e3
        parts = " | ".join(f"{share:.0%}" for share in [*shares, 1 - sum(shares)])
        print(f"| {name} | {spent:.2f} | {limit:.2f} | {spent / limit:.1f} | {parts} |", flush=True)


if __name__ == "__main__":
    main()
