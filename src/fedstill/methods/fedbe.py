"""FedBE."""

from __future__ import annotations

from functools import partial
from typing import Literal

from fedstill.core.errors import FedstillError
from fedstill.core.tree import concatenate, stack
from fedstill.core.types import Method, Round, Training, Weights
from fedstill.local.terms import cross_entropy
from fedstill.methods.options import not_negative, positive, positive_share, presets, temperature_of
from fedstill.methods.server_student import Part, belief_of, check_student, placed
from fedstill.server.aggregate import BufferPolicy, Weighting, average
from fedstill.server.distill.step import distill
from fedstill.server.distill.student import Student
from fedstill.server.distill.targets import Labels, Rule
from fedstill.server.distill.teachers import Teachers, direction_samples, dirichlet_samples, gaussian_samples

Sampling = Literal["gaussian", "dirichlet", "direction"]
RELEASED = {"sampling": "direction", "lr_schedule": "constant", "swa_after": 500, "per_class": True}
D2CFL = {
    "sampling": "dirichlet",
    "with_average": False,
    "with_clients": False,
    "labels": "hard",
    "epochs": 5,
    "optimizer": "adam",
    "lr_schedule": "constant",
    "lr_epoch_decay": 0.95,
    "weight_decay": 0.0,
    "swa_after": None,
    "reestimate": False,
    "warm_up": 10,
}


@presets(paper={"sampling": "gaussian", "lr_schedule": "cyclic"}, released=RELEASED, d2cfl=D2CFL)
def fedbe(
    *,
    samples: int = 10, sampling: Sampling = "gaussian", alpha: float = 1.0, spread: float = 0.1,
    with_average: bool = True, with_clients: bool = True, sharpen: float = 0.5,
    labels: Labels = "soft", rule: Rule = "max", threshold: float = 0.75,
    epochs: int = 20, steps: int | None = None, batch_size: int = 128,
    optimizer: Literal["sgd", "adam"] = "sgd", server_lr: float = 1e-3, momentum: float = 0.9,
    lr_schedule: Literal["cyclic", "constant"] = "cyclic", lr_low: float = 4e-4, cycle: int = 25,
    lr_epoch_decay: float = 1.0, weight_decay: float = 1e-5, per_class: bool = False,
    swa_after: int | None = 0, reestimate: bool = True, distill_share: float = 1.0,
    part: Part = "all", warm_up: int = 0, weighting: Weighting = "size", buffers: BufferPolicy = "average",
) -> Method:  # fmt: skip
    """FedBE: models drawn from a distribution over the clients' teach the average, beside it and the clients.

        mu = w_0 = sum_{k in S} p_k w_k,    v = sum_{k in S} p_k (w_k - mu)^2,    w_s ~ N(mu, diag v), s = 1 .. samples
        p(x) = mean of softmax(z(x; .)) over w_0, all w_s and all w_k, sharpened: p_c^(1/T) / sum_j p_j^(1/T)
        w <- mean of snapshots of SGD on mean_x KL(p(x) || softmax(z(x; w))) from w_0

    Args:
        preset: "correct" and "paper" (the defaults below), "released" (the authors' code), or "d2cfl" (FedBE as D2C-FL
            ran it: Dirichlet, the samples alone teach, hard labels).
        samples: number of drawn models.
        sampling: "gaussian"; "dirichlet", sum_k g_k p_k w_k / sum_j g_j p_j with g ~ Dir(alpha); or "direction", the
            authors' code: a Gaussian over the directions of the clients' moves, tensor by tensor.
        alpha: concentration of the Dirichlet distribution; the larger, the nearer to the average.
        spread: of "direction": factor of the standard deviation.
        with_average: the average teaches too.
        with_clients: the clients' models teach too.
        sharpen: temperature of the sharpening (T), below 1 sharper; 1 switches it off.
        labels: "soft", the sharpened probabilities; "hard", one class a sample, where teachers are sure enough of it.
        rule: of hard labels: "max", the surest teacher decides; "mean", the mean of the teachers' probabilities does.
        threshold: probability from which a hard label is kept (tau).
        epochs: passes over the unlabeled set each round; 0 is FedAvg bit for bit.
        steps: distillation steps instead; set, epochs do not count.
        batch_size: unlabeled samples in a step.
        optimizer: of the student, new every round: "sgd" or "adam".
        server_lr: its learning rate, at the start of a cycle.
        momentum: of "sgd".
        lr_schedule: "cyclic", from server_lr down to lr_low along a line in each cycle, or "constant".
        lr_low: the rate at the end of a cycle.
        cycle: steps of a cycle, and between two snapshots.
        lr_epoch_decay: factor of the rate from one pass over the unlabeled set to the next.
        weight_decay: of the student.
        per_class: the loss is the mean over samples and classes, 1 / K of the usual.
        swa_after: snapshots are averaged from this step on; None switches it off (in TOML: a large number), and
            without any snapshot the result is the last model.
        reestimate: BatchNorm statistics are taken anew on the unlabeled set at the end (not with part = "head").
        distill_share: part of the unlabeled rows that is distilled on, the same for all methods of a run.
        part: what the student trains: "all", or "head", the last layer (linear evaluation, with local.part = "head").
        warm_up: first rounds without distillation.
        weighting: p_k = n_k / sum_j n_j ("size") or 1 / |S| ("uniform"), of the average and of mu, v, g.
        buffers: BatchNorm statistics of the average and of drawn models: "average", "pooled", "reset", "local" or
            "last" (see fedavg).

    Reveals: the trained model and the number of samples n_k; the server runs every client's model on its own, so
        secure aggregation is impossible.
    Differs from the paper: we know its text from quotations only: when it starts to average snapshots and the
        Dirichlet's alpha are our choice. Parameters are drawn, BatchNorm statistics are not (a variance could be
        negative); in "direction" a tensor that nobody moved stays, where the code divides 0 by 0. One architecture.
    Reference: Chen and Chao, FedBE: Making Bayesian Model Ensemble Applicable to Federated Learning, ICLR 2021,
        Algorithm 1.
    """
    training = Training(
        steps=steps, epochs=epochs, batch_size=batch_size, optimizer=optimizer, lr=server_lr, momentum=momentum,
        lr_schedule=lr_schedule, lr_low=lr_low, lr_cycle=cycle, lr_epoch_decay=lr_epoch_decay,
        weight_decay=weight_decay, part=part,
    )  # fmt: skip
    student = Student(
        training, per_class=per_class, hard=labels == "hard", average_after=swa_after, average_every=cycle,
        reestimate=reestimate,
    )  # fmt: skip
    check_student(student)
    temperature_of("sharpen", sharpen)
    positive_share("distill_share", distill_share)
    teachers = _ensemble(_sampler(samples, sampling, alpha, spread, weighting), with_average, with_clients)
    believe = belief_of(
        labels, pool="probabilities", temperature=1.0, exponent=1.0 / sharpen, rule=rule, threshold=threshold
    )  # fmt: skip
    step = distill(student, teachers=teachers, pool=believe, distill_share=distill_share)
    refine = placed(step, warm_up=warm_up)
    return Method(cross_entropy(), average(weighting, buffers=buffers), (refine,))


def _sampler(count: int, sampling: Sampling, alpha: float, spread: float, weighting: Weighting) -> Teachers | None:
    not_negative("samples", count)
    positive("alpha", alpha)
    positive("spread", spread)
    if not count:
        return None
    if sampling == "direction":
        return partial(direction_samples, count=count, scale=spread)
    if sampling == "dirichlet":
        return partial(dirichlet_samples, count=count, alpha=alpha, weighting=weighting)
    return partial(gaussian_samples, count=count, weighting=weighting)


def _ensemble(sampler: Teachers | None, with_average: bool, with_clients: bool) -> Teachers:
    if sampler is None and not with_average and not with_clients:
        raise FedstillError("method.samples = 0 leaves nobody to teach: set with_average or with_clients to true")

    def teach(candidate: Weights, round: Round) -> Weights:
        groups = [stack([candidate])] if with_average else []
        groups += [] if sampler is None else [sampler(candidate, round)]
        groups += [round.uploads.weights] if with_clients else []
        return groups[0] if len(groups) == 1 else concatenate(groups)

    return teach
