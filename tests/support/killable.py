"""A run in its own process, for tests that kill it: python killable.py RUN_DIR ENGINE ROUNDS."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from run_helpers import LoopEngine, average, counting_objective, fedavg, linear_model, toy_federation
from running import federate

from fedstill.core.types import ServerStep, Training, Weights
from fedstill.loop.callbacks import Callback
from fedstill.loop.history import Result


def server_with_momentum() -> ServerStep:
    def apply(candidate, state, round):
        moved, _ = average(candidate, {}, round)
        v = {k: 0.5 * state["v"][k] + moved.params[k] - round.start.params[k] for k in moved.params}
        return Weights({k: round.start.params[k] + v[k] for k in v}, moved.buffers), {"v": v}

    return ServerStep("v", apply, lambda weights: {"v": {k: torch.zeros_like(v) for k, v in weights.params.items()}})


class SayReady(Callback):
    """Tell the parent that start-up is over: what follows is rounds and checkpoints."""

    def __init__(self) -> None:
        self.said = False

    def on_round(self, row):
        if not self.said:
            print("ready", flush=True)
        self.said = True


def run(run_dir: Path, engine: str, rounds: int, callbacks: tuple = ()) -> Result:
    federation, model = toy_federation(), linear_model()
    return federate(
        method=fedavg(objective=counting_objective(), aggregate=server_with_momentum()), model=model,
        federation=federation, training=Training(batch_size=4, lr=0.05), rounds=rounds, cohort=6, seed=11,
        engine=LoopEngine(model, federation) if engine == "loop" else engine, device="cpu", run_dir=run_dir,
        checkpoint_every=2, resume=True, callbacks=callbacks,
    )  # fmt: skip


if __name__ == "__main__":
    torch.set_num_threads(1)
    run(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), (SayReady(),))
