"""Flower: a ClientApp and FedAvg in its simulation on Ray. The training loop is ours, as in Flower's examples.

PEERS_CPUS are the CPUs of a client, PEERS_ALL those of Ray. Without them both are as Flower sets them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # Ray's workers import `work`, too

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch import Tensor
from work import Batches, Case, Clock, clients, main, network, train


def client_app(case: Case) -> ClientApp:
    app = ClientApp()

    @app.train()
    def fit(message: Message, context: Context) -> Message:
        model = network(case)
        torch.seed()  # `network` has set it
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        x, y = clients(case)[int(context.node_config["partition-id"])]
        steps = train(model, Batches(x, y, case.batch), case)
        numbers = MetricRecord({"num-examples": len(y), "steps": steps})
        return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": numbers}), reply_to=message)

    return app


class Watched(FedAvg):
    def __init__(self, clock: Clock, **options: object) -> None:
        super().__init__(**options)
        self.clock = clock

    def configure_train(self, server_round: int, *args: object) -> Iterable[Message]:
        if server_round == 1:
            self.clock.round_begins()
        return super().configure_train(server_round, *args)

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> tuple:
        replies = list(replies)
        result = super().aggregate_train(server_round, replies)
        self.clock.round_begins()
        self.clock.steps += sum(int(reply.content["metrics"]["steps"]) for reply in replies)
        return result


def run(case: Case, rounds: int, clock: Clock) -> list[Tensor]:
    last: dict[str, Tensor] = {}
    server = ServerApp()

    @server.main()
    def serve(grid: Grid, context: Context) -> None:
        strategy = Watched(clock, fraction_evaluate=0.0, min_train_nodes=case.clients, min_available_nodes=case.clients)
        result = strategy.start(
            grid=grid, initial_arrays=ArrayRecord(network(case).state_dict()), num_rounds=rounds, timeout=600
        )
        last.update(result.arrays.to_torch_state_dict())

    backend: dict[str, dict] = {"init_args": {"_node_ip_address": "127.0.0.1"}}  # nobody else on the network sees it
    if "PEERS_CPUS" in os.environ:
        backend["client_resources"] = {"num_cpus": int(os.environ["PEERS_CPUS"]), "num_gpus": 0.0}
        backend["init_args"]["num_cpus"] = int(os.environ["PEERS_ALL"])
    run_simulation(server, client_app(case), num_supernodes=case.clients, backend_config=backend)
    return list(last.values())


if __name__ == "__main__":
    main(run, counts=True)
