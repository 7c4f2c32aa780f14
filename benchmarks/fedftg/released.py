"""FedFTG with the forms of its text and of its public code, beside those that fedstill's fedftg has.

fedstill run --method "benchmarks/fedftg/released.py:fedftg(clients='each')"
"""

from __future__ import annotations

from functools import partial
from typing import Literal

import torch
from torch import Tensor

from fedstill.core.limits import CountOrNone, Several
from fedstill.core.seeds import seed_for, to_signed
from fedstill.core.types import Method, Model, Params, Seed, Weights
from fedstill.local.terms import cross_entropy
from fedstill.methods.data_free.fedftg import SOUGHT, Discrepancy
from fedstill.methods.data_free.hard_samples import (
    Contest,
    Distance,
    Ensemble,
    Labels,
    Level,
    hard_samples,
    hardness,
    recognition,
    wrong,
)
from fedstill.methods.data_free.hard_samples import discrepancy as distance
from fedstill.methods.data_free.inventing import Generator, InventedStudent
from fedstill.server.aggregate import average

StudentLoss = Literal["forward_kl", "reverse_kl", "mse"]


def fedftg(
    *,
    iterations: CountOrNone = 10,
    batch_size: Several = 50,
    generator: Generator = Generator(),
    student: InventedStudent = InventedStudent(),
    input: Level = "sample",
    discrepancy: Discrepancy = "l1",
    labels: Labels = "quota",
    ensemble: Ensemble = "class",
    clients: Literal["joint", "each"] = "joint",
    discrepancy_through: Literal["student", "both"] = "student",
    cls_weights: Literal["sample", "client"] = "sample",
    student_loss: StudentLoss = "forward_kl",
    student_scale: Literal["class", "batch"] = "class",
    reestimate: bool = False,
) -> Method:
    """FedFTG with forms that the paper prints, that its code has, or that we compared with both.

    Args:
        iterations: see fedstill's fedftg, and so for the other options that are not named here.
        clients: the generator takes one step on all clients' models together ("joint", as printed), or one for "each"
            in turn, as in the code.
        discrepancy_through: the generator sees the gradient of the discrepancy through the model alone ("student", the
            code) or through the clients' models too ("both", as printed).
        cls_weights: the cross-entropy counts a_k sample by sample ("sample", as printed) or by its mean over the batch
            ("client", the code).
        student_loss: "forward_kl" (the code); "reverse_kl", KL(softmax s || softmax t_k), as printed; "mse" of logits.
        student_scale: a KL counts 1 / K of itself ("class", the code) or whole ("batch", as printed), which is K times
            the learning rate.
        reestimate: after a round in train mode the BatchNorm statistics of all samples of the round, invented anew.
    """
    kind = None if discrepancy == "none" else SOUGHT[discrepancy]
    seek = None if kind is None else partial(distance, kind) if discrepancy_through == "both" else hardness(kind)
    contest = Contest(
        iterations=iterations,
        batch_size=batch_size,
        generator=generator,
        student=student,
        input=input,
        labels=labels,
        ensemble=ensemble,
        hardness=seek,
        lesson=partial(lesson, student_loss, per_class=student_scale == "class"),
        recognise=recognition if cls_weights == "sample" else recognition_of_clients,
        one_by_one=clients == "each",
        statistics=fresh_statistics if reestimate else None,
    )
    step = hard_samples(generator.invents(features=input == "feature"), contest)
    instead = 'fedftg(labels="uniform", ensemble="uniform")'
    return Method(cross_entropy(), average(), (step,), without_counts=instead)


def lesson(kind: Distance, student: Tensor, teachers: Tensor, share: Tensor, *, per_class: bool) -> Tensor:
    """Return the discrepancy that the student learns to close; per_class: a KL counts 1 / K of itself."""
    gap = distance(kind, student, teachers, share)
    return gap / student.shape[-1] if per_class and kind.endswith("kl") else gap


def recognition_of_clients(teachers: Tensor, y: Tensor, share: Tensor) -> Tensor:
    """Return cls = sum_k mean_i share_ki mean_i CE(t_ki, y_i), the code's form, in which classes do not count."""
    return (wrong(teachers, y).mean(1) * share.mean(1)).sum()


@torch.no_grad()
def fresh_statistics(model: Model, weights: Weights, x: Tensor, seed: Seed) -> Params:
    """Return buffers whose running means and variances are those of the batch x alone.

    A layer moves them from r to r + m (batch - r) by a momentum m of its own: from 0 to m batch, and from the size s of
    that to (1 - m) s more. A layer that does not move them keeps its own. Outside the engine, as `invent_many` is.
    """
    key = torch.tensor(to_signed(seed_for(seed, "statistics")), device=x.device)
    running = [name for name in weights.buffers if name.endswith(("running_mean", "running_var"))]
    if not running or not model.traits.batch_statistics:
        return weights.buffers

    uncounted = {n: torch.zeros_like(b) for n, b in weights.buffers.items() if n.endswith("num_batches_tracked")}

    def moved(held: Params) -> Params:
        start = Weights(weights.params, {**weights.buffers, **uncounted, **held})
        return model.apply(start, x, training=True, seed=key)[1]

    from_zero = moved({name: torch.zeros_like(weights.buffers[name]) for name in running})
    tops = {name: from_zero[name].abs().amax() for name in running}
    size = {name: torch.where(top > 0, top, torch.ones_like(top)) for name, top in tops.items()}
    from_size = moved({name: size[name].expand_as(weights.buffers[name]).clone() for name in running})
    buffers = dict(weights.buffers)
    for name in running:
        momentum = 1.0 - ((from_size[name] - from_zero[name]).double() / size[name]).mean()
        if bool(momentum > 0):
            buffers[name] = from_zero[name] / momentum.to(x)
    return buffers
