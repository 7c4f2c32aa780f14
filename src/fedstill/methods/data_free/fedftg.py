"""FedFTG."""

from __future__ import annotations

from typing import Literal

from fedstill.compose.wrappers import send_only
from fedstill.core.limits import CountOrNone, LargestShare, Several
from fedstill.core.types import Method
from fedstill.local.terms import cross_entropy
from fedstill.methods.data_free.hard_samples import Contest, Distance, Ensemble, Labels, Level, hard_samples, hardness
from fedstill.methods.data_free.inventing import Generator, InventedStudent
from fedstill.server.aggregate import average

Discrepancy = Literal["l1", "kl", "mse", "none"]
SOUGHT: dict[Discrepancy, Distance] = {"l1": "l1", "kl": "reverse_kl", "mse": "mse"}
Report = Literal["tuned", "average"]


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
    largest_share: LargestShare | None = None,
    report: Report = "tuned",
) -> Method:
    """FedFTG: the averaged model learns from the clients' models on samples that a generator finds hard for it.

        each iteration:  y ~ p(y) = n^y / n,  z ~ N(0, 1),  x = G(z, y; theta),  a_k = n_k^y / n^y (n over the cohort)
        theta <- Adam on  sum_k a_k (-mean_c |s_c(x) - t_kc(x)| + lam_cls CE(t_k(x), y))
                          + lam_dis exp(-mean_{i, j} d_z(i, j) d_x(i, j))
        w <- SGD on  sum_k a_k KL(softmax t_k(x) || softmax s(x; w)) / K

    s are the logits of the averaged model w, t_k those of client k's model. It is made to be joined with any local
    method: scaffold+fedftg, fedlmd+fedftg; alone it is FedAvg with fine-tuning.

    Args:
        iterations: exchanges of generator and model each round (I); 0 is the method without it, bit for bit.
        batch_size: invented samples in a step (B).
        generator: the generator and how it learns in an exchange (generator.steps is I_g); its Adam starts afresh every
            round. The paper has generator.noise = 256 for CIFAR-100 and larger images.
        student: how the model learns in an exchange (student.steps is I_d). student.batch_norm = "train", as in the
            code, cost five to eight points with ResNet-18.
        input: the generator invents a "sample" (FedFTG(I)), or the "feature" that the last layer reads (FedFTG(F)):
            then only that layer is fine-tuned.
        discrepancy: what makes a sample hard: "l1" of the logits, "kl" (of the model from the client's, as printed),
            "mse" of the logits, or "none": no search for hard samples.
        labels: classes are asked for in the cohort's proportions ("quota") or all as often ("uniform").
        ensemble: clients count by their share of the class ("class") or all alike, 1 / |S| ("uniform").
        largest_share: most that a client counts for a class, in even shares 1 / |S|; what is above goes to the others.
            None: no bound, and a client that claims to hold a class alone decides about it alone.
        report: the run's model, whose accuracy is told: the "tuned" one, which the next clients start from, or the
            "average" of this round's clients, which is better with student.batch_norm = "train". Training is the same.
            Nothing may refine the model after "average".

    Tries: student.lr = 0.03, 0.1, 0.3; iterations = 5, 10, 20; generator.lr = 0.003, 0.01.
    Reveals: the trained model, the number of samples n_k and how many of them are of each class (unless labels and
        ensemble are both "uniform"); the server runs every client's model on its own, so secure aggregation is
        impossible.
    Differs from the paper: printed are KL(model || client) for both players and 2-norms in the diversity, which
        underflows to 0 on images; the defaults are the code's L1 on logits, forward KL over K and means. As printed the
        generator takes a step on all clients together (the code one for each: as accurate, and slower), and the
        cross-entropy counts class by class, which the code lost. The model is fine-tuned in eval mode, the code's in
        train mode. Statistics of SCAFFOLD and FedDyn refer to the fine-tuned model, which is what clients receive
        (SCAFFOLD's code takes the model before fine-tuning). The printed and the released forms are in
        benchmarks/fedftg/released.py.
    Reference: Zhang et al., Fine-tuning Global Model via Data-Free Knowledge Distillation for Non-IID Federated
        Learning, CVPR 2022, Algorithm 2.
    """
    contest = Contest(
        iterations=iterations,
        batch_size=batch_size,
        generator=generator,
        student=student,
        input=input,
        labels=labels,
        ensemble=ensemble,
        largest_share=largest_share,
        hardness=None if discrepancy == "none" else hardness(SOUGHT[discrepancy]),
    )
    step = hard_samples(generator.invents(features=input == "feature"), contest)
    tuning = send_only(step) if report == "average" and iterations else step
    instead = 'fedftg(labels="uniform", ensemble="uniform")'
    return Method(cross_entropy(), average(), (tuning,), without_counts=instead)
