"""FedGen."""

from __future__ import annotations

from dataclasses import replace

from fedstill.compose.combine import combine
from fedstill.core.limits import Count, LargestShare, NotNegative, Share
from fedstill.core.types import Method, Model, ServerStep
from fedstill.local.terms import cross_entropy
from fedstill.methods.data_free.feature_generator import (
    ClassWeights,
    FeatureGenerator,
    GeneratorTraining,
    generated_features,
    train_generator,
)
from fedstill.methods.data_free.generators import build_generator, check_generator
from fedstill.server.aggregate import average


def fedgen(
    *,
    label_weight: NotNegative = 10.0,
    match_weight: NotNegative = 0.0,
    decay: Share = 0.98,
    floor: NotNegative = 1e-4,
    gen_batch: Count = 32,
    ratio: NotNegative = 1.0,
    generator: FeatureGenerator = FeatureGenerator(),
    class_weights: ClassWeights = "sample",
    largest_share: LargestShare | None = None,
) -> Method:
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
        label_weight: weight of the generated samples' cross-entropy (a); with match_weight = 0 too, FedAvg bit for bit.
        match_weight: weight of the term that is in the code only (b); 10 there.
        decay: factor of both from round to round.
        floor: neither falls below it, unless it is 0.
        gen_batch: generated samples in a client's step.
        ratio: r; in the authors' code gen_batch / local.batch_size, which is 32 / 32 there.
        generator: the generator on the server and how it learns each round.
        class_weights: a client's cross-entropy counts by its share of the sample's class ("sample"); "uniform" needs no
            label counts: omega = 1 / |S|, all classes.
        largest_share: most that a client counts for a class, in even shares 1 / |S|; what is above goes to the others.
            None: no bound, and a client that claims to hold a class alone decides about it alone.

    Tries: label_weight = 1.0, 3.0, 10.0; match_weight = 0.0, 1.0; generator.lr = 0.0003, 0.001.
    Reveals: the trained model, the number of samples n_k and how many of them are of each class (unless class_weights
        is "uniform"); the server runs every client's head on its own, so secure aggregation is impossible. What the
        heads know of a class goes to all clients as a generator of its features, and with it which classes the clients
        seen so far hold.
    Differs from the paper: clients train whole epochs on their data; the code's "local epochs" are 20 mini-batches, and
        its generated samples end after 20 of them. omega counts the samples that a client holds, there those that it
        has seen in the round, with repetition. y' are labels of clients that took part so far, there of all clients.
        The generator is sent in round 1 too, where it counts nothing. Every option is the code's where the text has
        none, but for match_weight: the text has no such term, and with a weight of 10 clients do not learn at a rate of
        0.1. r does not follow local.batch_size by itself. The text alone is the default with generator.noise_kind =
        "normal". The code's omega counts by the batch: benchmarks/fedgen/released.py.
    Reference: Zhu et al., Data-Free Knowledge Distillation for Heterogeneous Federated Learning, ICML 2021,
        Algorithm 1; as a baseline: Zhang et al., Fine-tuning Global Model via Data-Free Knowledge Distillation for
        Non-IID Federated Learning, CVPR 2022.
    """
    how = GeneratorTraining(generator, class_weights, label_weight, match_weight, decay, floor)
    how = replace(how, largest_share=largest_share)
    return with_generated_features(how, average(), gen_batch=gen_batch, ratio=ratio)


def with_generated_features(
    how: GeneratorTraining, step: ServerStep, *, gen_batch: int = 32, ratio: float = 1.0
) -> Method:
    """Return FedGen on top of a server step that averages."""
    name, noise = check_generator(how.generator.network), how.generator.noise
    if not how.label_weight and not how.match_weight:
        return Method(cross_entropy(), step)

    def made(model: Model) -> Model:
        shape = (model.feature_size,)
        return build_generator(name, shape=shape, classes=model.classes, noise=noise, inputs=model.input_shape)

    term = generated_features(
        made,
        noise=noise,
        noise_kind=how.generator.noise_kind,
        count=gen_batch,
        ratio=ratio,
        label_term=how.label_weight > 0,
        match_term=how.match_weight > 0,
    )
    server = (train_generator(made, how),)
    return Method(combine(cross_entropy(), term), step, server, without_counts="fedgen(class_weights='uniform')")
