"""FedDF without data."""

from __future__ import annotations

from typing import Any

from fedstill.core.types import Method, Model, Training
from fedstill.local.terms import cross_entropy
from fedstill.methods.data_free.generators import build_generator, check_generator
from fedstill.methods.data_free.inventing import GeneratorFor
from fedstill.methods.data_free.teach_invented import BatchNorm, Ensemble, Labels, Teaching, teach_invented
from fedstill.methods.options import batch_of_a_generator, not_negative, positive
from fedstill.server.aggregate import BufferPolicy, Weighting, average
from fedstill.server.distill.targets import Pool


def feddf_gen(
    *,
    generator_steps: int = 50, student_steps: int = 20, batch_size: int = 50, noise: int = 100,
    generator: str = "auto", lam_cls: float = 1.0, lam_dis: float = 1.0,
    generator_lr: float = 0.01, server_lr: float = 0.1, lr_decay: float = 0.998, weight_decay: float = 1e-3,
    pool: Pool = "probabilities", labels: Labels = "quota", ensemble: Ensemble = "uniform",
    batch_norm: BatchNorm = "restore",
    weighting: Weighting = "size", buffers: BufferPolicy = "average",
) -> Method:  # fmt: skip
    """FedDF (generator): FedDF whose unlabeled samples a generator on the server invents.

        G <- Adam on exp(-mean_{i, j} d_z(i, j) d_x(i, j)) + mean_k CE(z(G(e, y); w_k), y),   e ~ N(0, 1)
        w <- SGD on KL(mean_k softmax(z(x; w_k)) || softmax(z(x; w))),   x = G(e, y),   from sum_k p_k w_k

    d_z is the mean square and d_x the mean absolute difference of two noises and of what is made of them. G persists
    from round to round.

    Args:
        generator_steps: of the generator each round, before the student's.
        student_steps: of the student each round; 0 is FedAvg (of the same weighting) bit for bit, and trains no
            generator.
        batch_size: invented samples in a step of either.
        noise: numbers that the generator starts from (d).
        generator: its network, by name; "auto" goes by the shape of a sample.
        lam_cls: weight of the teachers' cross-entropy in the generator's loss.
        lam_dis: weight of the diversity in it.
        generator_lr: learning rate of the generator's Adam in the first round.
        server_lr: learning rate of the student's SGD in the first round.
        lr_decay: factor of both from round to round.
        weight_decay: of both.
        pool: "probabilities" averages the teachers' softmax outputs, "logits" what goes into it.
        labels: classes y are asked for in the proportions that the cohort's clients hold ("quota"), or all as often
            ("uniform"), for which nobody must tell them.
        ensemble: teachers count alike ("uniform"), or for class y by the share of it that they hold ("class").
        batch_norm: BatchNorm of the student: "restore", train mode, and the averaged statistics afterwards; "train",
            its statistics become those of invented samples, as in FedFTG's code, which costs accuracy; "frozen", eval
            mode.
        weighting: of the average: p_k = n_k / sum_j n_j ("size") or 1 / |S| ("uniform").
        buffers: BatchNorm statistics before distillation: "average", "pooled", "reset", "local" or "last" (see fedavg).

    Reveals: the trained model, the number of samples n_k and how many of them are of each class (unless labels and
        ensemble are "uniform"); the server runs every client's model on its own, so secure aggregation is impossible.
    Differs from the paper: FedFTG's text names the idea alone; all numbers are those of its code. There G makes a batch
        anew for every teacher, so that its BatchNorm statistics move eleven times in a step; here once. And there the
        student keeps statistics of invented samples (batch_norm = "train").
    Reference: Lin et al., Ensemble Distillation for Robust Model Fusion in Federated Learning, NeurIPS 2020; with a
        generator: Zhang et al., Fine-tuning Global Model via Data-Free Knowledge Distillation for Non-IID Federated
        Learning, CVPR 2022, Section 4.1.
    """
    for key, value in {"generator_steps": generator_steps, "student_steps": student_steps}.items():
        not_negative(key, value)
    for key, rate in {"generator_lr": generator_lr, "server_lr": server_lr, "lr_decay": lr_decay}.items():
        positive(key, rate)
    for key, weight in {"lam_cls": lam_cls, "lam_dis": lam_dis, "weight_decay": weight_decay}.items():
        not_negative(key, weight)
    positive("noise", noise)
    batch_of_a_generator("batch_size", batch_size)
    both: dict[str, Any] = {"batch_size": batch_size, "lr_decay": lr_decay, "weight_decay": weight_decay}
    teaching = Teaching(
        Training(steps=generator_steps, optimizer="adam", lr=generator_lr, **both),
        Training(steps=student_steps, optimizer="sgd", lr=server_lr, **both),
        noise=noise, pool=pool, labels=labels, ensemble=ensemble, lam_cls=lam_cls, lam_dis=lam_dis,
        batch_norm=batch_norm,
    )  # fmt: skip
    step = teach_invented(teaching, _generator_for(check_generator(generator), noise))
    instead = 'feddf_gen(labels="uniform", ensemble="uniform")'
    return Method(cross_entropy(), average(weighting, buffers=buffers), (step,), without_counts=instead)


def _generator_for(name: str, noise: int) -> GeneratorFor:
    def made(model: Model) -> Model:
        return build_generator(name, shape=model.input_shape, classes=model.classes, noise=noise)

    return made
