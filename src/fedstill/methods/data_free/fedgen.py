"""FedGen."""

from __future__ import annotations

from fedstill.compose.combine import combine
from fedstill.core.types import Method, Model, Training
from fedstill.local.terms import cross_entropy
from fedstill.methods.data_free.feature_generator import (
    ClassWeights,
    GeneratorTraining,
    NoiseKind,
    generated_features,
    train_generator,
)
from fedstill.methods.data_free.generators import build_generator, check_generator
from fedstill.methods.data_free.inventing import GeneratorFor
from fedstill.methods.options import batch_of_a_generator, not_negative, positive, presets, share
from fedstill.server.aggregate import BufferPolicy, Weighting, average

PAPER = {"match_weight": 0.0, "noise_kind": "normal"}
RELEASED = {"class_weights": "batch"}
FEDFTG = {"generator": "features", "noise": 100, "noise_kind": "normal", "generator_lr": 0.01, "lr_decay": 0.998}
FEDFTG |= {"batch_size": 50, "ratio": 0.64}


@presets(paper=PAPER, released=RELEASED, fedftg=FEDFTG)
def fedgen(
    *,
    label_weight: float = 10.0, match_weight: float = 10.0, decay: float = 0.98, floor: float = 1e-4,
    gen_batch: int = 32, ratio: float = 1.0,
    generator: str = "dense", noise: int = 32, noise_kind: NoiseKind = "uniform",
    steps: int = 50, batch_size: int = 32, generator_lr: float = 3e-4, lr_decay: float = 0.98,
    weight_decay: float = 1e-2, diversity: float = 1.0, class_weights: ClassWeights = "sample",
    keep_optimizer: bool = True,
    weighting: Weighting = "size", buffers: BufferPolicy = "average",
) -> Method:  # fmt: skip
    """FedGen: clients also learn from features that a generator on the server invents for every class.

        server:  G <- Adam on sum_{k in S} mean_i omega_k(y_i) CE(h_k(G(z_i, y_i)), y_i) + eta L_div
                 omega_k(y) = (n_k^y + 1) / sum_{j in S} (n_j^y + 1)
                 L_div = exp(-mean_{i, j} d_z(i, j) d_G(i, j))
        client:  CE(h(f(x)), y) + r a_t CE(h(G(z, y')), y') + b_t KL(softmax h(G(z', y)) || softmax h(f(x)))
                 a_t = max(floor, a decay^(t - 1)), b_t likewise; a_1 = b_1 = 0

    f is the extractor, h the head, z noise; y_i are labels of the cohort and y' labels that any client held so far,
    each as likely as the others. d_z is the mean square and d_G the mean absolute difference of two samples. The
    second term moves the head alone, the target of the third gets no gradient. G persists over the rounds.

    Args:
        preset: "correct" (the defaults below), "paper" (without the client's matching term and with Gaussian noise, and
            nothing else: all other numbers are the code's), "released" (the authors' code, with what it does to
            omega), "fedftg" (as FedFTG ran it: its Table 7(b), 72 M parameters, clients' batches of 50).
        label_weight: weight of the generated samples' cross-entropy (a); with match_weight = 0 too, FedAvg bit for bit.
        match_weight: weight of the term that is in the code only (b).
        decay: factor of both from round to round.
        floor: neither falls below it, unless it is 0.
        gen_batch: generated samples in a client's step.
        ratio: r; in the authors' code gen_batch / local.batch_size, which is 32 / 32 there.
        generator: its network: "dense" (the authors', 256 wide), "features" or "features_large" (FedFTG's).
        noise: numbers in z.
        noise_kind: "uniform" in [0, 1), as in the code, or "normal".
        steps: of the generator each round.
        batch_size: samples in such a step.
        generator_lr: learning rate of its Adam in round 1.
        lr_decay: factor of that from round to round.
        weight_decay: of the generator.
        diversity: weight of L_div (eta).
        class_weights: omega counts sample by sample ("sample"), or its mean over a batch with the mean of the
            cross-entropies ("batch", the released code); "uniform" needs no label counts: omega = 1 / |S|, all classes.
        keep_optimizer: what Adam remembers of the generator goes on from round to round; false: a fresh one.
        weighting: of the average: p_k = n_k / sum_j n_j ("size") or 1 / |S| ("uniform").
        buffers: BatchNorm statistics of the new model: "average", "pooled", "reset", "local" or "last" (see fedavg).

    Reveals: the trained model, the number of samples n_k and how many of them are of each class (unless class_weights
        is "uniform"); the server runs every client's head on its own, so secure aggregation is impossible. What the
        heads know of a class goes to all clients as a generator of its features, and with it which classes the clients
        seen so far hold.
    Differs from the paper: clients train whole epochs on their data; the code's "local epochs" are 20 mini-batches, and
        its generated samples end after 20 of them. omega counts the samples that a client holds, there those that it
        has seen in the round, with repetition. y' are labels of clients that took part so far, there of all clients.
        The generator is sent in round 1 too, where it counts nothing. Every option is the code's where the text has
        none; r does not follow local.batch_size by itself.
    Reference: Zhu et al., Data-Free Knowledge Distillation for Heterogeneous Federated Learning, ICML 2021,
        Algorithm 1; as a baseline: Zhang et al., Fine-tuning Global Model via Data-Free Knowledge Distillation for
        Non-IID Federated Learning, CVPR 2022.
    """
    _check(generator, steps=steps, gen_batch=gen_batch, noise=noise, generator_lr=generator_lr, lr_decay=lr_decay)
    least = {"label_weight": label_weight, "match_weight": match_weight, "floor": floor, "ratio": ratio}
    for key, value in {**least, "weight_decay": weight_decay, "diversity": diversity}.items():
        not_negative(key, value)
    share("decay", decay)
    batch_of_a_generator("batch_size", batch_size)
    step = average(weighting, buffers=buffers)
    if not label_weight and not match_weight:
        return Method(cross_entropy(), step)
    made = _generator_for(generator, noise)
    term = generated_features(
        made, noise=noise, noise_kind=noise_kind, count=gen_batch, ratio=ratio,
        label_term=label_weight > 0, match_term=match_weight > 0,
    )  # fmt: skip
    training = Training(
        steps=steps, batch_size=batch_size, optimizer="adam", lr=generator_lr, lr_decay=lr_decay,
        weight_decay=weight_decay, keep_optimizer=keep_optimizer,
    )  # fmt: skip
    how = GeneratorTraining(
        training, noise, noise_kind, diversity, class_weights, label_weight, match_weight, decay, floor
    )
    server = (train_generator(made, how),)
    return Method(combine(cross_entropy(), term), step, server, without_counts="fedgen(class_weights='uniform')")


def _check(generator: str, **above: float) -> None:
    check_generator(generator)
    for key, value in above.items():
        positive(key, value)


def _generator_for(name: str, noise: int) -> GeneratorFor:
    def made(model: Model) -> Model:
        shape = (model.feature_size,)
        return build_generator(name, shape=shape, classes=model.classes, noise=noise, inputs=model.input_shape)

    return made
