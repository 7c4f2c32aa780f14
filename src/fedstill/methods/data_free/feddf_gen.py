"""FedDF without data."""

from __future__ import annotations

from fedstill.core.limits import Several
from fedstill.core.types import Method
from fedstill.local.terms import cross_entropy
from fedstill.methods.data_free.inventing import Generator, InventedStudent, turn_of
from fedstill.methods.data_free.teach_invented import Ensemble, Labels, Teaching, teach_invented
from fedstill.server.aggregate import average
from fedstill.server.distill.targets import Pool


def feddf_gen(
    *,
    generator: Generator = Generator(steps=50, weight_decay=1e-3),
    student: InventedStudent = InventedStudent(steps=20, batch_norm="restore"),
    batch_size: Several = 50,
    pool: Pool = "logits",
    labels: Labels = "quota",
    ensemble: Ensemble = "uniform",
) -> Method:
    """FedDF (generator): FedDF whose unlabeled samples a generator on the server invents.

        G <- Adam on exp(-mean_{i, j} d_z(i, j) d_x(i, j)) + mean_k CE(z(G(e, y); w_k), y),   e ~ N(0, 1)
        w <- SGD on KL(softmax(mean_k z(x; w_k)) || softmax(z(x; w))),   x = G(e, y),   from sum_k p_k w_k
        p_k = n_k / sum_{j in S} n_j

    d_z is the mean square and d_x the mean absolute difference of two noises and of the samples made of them. G
    persists from round to round.

    Args:
        generator: the generator and how it learns each round, before the student.
        student: how the average learns each round; with student.steps = 0 it is FedAvg (of the same weighting) bit for
            bit, and no generator is trained.
        batch_size: invented samples in a step of either.
        pool: "logits" averages the teachers' logits, as FedDF does, "probabilities" their softmax outputs; "median",
            "trimmed" and "vote" as in feddf.
        labels: classes y are asked for in the proportions that the cohort's clients hold ("quota"), or all as often
            ("uniform"), for which nobody must tell them.
        ensemble: teachers count alike ("uniform"), or for class y by the share of it that they hold ("class").

    Tries: student.lr = 0.03, 0.1, 0.3; student.steps = 5, 20, 50; generator.lr = 0.003, 0.01.
    Reveals: the trained model, the number of samples n_k and how many of them are of each class (unless labels and
        ensemble are "uniform"); the server runs every client's model on its own, so secure aggregation is impossible.
    Differs from the paper: FedFTG's text names the idea alone; all numbers are those of its code, whose pool is
        "probabilities", which costs accuracy with skewed clients. There G makes a batch
        anew for every teacher, so that its BatchNorm statistics move eleven times in a step; here once. And there the
        student keeps statistics of invented samples (student.batch_norm = "train").
    Reference: Lin et al., Ensemble Distillation for Robust Model Fusion in Federated Learning, NeurIPS 2020; with a
        generator: Zhang et al., Fine-tuning Global Model via Data-Free Knowledge Distillation for Non-IID Federated
        Learning, CVPR 2022, Section 4.1.
    """
    teaching = Teaching(
        turn_of(generator, batch_size),
        turn_of(student, batch_size),
        noise=generator.noise,
        pool=pool,
        labels=labels,
        ensemble=ensemble,
        lam_cls=generator.lam_cls,
        lam_dis=generator.lam_dis,
        batch_norm=student.batch_norm,
    )
    step, instead = teach_invented(teaching, generator.invents()), 'feddf_gen(labels="uniform", ensemble="uniform")'
    return Method(cross_entropy(), average(), (step,), without_counts=instead)
