"""FedDF."""

from __future__ import annotations

from typing import Any, Literal

from fedstill.core.types import Method, Training
from fedstill.local.terms import cross_entropy
from fedstill.methods.mrtf.refinery import TeacherMode
from fedstill.methods.options import positive, positive_share, presets
from fedstill.methods.server_student import AUGMENTATIONS, Augment, Part, belief_of, check_student, check_voters, placed
from fedstill.server.aggregate import BufferPolicy, Weighting, average
from fedstill.server.distill.step import distill
from fedstill.server.distill.student import Student
from fedstill.server.distill.targets import Labels, Pool, Rule, TeacherWeighting, teacher_shares

PAPER = {"steps": 10_000, "patience": 1000}
RELEASED = {**PAPER, "batch_size": 64, "augment": "crop_flip", "buffers": "last"}
MRTF = {"server_lr": 3e-4, "lr_schedule": "constant", "batch_size": 64, "clip": None}
MRTF_RELEASED = {
    "batch_size": 64,
    "weight_decay": 1e-6,
    "clip": 100.0,
    "exponent": 0.75,
    "teacher_mode": "train",
    "teacher_batch": 640,
    "feedback": False,
}
FEDAUX: dict[str, Any] = {"epochs": 1, "server_lr": 5e-5, "lr_schedule": "constant", "clip": None}
FEDAUX |= {"weighting": "size", "distill_share": 0.8}
FEDAUX_RELEASED = {**FEDAUX, "teacher_mode": "train", "weighting": "uniform", "buffers": "local"}
FEDAUX_RELEASED |= {"keep_optimizer": True}
D2CFL = {
    "epochs": 5,
    "lr_schedule": "constant",
    "lr_epoch_decay": 0.95,
    "clip": None,
    "labels": "hard",
    "warm_up": 10,
    "weighting": "size",
}


@presets(
    paper=PAPER,
    released=RELEASED,
    mrtf=MRTF,
    mrtf_released=MRTF_RELEASED,
    fedaux=FEDAUX,
    fedaux_released=FEDAUX_RELEASED,
    d2cfl=D2CFL,
)
def feddf(
    *,
    steps: int = 500, epochs: int | None = None, batch_size: int = 128, augment: Augment = "none",
    optimizer: Literal["adam", "sgd"] = "adam", server_lr: float = 1e-3,
    lr_schedule: Literal["cosine", "constant"] = "cosine", lr_epoch_decay: float = 1.0,
    weight_decay: float = 0.0, clip: float | None = 5.0,
    pool: Pool = "logits", temperature: float = 1.0, exponent: float = 1.0,
    labels: Labels = "soft", rule: Rule = "max", threshold: float = 0.75,
    teacher_weighting: TeacherWeighting = "uniform", teacher_mode: TeacherMode = "eval", teacher_batch: int = 128,
    distill_share: float = 1.0, keep_optimizer: bool = False,
    patience: int | None = None, look_every: int = 100, part: Part = "all", warm_up: int = 0, feedback: bool = True,
    weighting: Weighting = "uniform", buffers: BufferPolicy = "average",
) -> Method:  # fmt: skip
    """FedDF: the averaged model learns, on unlabeled data, what the clients' models say together.

        w_0 = sum_{k in S} p_k w_k,    w <- Adam on mean_x KL(softmax(mean_k z_k(x)) || softmax(z(x; w))) from w_0

    Clients with several architectures (model.name = "mixed"): each prototype starts at the average of its own clients,
    or stays where it was when none of them came; the models of all clients teach every prototype the same.

    Args:
        preset: "correct" (the defaults below), "paper" and "released" (the authors' text and code: up to 10,000 steps
            with early stopping), or FedDF as other papers ran it: "mrtf", "mrtf_released", "fedaux",
            "fedaux_released", "d2cfl" (hard labels).
        steps: distillation steps on the server each round; 0 is FedAvg (of the same weighting) bit for bit.
        epochs: passes over the unlabeled set (hard labels: over the kept rows) instead; set, steps do not count.
        batch_size: unlabeled samples in a step.
        augment: of the student's batches: "none", "flip" or "crop_flip"; the targets are those of the plain images.
        optimizer: of the student: "adam" or "sgd" (without momentum).
        server_lr: its learning rate.
        lr_schedule: "cosine" (to 0, over the steps of a round) or "constant".
        lr_epoch_decay: factor of the rate from one pass over the unlabeled set to the next.
        weight_decay: of the student.
        clip: bound of the gradient norm; None switches it off (in TOML: a large number).
        pool: "logits" averages the teachers' logits, "probabilities" their softmax outputs.
        temperature: divides the logits of teachers and student.
        exponent: power of the pooled probabilities, which are then normalised again; below 1 they get softer.
        labels: "soft", the pooled probabilities; "hard", one class a sample, where teachers are sure enough of it.
        rule: of hard labels: "max", the surest teacher decides; "mean", the mean of the teachers' probabilities does.
        threshold: probability from which a hard label is kept (tau).
        teacher_weighting: teachers count alike ("uniform"), by n_k ("size"), by their accuracy on the validation set
            ("validation"), or alike without the worst on it ("drop_worst").
        teacher_mode: "eval", or "train": teachers answer with BatchNorm by the batch and live dropout.
        teacher_batch: rows at a time in train mode.
        distill_share: part of the unlabeled rows that is distilled on, the same for all methods of a run; below 1 the
            others are left to FedAUX's clients, and here to nobody.
        patience: stop when the best model on the validation set is so many steps old, and take that one; None: all
            steps, the last model, no validation set.
        look_every: steps between two looks at the validation set.
        keep_optimizer: what the student's optimiser remembers goes on from round to round (FedAUX's code); false: a
            fresh one every round. A client's is local.keep_optimizer.
        part: what the student trains: "all", or "head", the last layer (linear evaluation, with local.part = "head").
        warm_up: first rounds without distillation.
        feedback: the student is sent to the clients; false: it is reported, and clients get the average.
        weighting: of the average: p_k = 1 / |S| ("uniform") or n_k / sum_j n_j ("size").
        buffers: BatchNorm statistics before distillation: "average", "pooled", "reset", "local" or "last" (see
            fedavg); distillation then re-estimates them on the unlabeled data.

    Reveals: the trained model and the number of samples n_k; the server runs every client's model on its own, so
        secure aggregation is impossible.
    Differs from the paper: by default no labelled validation set on the server, hence no early stopping and 500 steps
        where the paper allows 10,000 (preset "paper" has both).
        Targets are computed once a round, before augmentation; validation images are never augmented.
    Reference: Lin et al., Ensemble Distillation for Robust Model Fusion in Federated Learning, NeurIPS 2020,
        Algorithm 1.
    """
    training = Training(
        steps=steps if epochs is None else None, epochs=epochs or 0, batch_size=batch_size, optimizer=optimizer,
        lr=server_lr, lr_schedule=lr_schedule, lr_epoch_decay=lr_epoch_decay, weight_decay=weight_decay, clip=clip,
        augment=AUGMENTATIONS[augment], part=part, keep_optimizer=keep_optimizer,
    )  # fmt: skip
    student = Student(training, temperature, hard=labels == "hard", patience=patience, look_every=look_every)
    check_student(student)
    check_voters(labels, teacher_weighting)
    positive("teacher_batch", teacher_batch)
    positive_share("distill_share", distill_share)
    believe = belief_of(
        labels, pool=pool, temperature=temperature, exponent=exponent, rule=rule, threshold=threshold
    )  # fmt: skip
    batch = teacher_batch if teacher_mode == "train" else None
    shares = teacher_shares(teacher_weighting)
    step = distill(student, pool=believe, shares=shares, teacher_batch=batch, distill_share=distill_share)
    refine = placed(step, warm_up=warm_up, feedback=feedback)
    return Method(cross_entropy(), average(weighting, buffers=buffers), (refine,))
