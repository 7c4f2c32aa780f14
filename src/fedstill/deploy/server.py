"""The server of a deployment: a run without any client's row, over a transport that somebody else provides."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedstill.compose.phases import phases_of
from fedstill.core.errors import FedstillError
from fedstill.core.population import Order
from fedstill.core.setup import Question
from fedstill.core.trainer import Messages, Trainer
from fedstill.core.types import Federation, Weights
from fedstill.data import Source, split_unlabeled, with_test_of
from fedstill.deploy.folder import Deployment
from fedstill.deploy.metrics import ServerMetrics
from fedstill.experiment.build import agreed_data, build
from fedstill.experiment.config import Experiment
from fedstill.experiment.run import run_built
from fedstill.loop.callbacks import Callback
from fedstill.loop.evaluate import NotMeasured, TestSet
from fedstill.loop.federate import Built
from fedstill.loop.history import Result
from fedstill.loop.outliers import outliers
from fedstill.population.desk import EVALUATION
from fedstill.population.remote import Remote, Transport
from fedstill.population.wire import check_form
from fedstill.report.parties import Party, write_parties

BY_SITES = "client_rows"  # the value of `evaluate` with which sites measure the model on rows that they hold back
MEASURED = {"right": torch.tensor(0), "loss": torch.tensor(0.0, dtype=torch.float64), "count": torch.tensor(0)}
SIZE_LIMIT = 1e12  # rows that are believed of a site
_log = logging.getLogger("fedstill.run")


def federate_over(
    deployment: Deployment,
    transport: Transport,
    *,
    run_dir: str | Path | None = None,
    resume: bool = False,
    callbacks: Sequence[Callback] = (),
) -> Result:
    """Run a deployment's experiment with its sites behind a transport, and return the result.

    run_dir: an ordinary run folder, for `fedstill report`, `watch`, `predict` and `export`; None: the deployment's own.
    resume: go on from the newest checkpoint in `run_dir`. Sites that were asked before give the same answers again.
    """
    folder = deployment.run_dir if run_dir is None else Path(run_dir)
    experiment = server_experiment(deployment)
    metrics = ServerMetrics(folder, deployment)
    sites = Sites(deployment, metrics.heard_over(transport))
    built = built_for(deployment, experiment, sites)
    result = run_built(
        experiment, built, run_dir=folder, callbacks=[metrics, *callbacks], resume=resume, pictures=False
    )
    return _with_parties(deployment, built, sites, result, folder)


def server_experiment(deployment: Deployment) -> Experiment:
    """Return the experiment with the server's own rows in it, which the sites' copies do not name."""
    data = deployment.experiment.data
    rows = {"test": deployment.test or None, "unlabeled": deployment.unlabeled or data.unlabeled}
    return deployment.experiment.model_copy(update={"data": data.model_copy(update=rows)})


def built_for(deployment: Deployment, experiment: Experiment, sites: Sites | None = None) -> Built:
    """Build the server's part of a run: the federation has names, seats and the server's own rows, no client's.

    sites: asks the clients; None: nobody is asked, which is enough to check the folder.
    """
    federation = server_federation(deployment, experiment)
    by_sites = experiment.evaluate == BY_SITES
    if not by_sites and not len(federation.test.y):
        raise FedstillError(
            f"evaluate = '{experiment.evaluate}' needs test rows of the server's own, and it has none: name a file or "
            f"folder as `test` in server.toml, or let the sites measure: evaluate = '{BY_SITES}'"
        )
    if by_sites and not experiment.data.client_test_share:
        raise FedstillError(
            f"evaluate = '{BY_SITES}': no site holds back rows to measure on; set data.client_test_share, e.g. 0.2"
        )
    if by_sites and experiment.privacy.epsilon is not None:
        raise FedstillError(
            f"evaluate = '{BY_SITES}': what a model gets right at a site has no noise, and privacy.epsilon is a "
            "budget; name test rows of the server's own as `test` in server.toml, and set evaluate = 'global_test'"
        )
    built = build(experiment, federation)
    if any(phase.method.trusted is not None for phase in phases_of(built.method)):
        local_forms = [release.without_trust for phase in phases_of(built.method) for release in phase.method.releases]
        raise FedstillError(
            "the noise of a trusted server follows from the run's seed, and all sites know it: use a method whose "
            f"sites draw their own noise{f', {local_forms[0]}' if any(local_forms) else ''}"
        )
    if by_sites and built.model.groups is not None:
        raise FedstillError(
            f"evaluate = '{BY_SITES}': sites with different networks cannot measure one model; give the server test "
            "rows of its own (`test` in server.toml) and set evaluate = 'global_test'"
        )
    holders = np.asarray(sorted(member.client for member in deployment.members), np.int64)
    built = replace(built, holders=holders, stays=deployment.stays, spare=deployment.spare)
    if sites is None:
        return built
    built = replace(built, population=sites.population(built))
    return replace(built, evaluate=sites.evaluate) if by_sites else built


def server_federation(deployment: Deployment, experiment: Experiment) -> Federation:
    """Return a federation of the deployment's seats in which nobody has a row but the server."""
    data = agreed_data(experiment)
    source = Source(data, data, scale="given")
    if experiment.data.test is not None:
        source = with_test_of(source, experiment.data.test, label=experiment.data.label)
    source, unlabeled = split_unlabeled(
        source, experiment.data.unlabeled, seed=experiment.seed, limit=experiment.data.unlabeled_limit
    )
    return Federation(
        source.train,
        source.test,
        torch.zeros(0, dtype=torch.int64),
        torch.zeros(deployment.seats + 1, dtype=torch.int64),
        unlabeled=None if unlabeled is None else unlabeled.x,
        unlabeled_truth=None if unlabeled is None else unlabeled.truth,
        unlabeled_ids=None if unlabeled is None else unlabeled.ids,
        unlabeled_skipped=() if unlabeled is None else unlabeled.skipped,
        # no names: a site that takes an empty seat later changes nothing of what the run began with
        partition="organisations",
    )


class Sites:
    """The clients of a deployment: it makes their population for the loop, and asks them how good a model is."""

    def __init__(self, deployment: Deployment, transport: Transport) -> None:
        self.deployment, self.transport = deployment, transport
        self._remote: _Counted | None = None

    def population(self, built: Built) -> Callable[..., Remote]:
        def make(task: Any, first: Any, *, folder: Path | None = None) -> Remote:
            facts, engines = self.deployment.facts, built.engines
            self._remote = _Counted(task, first, transport=self.transport, engines=engines, run=facts, folder=folder)
            return self._remote

        return make

    def evaluate(self, weights: Weights, test: TestSet, trainer: Trainer) -> dict[str, Any]:
        """Measure a model on all rows that the sites hold back, together: accuracy and mean loss.

        A site whose number of rows or mean loss is far from the others' is left out, because it could decide alone.
        """
        measurements = self.measure(weights)
        table = np.asarray([*measurements.values()], np.float64).reshape(-1, 3)
        sizes = {"its number of rows": table[:, 2], "its mean loss": table[:, 1] / table[:, 2]}
        clients = list(measurements)
        for place, reason in outliers(sizes, [], self.deployment.experiment.guard.outlier or math.inf).items():
            _log.warning("%s is not heard on how good the model is: %s", self.deployment.names[clients[place]], reason)
            del measurements[clients[place]]
        count = sum(rows for _, _, rows in measurements.values())
        if not count:
            raise NotMeasured("no site measured the model")
        right, loss = (sum(numbers[place] for numbers in measurements.values()) for place in (0, 1))
        return {"accuracy": right / count, "loss": loss / count, "measured_by": len(measurements), "measured_on": count}

    def rows(self, client: int) -> int:
        """Return how many rows a site said it trains on; 0 where it did not say."""
        return 0 if self._remote is None else self._remote.sizes.get(client, 0)

    def measure(self, weights: Weights) -> dict[int, tuple[int, float, int]]:
        """Return (right answers, sum of losses, rows) of each site that answers, by client id."""
        assert self._remote is not None
        number = max(1, self._remote.round)
        members = self._remote.task.members(number).tolist()
        measurements: dict[int, tuple[int, float, int]] = {}
        question = Question(EVALUATION, _only_sites_answer)
        for client, answer in self._remote.ask(question, members, round=number, sent=weights._asdict()):
            try:
                measurements[client] = measured(answer)
            except FedstillError as error:
                _log.warning("round %d: %s measured nothing: %s", number, self.deployment.names[client], error)
        return dict(sorted(measurements.items()))  # so that sums do not depend on who was first


class _Counted(Remote):
    """A population that knows the last round it played, and how many rows clients said they trained on."""

    round = 0

    def __init__(self, *args: Any, **how: Any) -> None:
        super().__init__(*args, **how)
        self.sizes: dict[int, int] = {}

    def play(self, order: Order, ids: np.ndarray) -> Messages:
        self.round = order.round
        sent = super().play(order, ids)
        if not self.task.method(order.round).per_client:  # what changes an upload on its way may change this number
            for client, upload in sent.by_client.items():
                if isinstance(upload, Mapping) and 0 < (size := float(upload["size"])) < SIZE_LIMIT:
                    self.sizes[client] = int(size)
        return sent


def _only_sites_answer(*_: Any) -> dict[str, Any]:
    raise FedstillError("this question is answered where the rows are")


def measured(answer: Any) -> tuple[int, float, int]:
    """Return the numbers of an answer; one that cannot be true is refused."""
    if isinstance(answer, str):
        raise FedstillError(answer)
    check_form(answer, MEASURED, "its measurement")
    right, loss, count = int(answer["right"]), float(answer["loss"]), int(answer["count"])
    if not (0 <= right <= count and count > 0 and math.isfinite(loss) and loss >= 0):
        raise FedstillError(f"it says {right} of {count} right with a loss of {loss:g}, which cannot be")
    return right, loss, count


def _with_parties(deployment: Deployment, built: Built, sites: Sites, result: Result, folder: Path) -> Result:
    """Ask each site how good the last model is on its rows, and write the table of parties as a simulation does."""
    experiment = deployment.experiment
    if not experiment.data.client_test_share or built.model.groups is not None or experiment.privacy.epsilon:
        return result
    measurements = sites.measure(result.weights)
    if not measurements:
        return result
    accuracy: list[float | None] = [None] * deployment.seats
    parties = []
    for member in deployment.members:
        if member.client in measurements:
            right, _, count = measurements[member.client]
            accuracy[member.client] = right / count
            parties.append(Party(member.name, sites.rows(member.client), count, right / count))
    parties.sort(key=lambda party: (party.federated, party.name))
    write_parties(parties, folder)
    return replace(result, party_accuracy=tuple(accuracy))
