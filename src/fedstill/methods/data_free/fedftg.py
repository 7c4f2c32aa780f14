"""FedFTG."""

from __future__ import annotations

from typing import Any, Literal

from fedstill.compose.wrappers import send_only
from fedstill.core.errors import FedstillError
from fedstill.core.types import Method, Model
from fedstill.local.terms import cross_entropy
from fedstill.methods.data_free.generators import build_generator, check_generator
from fedstill.methods.data_free.hard_samples import (
    BatchNorm,
    ClassWeights,
    Clients,
    Contest,
    Discrepancy,
    Ensemble,
    Labels,
    Level,
    Scale,
    StudentLoss,
    Through,
    hard_samples,
)
from fedstill.methods.data_free.inventing import GeneratorFor
from fedstill.methods.options import batch_of_a_generator, not_negative, positive, presets
from fedstill.server.aggregate import BufferPolicy, Weighting, average

Report = Literal["tuned", "average"]
PAPER: dict[str, Any] = {
    "clients": "joint", "discrepancy": "kl", "discrepancy_through": "both", "student_loss": "reverse_kl",
    "student_scale": "batch", "batch_norm": "train", "weighting": "uniform",
}  # fmt: skip
RELEASED: dict[str, Any] = {"clients": "each", "cls_weights": "client", "batch_norm": "train"}


@presets(paper=PAPER, released=RELEASED)
def fedftg(
    *,
    iterations: int = 10, generator_steps: int = 1, student_steps: int = 5, batch_size: int = 50, noise: int = 100,
    generator: str = "auto", input: Level = "sample", lam_cls: float = 1.0, lam_dis: float = 1.0,
    server_lr: float = 0.1, generator_lr: float = 0.01, lr_decay: float = 0.998, weight_decay: float = 1e-3,
    clients: Clients = "joint", discrepancy: Discrepancy = "l1", discrepancy_through: Through = "student",
    cls_weights: ClassWeights = "sample", student_loss: StudentLoss = "forward_kl", student_scale: Scale = "class",
    labels: Labels = "quota", ensemble: Ensemble = "class", batch_norm: BatchNorm = "frozen",
    report: Report = "tuned", weighting: Weighting = "size", buffers: BufferPolicy = "average",
) -> Method:  # fmt: skip
    """FedFTG: the averaged model learns from the clients' models on samples that a generator finds hard for it.

        each iteration:  y ~ p(y) = n^y / n,  z ~ N(0, 1),  x = G(z, y; theta),  a_k = n_k^y / n^y (n over the cohort)
        theta <- Adam on  sum_k a_k (-mean_c |s_c(x) - t_kc(x)| + lam_cls CE(t_k(x), y))
                          + lam_dis exp(-mean_{i, j} d_z(i, j) d_x(i, j))
        w <- SGD on  sum_k a_k KL(softmax t_k(x) || softmax s(x; w)) / K

    s are the logits of the averaged model w, t_k those of client k's model. It is made to be joined with any local
    method: scaffold+fedftg, fedlmd+fedftg; alone it is FedAvg with fine-tuning.

    Args:
        preset: "correct" (the defaults below: the released code with class weights where it lost them, and one step of
            the generator for all clients), "paper" (as printed) or "released" (as the code is).
        iterations: exchanges of generator and model each round (I); 0 is the method without it, bit for bit.
        generator_steps: steps of the generator in each of them (I_g), for every client where clients = "each".
        student_steps: steps of the model in each of them (I_d).
        batch_size: invented samples in a step (B).
        noise: random numbers that a sample is made of (d); the paper has 256 for CIFAR-100 and larger images.
        generator: its network: "auto" goes by the shape of a sample; "conv", "conv_paper", "deconv", "small", "table";
            for features "dense", "features", "features_large".
        input: what is invented: a "sample" (FedFTG(I)), or the "feature" that the last layer reads (FedFTG(F)): then
            only that layer is fine-tuned.
        lam_cls: weight of the clients' cross-entropy in the generator's loss (lambda_cls).
        lam_dis: weight of the diversity in it (lambda_dis).
        server_lr: learning rate of the model's SGD in the first round.
        generator_lr: learning rate of the generator's Adam in the first round; it starts afresh every round.
        lr_decay: factor of both from round to round.
        weight_decay: of the model's SGD.
        clients: the generator takes one step on all clients' models together ("joint"), or one for "each" in turn.
        discrepancy: what makes a sample hard: "l1" of the logits, "kl" (of the model from the client's, as printed),
            "mse" of the logits, or "none": no search for hard samples.
        discrepancy_through: the generator sees its gradient through the model alone ("student") or through the
            clients' models too ("both").
        cls_weights: the cross-entropy counts a_k sample by sample ("sample") or by its mean over the batch ("client").
        student_loss: "forward_kl" as above; "reverse_kl", KL(softmax s || softmax t_k), as printed; "mse" of logits.
        student_scale: a KL counts 1 / K of itself ("class") or whole ("batch"), which is K times the learning rate.
        labels: classes are asked for in the cohort's proportions ("quota") or all as often ("uniform").
        ensemble: clients count by their share of the class ("class") or all alike, 1 / |S| ("uniform").
        batch_norm: BatchNorm of the model: "frozen", eval mode (dropout too); "train", its statistics become those of
            invented samples, as in the code, which cost five to eight points with ResNet-18; "restore", train mode,
            and the averaged statistics afterwards; "reestimate", train mode, and afterwards the statistics of all
            samples of the round, invented anew.
        report: the run's model, whose accuracy is told: the "tuned" one, which the next clients start from, or the
            "average" of this round's clients, which is better with batch_norm = "train". Training is the same. Nothing
            may refine the model after "average".
        weighting: of the average: p_k = n_k / sum_j n_j ("size") or 1 / |S| ("uniform").
        buffers: BatchNorm statistics before fine-tuning: "average", "pooled", "reset", "local" or "last" (see fedavg).

    Reveals: the trained model, the number of samples n_k and how many of them are of each class (unless labels and
        ensemble are both "uniform"); the server runs every client's model on its own, so secure aggregation is
        impossible.
    Differs from the paper: printed are KL(model || client) for both players and 2-norms in the diversity, which
        underflows to 0 on images; the defaults are the code's L1 on logits, forward KL over K and means. As printed the
        generator takes a step on all clients together (the code one for each: as accurate, and slower), and the
        cross-entropy counts class by class, which the code lost. The model is fine-tuned in eval mode, the code's in
        train mode. Statistics of SCAFFOLD and FedDyn refer to the fine-tuned model, which is what clients receive
        (SCAFFOLD's code takes the model before fine-tuning).
    Reference: Zhang et al., Fine-tuning Global Model via Data-Free Knowledge Distillation for Non-IID Federated
        Learning, CVPR 2022, Algorithm 2.
    """
    contest = Contest(
        iterations=iterations, generator_steps=generator_steps, student_steps=student_steps, batch_size=batch_size,
        noise=noise, lam_cls=lam_cls, lam_dis=lam_dis, server_lr=server_lr, generator_lr=generator_lr,
        lr_decay=lr_decay, weight_decay=weight_decay, clients=clients, discrepancy=discrepancy,
        discrepancy_through=discrepancy_through, cls_weights=cls_weights, student_loss=student_loss,
        student_scale=student_scale, labels=labels, ensemble=ensemble, batch_norm=batch_norm, input=input,
    )  # fmt: skip
    _check(contest)
    step = hard_samples(_generator_for(check_generator(generator), contest), contest)
    tuning = send_only(step) if report == "average" and iterations else step
    instead = 'fedftg(labels="uniform", ensemble="uniform")'
    return Method(cross_entropy(), average(weighting, buffers=buffers), (tuning,), without_counts=instead)


def _check(contest: Contest) -> None:
    for key in ("iterations", "generator_steps", "student_steps", "lam_cls", "lam_dis", "weight_decay"):
        not_negative(key, getattr(contest, key))
    for key in ("noise", "server_lr", "generator_lr", "lr_decay"):
        positive(key, getattr(contest, key))
    batch_of_a_generator("batch_size", contest.batch_size)
    if contest.discrepancy == "none" and not contest.lam_cls and not contest.lam_dis:
        raise FedstillError(
            "method.discrepancy = 'none' with lam_cls = 0 and lam_dis = 0 leaves the generator nothing to learn: "
            "set one of them"
        )


def _generator_for(name: str, contest: Contest) -> GeneratorFor:
    def made(model: Model) -> Model:
        features = contest.input == "feature"
        shape, inputs = ((model.feature_size,), model.input_shape) if features else (model.input_shape, ())
        return build_generator(name, shape=shape, classes=model.classes, noise=contest.noise, inputs=inputs)

    return made
