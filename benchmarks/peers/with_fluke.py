"""fluke: FedAVG on a fixed assignment of rows, with its own loader. It has no evaluator, and draws progress bars."""

from __future__ import annotations

import work

if work.torch.version.cuda is None:
    work.declare_torchvision()

from fluke import DDict, FlukeENV
from fluke.algorithms.fedavg import FedAVG
from fluke.data import DataSplitter, DummyDataContainer, FastDataLoader
from fluke.utils import FederationObserver
from torch import Tensor
from work import Case, Clock, clients, main, network


class Watch(FederationObserver):
    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def start_round(self, round: int, global_model: object) -> None:
        if round == 1:
            self.clock.round_begins()

    def end_round(self, round: int) -> None:
        self.clock.round_begins()


def run(case: Case, rounds: int, clock: Clock) -> list[Tensor]:
    FlukeENV().set_seed(0)
    FlukeENV().set_device("cpu")
    FlukeENV().set_eval_cfg(server=False)
    loaders = [FastDataLoader(x, y, num_labels=10, batch_size=case.batch, shuffle=True) for x, y in clients(case)]
    data = DummyDataContainer(loaders, [None] * case.clients, None, 10)
    algorithm = FedAVG(
        case.clients,
        DataSplitter(data),
        DDict(
            model=network(case),
            client=DDict(
                batch_size=case.batch,
                local_epochs=case.epochs,
                loss="CrossEntropyLoss",
                optimizer=DDict(name="SGD", lr=case.lr),
                scheduler=DDict(name="StepLR", step_size=1, gamma=1),
            ),
            server=DDict(weighted=True),
        ),
    )
    algorithm.set_callbacks([Watch(clock)])
    algorithm.run(n_rounds=rounds, eligible_perc=1.0)
    return [p.detach() for p in algorithm.server.model.parameters()]


if __name__ == "__main__":
    main(run)
