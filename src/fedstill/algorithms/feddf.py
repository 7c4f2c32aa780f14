"""FedDF."""

from __future__ import annotations

from functools import partial

from fedstill.algorithms.options import not_negative, positive, temperature_of
from fedstill.core.compose import chain
from fedstill.core.types import Algorithm, Training
from fedstill.local.terms import cross_entropy
from fedstill.server.average import BufferPolicy, Weighting, average
from fedstill.server.distill import distill
from fedstill.server.pools import Pool, pool_targets
from fedstill.server.student import Student


def feddf(
    *,
    steps: int = 500,
    server_lr: float = 1e-3,
    batch_size: int = 128,
    clip: float | None = 5.0,
    pool: Pool = "logits",
    temperature: float = 1.0,
    weighting: Weighting = "uniform",
    buffers: BufferPolicy = "average",
) -> Algorithm:
    """FedDF: the averaged model learns, on unlabeled data, what the clients' models say together.

        w_0 = sum_{k in S} p_k w_k,    w <- Adam on mean_x KL(softmax(mean_k z_k(x)) || softmax(z(x; w))) from w_0

    Args:
        steps: distillation steps on the server each round; 0 is FedAvg (of the same weighting) bit for bit.
        server_lr: Adam's learning rate, annealed to 0 along a cosine.
        batch_size: unlabeled samples in a step.
        clip: bound of the gradient norm; None switches it off (in TOML: a large number).
        pool: "logits" averages the teachers' logits, "probabilities" their softmax outputs.
        temperature: divides the logits of teachers and student.
        weighting: of the average: p_k = 1 / |S| ("uniform") or n_k / sum_j n_j ("size"); teachers count equally.
        buffers: BatchNorm statistics before distillation: "average", "pooled", "reset" or "local" (see fedavg);
            distillation then re-estimates them on the unlabeled data.

    Reveals: the trained model and the number of samples n_k; the server runs every client's model on its own, so
        secure aggregation is impossible.
    Differs from the paper: no labelled validation set on the server, hence no early stopping and 500 steps where the
        paper allows 10,000; one architecture; unlabeled data are not augmented.
    Reference: Lin et al., Ensemble Distillation for Robust Model Fusion in Federated Learning, NeurIPS 2020,
        Algorithm 1.
    """
    not_negative("steps", steps)
    positive("server_lr", server_lr)
    positive("batch_size", batch_size)
    temperature_of("temperature", temperature)
    if clip is not None:
        positive("clip", clip)
    training = Training(
        steps=steps, optimizer="adam", lr=server_lr, lr_schedule="cosine", clip=clip, batch_size=batch_size
    )
    pooled = partial(pool_targets, pool=pool, temperature=temperature)
    step = distill(Student(training, temperature), pool=pooled)
    return Algorithm(cross_entropy(), chain(average(weighting, buffers=buffers), step))
