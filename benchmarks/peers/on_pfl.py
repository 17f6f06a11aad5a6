"""pfl: FederatedAveraging on a SimulatedBackend with a PyTorchModel, users' data in memory, no evaluation."""

from __future__ import annotations

from typing import Any

import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.peers.pace import Pace
from benchmarks.workloads import LR, Work, build, parts


class Net(nn.Module):
    """The workload's model with the two methods that pfl requires."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self.net = build(work)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        self.train()
        return cross_entropy(self.net(x), y)

    @torch.no_grad()
    def metrics(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        self.eval()
        return {"loss": Weighted(float(cross_entropy(self.net(x), y, reduction="sum")), len(y))}


def run(work: Work, pace: Pace) -> None:
    class EachRound(TrainingProcessCallback):
        def after_central_iteration(self, metrics: Any, model: Any, *, central_iteration: int) -> Any:
            pace(model.pytorch_model.parameters)
            return False, Metrics()

    users = [PyTorchTensorDataset(part, user_id=str(user)) for user, part in enumerate(parts(work))]
    fed = FederatedDataset(users.__getitem__, get_user_sampler("minimize_reuse", range(work.clients)))
    net = Net(work)
    model = PyTorchModel(net, torch.optim.SGD, torch.optim.SGD(net.parameters(), lr=1.0))
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=10**9,
            evaluation_frequency=10**9,  # the first round is evaluated, and it is not timed
            train_cohort_size=work.clients,
            val_cohort_size=0,
        ),
        SimulatedBackend(fed, fed),
        model,
        NNTrainHyperParams(local_learning_rate=LR, local_num_epochs=1, local_batch_size=work.batch),
        callbacks=[EachRound()],
        send_metrics_to_platform=False,
    )
