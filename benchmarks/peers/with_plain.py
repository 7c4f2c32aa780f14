"""A careful loop in plain PyTorch: one module, received weights loaded in place, data as tensors."""

from __future__ import annotations

import torch
from torch import Tensor
from work import Batches, Case, Clock, clients, main, network, train


def run(case: Case, rounds: int, clock: Clock) -> list[Tensor]:
    model = network(case)
    batches = [Batches(x, y, case.batch) for x, y in clients(case)]
    sent = [p.detach().clone() for p in model.parameters()]
    clock.round_begins()
    for _ in range(rounds):
        total = [torch.zeros_like(p) for p in sent]
        for client in batches:
            with torch.no_grad():
                torch._foreach_copy_(list(model.parameters()), sent)
            train(model, client, case)
            torch._foreach_add_(total, [p.detach() for p in model.parameters()])
        sent = [p / case.clients for p in total]
        clock.round_begins()
    return sent


if __name__ == "__main__":
    main(run)
