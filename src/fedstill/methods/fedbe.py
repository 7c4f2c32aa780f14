"""FedBE."""

from __future__ import annotations

from functools import partial
from typing import Literal

from fedstill.compose.wrappers import after
from fedstill.core.errors import FedstillError
from fedstill.core.limits import CountOrNone, NotNegative, Positive, PositiveShare, Temperature
from fedstill.core.tree import concatenate, stack
from fedstill.core.types import Method, Round, Weights
from fedstill.local.terms import cross_entropy
from fedstill.server.aggregate import average
from fedstill.server.distill.step import distill
from fedstill.server.distill.student import Student
from fedstill.server.distill.targets import Labels, Rule, hard_belief, soft_belief
from fedstill.server.distill.teachers import Teachers, dirichlet_samples, gaussian_samples

SWA = Student(
    steps=None,
    epochs=20,
    optimizer="sgd",
    momentum=0.9,
    lr_schedule="cyclic",
    lr_low=4e-4,
    weight_decay=1e-5,
    clip=None,
    average_after=0,
    reestimate=True,
)


def fedbe(
    *,
    student: Student = SWA,
    samples: CountOrNone = 10,
    sampling: Literal["gaussian", "dirichlet"] = "gaussian",
    alpha: Positive = 1.0,
    with_average: bool = True,
    with_clients: bool = True,
    sharpen: Temperature = 0.5,
    labels: Labels = "soft",
    rule: Rule = "max",
    threshold: NotNegative = 0.75,
    distill_share: PositiveShare = 1.0,
    warm_up: CountOrNone = 0,
) -> Method:
    """FedBE: models drawn around the clients' models teach the average, together with the average and the clients.

        mu = w_0 = sum_{k in S} p_k w_k,    v = sum_{k in S} p_k (w_k - mu)^2,    w_s ~ N(mu, diag v), s = 1 .. samples
        p(x) = mean of softmax(z(x; .)) over w_0, all w_s and all w_k, sharpened: p_c^(1/T) / sum_j p_j^(1/T)
        w <- mean of snapshots of SGD on mean_x KL(p(x) || softmax(z(x; w))) from w_0
        p_k = n_k / sum_{j in S} n_j

    Args:
        student: how the average learns; with student.epochs = 0 it is FedAvg bit for bit.
        samples: number of drawn models.
        sampling: "gaussian"; or "dirichlet", sum_k g_k p_k w_k / sum_j g_j p_j with g ~ Dir(alpha).
        alpha: concentration of the Dirichlet distribution; the larger, the nearer to the average.
        with_average: the average teaches too.
        with_clients: the clients' models teach too.
        sharpen: temperature of the sharpening (T), below 1 sharper; 1 switches it off.
        labels: "soft", the sharpened probabilities; "hard", one class a sample, where teachers are sure enough of it.
        rule: of hard labels: "max", the surest teacher decides; "mean", the mean of the teachers' probabilities does.
        threshold: probability from which a hard label is kept (tau).
        distill_share: part of the unlabeled rows that is distilled on, the same for all methods of a run.
        warm_up: first rounds without distillation.

    Tries: student.lr = 0.0005, 0.001, 0.003; samples = 0, 10, 20; sharpen = 0.5, 1.0.
    Reveals: the trained model and the number of samples n_k; the server runs every client's model on its own, so
        secure aggregation is impossible.
    Differs from the paper: we know its text from quotations only: when it starts to average snapshots and the
        Dirichlet's alpha are our choice. Parameters are drawn, BatchNorm statistics are not (a variance could be
        negative). One architecture. The authors' code draws directions of the clients' moves instead
        (benchmarks/fedbe/released.py).
    Reference: Chen and Chao, FedBE: Making Bayesian Model Ensemble Applicable to Federated Learning, ICLR 2021,
        Algorithm 1.
    """
    sampler: Teachers | None = None
    if samples and sampling == "dirichlet":
        sampler = partial(dirichlet_samples, count=samples, alpha=alpha)
    elif samples:
        sampler = partial(gaussian_samples, count=samples)
    hard = labels == "hard"
    step = distill(
        student,
        teachers=ensemble(sampler, with_average=with_average, with_clients=with_clients),
        pool=hard_belief(rule, threshold=threshold) if hard else soft_belief("probabilities", exponent=1.0 / sharpen),
        distill_share=distill_share,
        hard=hard,
    )
    return Method(cross_entropy(), average(), (after(warm_up, step) if warm_up else step,))


def ensemble(sampler: Teachers | None, *, with_average: bool = True, with_clients: bool = True) -> Teachers:
    """Return the teachers in order: the average, the drawn models, the clients' models; each group may be left out."""
    if sampler is None and not with_average and not with_clients:
        raise FedstillError("method.samples = 0 leaves nobody to teach: set with_average or with_clients to true")

    def teach(candidate: Weights, round: Round) -> Weights:
        groups = [stack([candidate])] if with_average else []
        groups += [] if sampler is None else [sampler(candidate, round)]
        groups += [round.uploads.weights] if with_clients else []
        return groups[0] if len(groups) == 1 else concatenate(groups)

    return teach
