"""FedLab: its serial trainer and synchronous server in the standalone pipeline. The loader is ours (work.Batches)."""

from __future__ import annotations

import work

if work.torch.version.cuda is None:
    work.declare_torchvision()

from fedlab.contrib.algorithm.basic_client import SGDSerialClientTrainer
from fedlab.contrib.algorithm.basic_server import SyncServerHandler
from fedlab.contrib.dataset.basic_dataset import FedDataset
from fedlab.core.standalone import StandalonePipeline
from torch import Tensor
from work import Batches, Case, Clock, clients, main, network


class Data(FedDataset):
    def __init__(self, case: Case) -> None:
        self.num, self.rows = case.clients, clients(case)

    def get_dataloader(self, id: int, batch_size: int, type: str = "train") -> Batches:
        return Batches(*self.rows[id], batch_size)


class Pipeline(StandalonePipeline):
    clock: Clock

    def evaluate(self) -> None:
        """The pipeline calls it at the end of each round."""
        self.clock.round_begins()


def run(case: Case, rounds: int, clock: Clock) -> list[Tensor]:
    model = network(case)
    handler = SyncServerHandler(model, global_round=rounds, sample_ratio=1.0)
    trainer = SGDSerialClientTrainer(network(case), case.clients)
    trainer.setup_dataset(Data(case))
    trainer.setup_optim(case.epochs, case.batch, case.lr)
    pipeline = Pipeline(handler, trainer)
    pipeline.clock = clock
    clock.round_begins()
    pipeline.main()
    return [p.detach() for p in handler.model.parameters()]


if __name__ == "__main__":
    main(run)
