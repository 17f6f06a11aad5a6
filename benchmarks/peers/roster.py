"""The peers: their requirements and modules, what they cannot do and what they do differently."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Peer:
    """One side of the comparison.

    ``module`` has the function ``run(work, pace)``. ``requires`` are the packages of its environment; if empty, it runs
    in the driver's. ``lacks`` says by workload why it does not run it, and ``notes`` what it does differently.
    ``alike`` is whether its model should move as far as ours.
    """

    title: str
    module: str
    requires: tuple[str, ...] = ()
    lacks: dict[str, str] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    alike: bool = True


MAML = ("W4 first", "W4 exact")
EVERY = ("W0", "W1", "W2", "W3", *MAML, "W5", "W6", "W7")

PEERS = {
    "ours": Peer("comfedl, fit()", "ours"),
    "robust": Peer(
        "comfedl, Robust",
        "ours:robust",
        lacks=dict.fromkeys(MAML, "Robust is measured on plain training"),
        notes=dict.fromkeys(EVERY, "another method: it weights the clients by their losses"),
        alike=False,
    ),
    "adam": Peer(
        "comfedl, Adam at the clients",
        "ours:adam",
        lacks=dict.fromkeys(MAML, "Adam is measured on plain training"),
        notes=dict.fromkeys(EVERY, "another optimiser, at a tenth of the rate"),
        alike=False,
    ),
    "before": Peer("comfedl at the commit of --before", "ours"),
    "loop": Peer("the loop a user would write", "loops:loop"),
    "loader": Peer("the same loop with a DataLoader", "loops:loader"),
    "lean": Peer("the same loop, optimised", "loops:lean"),
    "flwr": Peer(
        "Flower 1.41 on Ray",
        "on_flwr",
        ("flwr[simulation]==1.41.*",),
        lacks=dict.fromkeys(MAML, "Flower has no MAML among its strategies"),
        notes=dict.fromkeys(EVERY, "CPU of the driver, Ray's daemons and one actor; it also sleeps between polls"),
    ),
    "fluke": Peer(
        "fluke 0.8.1",
        "on_fluke",
        ("fluke-fl==0.8.1",),
        lacks={"W4 exact": "fluke's Per-FedAvg is first order or by differences of gradients, never exact"},
        notes={
            "W4 first": "its Per-FedAvg does not restore the weights after the inner step: as many gradients, but "
            "another method"
        },
    ),
    "pfl": Peer(
        "pfl 0.6.0",
        "on_pfl",
        ("pfl==0.6.0",),
        lacks=dict.fromkeys(MAML, "pfl has no MAML (its Reptile is another method)"),
        notes=dict.fromkeys(EVERY, "takes slices as batches in a fixed order, without sampling or gathering"),
    ),
}
