"""Flower's own defences as aggregates of fedstill, so that both face the same attack on the same data and network.

    python benchmarks/storm/flower_defences.py     plays what is not on record yet (docs/results/flower_defences.json)

They are called as a ServerApp of Flower calls them: `Strategy.aggregate_train` gets the clients' replies. Our own
guard is off, because Flower has none. The extra `flower` must be installed.
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from unittest.mock import patch

import torch

from fedstill import Round, ServerStep, Weights
from fedstill.core.types import Aggregate, Need
from fedstill.server.aggregate import AGGREGATES
from fedstill.storage.files import write_whole

RECORD = Path(__file__).resolve().parents[2] / "docs" / "results" / "flower_defences.json"
STRATEGIES = ("FedMedian", "FedTrimmedAvg", "Krum", "MultiKrum", "Bulyan")


def flower(strategy: str = "FedMedian", hostile: float = 0.2) -> ServerStep:
    """Make one model by a strategy of Flower, which knows the share of hostile clients as its operator would."""

    def apply(candidate: Weights, state: dict, round: Round) -> tuple[Weights, dict]:
        replies = [_reply(round, place) for place in range(len(round.uploads.size))]
        arrays, _ = _made(strategy, hostile, len(replies)).aggregate_train(round.number, replies)
        parts = [{name: torch.from_numpy(arrays[f"{kind}.{name}"].numpy()).to(leaf) for name, leaf in part.items()}
                 for kind, part in zip(Weights._fields, round.start, strict=True)]  # fmt: skip
        return Weights(*parts), state

    return Aggregate(f"flower {strategy}", apply, needs=frozenset({Need.INDIVIDUAL_UPLOADS}))


def _made(strategy: str, hostile: float, clients: int):
    from flwr.serverapp import strategy as strategies

    guessed = round(hostile * clients)
    options = {
        "FedTrimmedAvg": {"beta": hostile},
        "Krum": {"num_malicious_nodes": guessed},
        "MultiKrum": {"num_malicious_nodes": guessed, "num_nodes_to_select": clients - guessed - 2},
        "Bulyan": {"num_malicious_nodes": min(guessed, (clients - 3) // 4)},  # it needs 4 f + 3 clients
    }
    return getattr(strategies, strategy)(**options.get(strategy, {}))


def _reply(round: Round, place: int):
    from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
    from flwr.supercore.task_identity import TaskIdentity

    TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1  # as in the process of a ServerApp
    arrays = ArrayRecord(
        {
            f"{kind}.{name}": Array(leaf[place].cpu().numpy())
            for kind, part in zip(Weights._fields, round.uploads.weights, strict=True)
            for name, leaf in part.items()
        }
    )
    metrics = MetricRecord({"num-examples": float(round.uploads.size[place])})
    order = Message(content=RecordDict(), dst_node_id=place + 1, message_type="train")
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=order)


def text_of(strategy: str) -> str:
    """Return the method whose aggregate is a strategy of Flower."""
    return f'fedavg+flower(strategy="{strategy}")'


def main() -> None:
    sys.path.insert(0, str(Path(__file__).parent))
    import attacks

    logging.disable()
    setting = {**attacks.FEDERATION, "guard": {"outlier": 0.0}}
    rows = json.loads(RECORD.read_text())["runs"] if RECORD.exists() else []
    known = {attacks.case_of(row) for row in rows}
    with patch.dict(AGGREGATES, {"flower": flower}), patch.object(attacks, "FEDERATION", setting):
        for seed in attacks.SEEDS:
            for attack in attacks.FEW.values():
                for strategy in STRATEGIES:
                    case = attacks.Case(text_of(strategy), attack, 0.5, seed)
                    if case not in known:
                        rows.append(attacks.play(case))
                        about = {"setting": setting, "script": "benchmarks/storm/flower_defences.py", "flwr": "1.41.0"}
                        lines = ",\n".join(json.dumps(row) for row in rows)
                        write_whole(RECORD, json.dumps(about)[:-1] + ', "runs": [\n' + lines + "\n]}\n")
                        print(*case, rows[-1]["accuracy"], rows[-1].get("backdoor_success", ""), flush=True)


if __name__ == "__main__":
    main()
