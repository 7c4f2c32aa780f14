"""pfl-research: FederatedAveraging on a SimulatedBackend. It evaluates in its first round, and does not shuffle."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
from pfl.internal.ops.selector import get_framework_module
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn
from work import Case, Clock, clients, main, network


class Network(nn.Module):
    """The network with the two functions that pfl asks of a module."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        self.train()
        return F.cross_entropy(self.body(x), y)

    @torch.no_grad()
    def metrics(self, x: Tensor, y: Tensor) -> dict[str, Weighted]:
        self.eval()
        return {"loss": Weighted(F.cross_entropy(self.body(x), y, reduction="sum").item(), len(y))}


class Watch(TrainingProcessCallback):
    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def on_train_begin(self, *, model: object) -> Metrics:
        self.clock.round_begins()
        return Metrics()

    def after_central_iteration(self, metrics: object, model: object, *, central_iteration: int) -> tuple:
        self.clock.round_begins()
        self.clock.steps -= 1  # the server's own optimiser has made one, too
        return False, Metrics()


def run(case: Case, rounds: int, clock: Clock) -> list[Tensor]:
    body = network(case)
    users = [PyTorchTensorDataset((x, y), user_id=str(k)) for k, (x, y) in enumerate(clients(case))]
    module = Network(body)
    data = FederatedDataset(users.__getitem__, get_user_sampler("minimize_reuse", list(range(case.clients))))
    model = PyTorchModel(module, torch.optim.SGD, torch.optim.SGD(module.parameters(), lr=1.0))
    FederatedAveraging().run(
        backend=SimulatedBackend(training_data=data, val_data=data),
        model=model,
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=rounds, evaluation_frequency=10**6, train_cohort_size=case.clients, val_cohort_size=0
        ),
        model_train_params=NNTrainHyperParams(
            local_num_epochs=case.epochs, local_learning_rate=case.lr, local_batch_size=case.batch
        ),
        model_eval_params=NNEvalHyperParams(local_batch_size=None),
        callbacks=[Watch(clock)],
    )
    return [p.detach() for p in body.parameters()]


def is_first() -> bool:
    return get_framework_module().distributed.global_rank == 0


if __name__ == "__main__":
    main(run, writes=is_first)
