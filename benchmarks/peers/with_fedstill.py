"""fedstill: `federate`, with the checks of uploads, the history and the last round's look at a test set of 10 rows."""

from __future__ import annotations

from work import Case, Clock, clients, main, network

import fedstill


class Watch(fedstill.Callback):
    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def on_start(self, info: object) -> None:
        self.clock.round_begins()

    def on_round(self, row: dict[str, float]) -> None:
        self.clock.round_begins()
        self.clock.steps += int(row["server/steps"])


def count(candidate, state, round):
    round.metrics["steps"] = float(round.uploads.steps.sum())
    return candidate, state


def run(case: Case, rounds: int, clock: Clock) -> list:
    data = clients(case)
    if len(case.shape) == 1:
        model = fedstill.build_model("mlp", input_shape=case.shape, classes=10, hidden=[64])
    else:
        model = fedstill.build_model("cnn", input_shape=case.shape, classes=10)
    given = [p.detach() for p in network(case).parameters()]
    start = model.init(0)
    names = list(start.params)
    fedavg = fedstill.build_method("fedavg")[0].method
    built = fedstill.Built(
        method=fedstill.Method(fedavg.objective, fedavg.aggregate, (fedstill.ServerStep("count", count),)),
        model=model,
        federation=fedstill.federation_from_tensors(data, test=(data[0][0][:10], data[0][1][:10]), scale="none"),
        training=fedstill.Training(
            epochs=case.epochs, batch_size=case.batch, lr=case.lr, momentum=0.0, weight_decay=0.0
        ),
        schedule=fedstill.Schedule(rounds=rounds, cohort=case.clients, evaluate_every=10**6),
        start=fedstill.Weights(dict(zip(names, given, strict=True)), start.buffers),
    )
    result = fedstill.federate(built, callbacks=[Watch(clock)])
    return [result.weights.params[name] for name in names]


if __name__ == "__main__":
    main(run, counts=True)
