"""MrTF."""

from __future__ import annotations

from typing import Literal

from fedstill.compose.wrappers import every as every_so_often
from fedstill.compose.wrappers import report_only
from fedstill.core.types import Method, ServerStep, Training
from fedstill.local.terms import cross_entropy
from fedstill.methods.mrtf.refinery import Mixture, Refinery, TeacherMode, rectified_distillation
from fedstill.methods.options import not_negative, positive, presets, share, temperature_of
from fedstill.methods.server_student import Part, check_student
from fedstill.server.aggregate import BufferPolicy, Weighting, average
from fedstill.server.distill.student import Student

RELEASED = {
    "sharpness": 1.0,
    "refine_sharpness": 8.0,
    "warm_up": 0,
    "server_lr": 1e-3,
    "lr_schedule": "cosine",
    "weight_decay": 1e-6,
    "clip": 100.0,
    "teacher_mode": "train",
    "mixture": "prior",
    "std_batch": 640,
    "loss_window": 5,
    "smooth": True,
}


@presets(paper={"bounded": False, "feedback": True}, released=RELEASED)
def mrtf(
    *,
    stabilise: bool = True, rectify: bool = True, refine: bool = True,
    sharpness: float = 4.0, refine_sharpness: float = 4.0, floor: float = 0.25, bounded: bool = True, warm_up: int = 5,
    steps: int = 500, server_lr: float = 3e-4, lr_schedule: Literal["constant", "cosine"] = "constant",
    batch_size: int = 64, clip: float | None = None, weight_decay: float = 0.0, part: Part = "all",
    feedback: bool = False, every: int = 1,
    teacher_mode: TeacherMode = "eval", teacher_batch: int = 640, std_batch: int = 0,
    mixture: Mixture = "rectified", loss_window: int = 0, smooth: bool = False,
    weighting: Weighting = "uniform", buffers: BufferPolicy = "average",
) -> Method:  # fmt: skip
    """MrTF: the averaged model is refined on the very data that the server wants labelled.

        teachers:  q_a(x) = softmax(sharpness z_a(x) / std_a),  a in S, the sent model w and the average w_0
        rectify:   q(x) = u sum_{k in S} v_k(x) q_k(x) + (1 - u) (q_w(x) + q_{w_0}(x)) / 2
                   v(x) = softmax_k(-entropy of q_k(x)),  u = floor + (1 - floor) (mean_k loss_k) / ln K
        refine:    c_j = sum_x q_j(x) h(x) / sum_x q_j(x),  q(x) <- softmax_j(-refine_sharpness (1 - cos(h(x), c_j)))
        student:   w <- Adam on mean_x KL(q(x) || softmax(z(x; w))) from w_0 = sum_{k in S} p_k w_k

    Args:
        preset: "correct" (u_t at most 1, the refined model is not sent), "paper" (u_t as printed, it is sent) or
            "released" (the authors' code); each sets other defaults.
        stabilise: divide a teacher's logits by their standard deviation; false: logits as they are.
        rectify: weigh teachers by their entropy and let the global models teach too; false: the clients' models count
            equally. All three modules false is AvgLogit; only this and `refine` false the mean of stable teachers.
        refine: replace the targets by nearness to class centres among the average's features h.
        sharpness: of the stable teachers (tau, an inverse temperature).
        refine_sharpness: of the refinery (tau').
        floor: lower end of u_t, what the clients' models count when their training loss is 0.
        bounded: u_t at most 1; false: beyond it when the mean loss passes ln K, and the global models count negatively.
        warm_up: first rounds without the refinery.
        steps: distillation steps on the server each round; 0 is FedAvg (of the same weighting) bit for bit.
        server_lr: Adam's learning rate.
        lr_schedule: "constant", or "cosine" (to 0, over the steps of a round).
        batch_size: unlabeled samples in a step.
        clip: bound of the gradient norm; None switches it off (in TOML: a large number).
        weight_decay: of the student.
        part: what the student trains: "all", or "head", the last layer (linear evaluation, with local.part = "head").
        feedback: the refined model is sent to the clients; false: it is reported, and clients get the average. In runs
            of 16 rounds and more false was far better (CIFAR-10, VGG8, Dirichlet 1 and 0.1: 78.7 and 42.3 against 35.6
            and 25.1), in the first six on digits true.
        every: refine in rounds `every`, 2 `every`, ... only; in the others the average is all.
        teacher_mode: "eval", or "train": clients' models answer with BatchNorm by the batch and live dropout.
        teacher_batch: rows at a time in train mode.
        std_batch: rows over which a teacher's standard deviation is taken; 0: all.
        mixture: "rectified" is the equation above; "prior" weighs all models together, by softmax(-entropy / K) times
            u / |S| for a client's and (1 - u) / 2 for a global one.
        loss_window: u_t from the mean loss of so many refined rounds before this one (at first ln K); 0: of this round.
        smooth: targets are mixed with those of the last time, which get the share 1 - u_t.
        weighting: of the average: p_k = 1 / |S| ("uniform") or n_k / sum_j n_j ("size").
        buffers: BatchNorm statistics before distillation: "average", "pooled", "reset", "local" or "last" (see fedavg);
            distillation then re-estimates them on the unlabeled data.

    Reveals: the trained model, the number of samples n_k and the mean training loss, which sets u_t; the server runs
        every client's model on its own, so secure aggregation is impossible.
    Differs from the paper: the refined model is not sent to clients, as in the authors' code (preset "paper": it is);
        u_t is clipped to [floor, 1] (preset "paper": it is not); a class without mass gets probability 0, where the
        paper divides 0 by 0; teachers answer in eval mode and a step has 64 samples, on both of which the paper is
        silent; loss_k is the whole local objective, so terms of a joined method count.
    Reference: Li et al., MrTF: Model Refinery for Transductive Federated Learning, 2023, Eqs. 6, 10-12.
    """
    form = Refinery(
        stabilise=stabilise, rectify=rectify, refine=refine, sharpness=sharpness, refine_sharpness=refine_sharpness,
        floor=floor, bounded=bounded, warm_up=warm_up, mixture=mixture, std_batch=std_batch, teacher_mode=teacher_mode,
        teacher_batch=teacher_batch, loss_window=loss_window, smooth=smooth,
    )  # fmt: skip
    student = Student(Training(
        steps=steps, optimizer="adam", lr=server_lr, lr_schedule=lr_schedule, clip=clip, batch_size=batch_size,
        weight_decay=weight_decay, part=part,
    ))  # fmt: skip
    _check(form, student, every)
    refinement = _placed(rectified_distillation(student, form), every, feedback)
    return Method(cross_entropy(), average(weighting, buffers=buffers), (refinement,))


def _placed(step: ServerStep, period: int, feedback: bool) -> ServerStep:
    step = every_so_often(period, step) if period > 1 else step
    return step if feedback else report_only(step)


def _check(form: Refinery, student: Student, every: int) -> None:
    check_student(student)
    share("floor", form.floor)
    not_negative("warm_up", form.warm_up)
    not_negative("std_batch", form.std_batch)
    not_negative("loss_window", form.loss_window)
    positive("teacher_batch", form.teacher_batch)
    temperature_of("sharpness", form.sharpness)
    temperature_of("refine_sharpness", form.refine_sharpness)
    positive("every", every)
