"""Pre-training on text."""

from __future__ import annotations

from fedstill.core.errors import FedstillError
from fedstill.core.types import Method, Training
from fedstill.local.terms import cross_entropy
from fedstill.methods.options import not_negative, positive
from fedstill.methods.pretraining.words import masked_tokens, next_words
from fedstill.server.aggregate import BufferPolicy, Weighting, average
from fedstill.server.pretrain import Pretext, pretrain


def masked_lm(
    *,
    epochs: int = 3,
    share: float = 0.15,
    batch_size: int = 32,
    pretrain_lr: float = 1e-3,
    weight_decay: float = 0.01,
    clip: float | None = 1.0,
    pretrain_seed: int | None = None,
    mask_id: int | None = None,
    first_word_id: int | None = None,
    weighting: Weighting = "size",
    buffers: BufferPolicy = "average",
) -> Method:
    """Masked prediction: before round 1 the text network learns to guess hidden words of the unlabeled text.

        L = mean over hidden tokens of -log p(x_i | x with 80 % of them masked, 10 % replaced, 10 % left)

    It is made to be joined, FedAUX's "+P" for text: fedaux+masked_lm(epochs=3); alone it is FedAvg from a pre-trained
    network. The loss has a head of its own, which is thrown away; the pooling of [CLS] and the classifier are not
    pre-trained. The extractor is kept on disk and taken again by every run that asks for the same.

    Args:
        epochs: passes over the unlabeled text; 0 is FedAvg bit for bit.
        share: of a text's words that are hidden, at least one; new ones in every epoch.
        batch_size: texts in a step.
        pretrain_lr: learning rate of AdamW.
        weight_decay: of AdamW.
        clip: bound of the gradient norm; None switches it off (in TOML: a large number).
        pretrain_seed: draws first weights, batches and masks, so that runs of different seeds share one extractor; None
            takes the run's seed and first weights.
        mask_id: id of [MASK]; None takes the tokenizer's (4 in one that fedstill trains, 103 in bert-base-uncased).
        first_word_id: smaller ids are marks, never hidden and never put in place of a word; None takes the first that
            is no mark in the tokenizer (5 in one that fedstill trains, 999 in bert-base-uncased).
        weighting: "size" takes p_k = n_k / sum_j n_j, "uniform" takes p_k = 1 / |S|.
        buffers: BatchNorm statistics of the new model: "average", "pooled", "reset", "local" or "last" (see fedavg).

    Reveals: nothing beyond what the method that it is joined with sends: clients have no part in it.
    Differs from the paper: FedAUX pre-trains by next-word prediction (see next_token); this is BERT's own task, without
        the prediction of whether two sentences follow each other. Masks are drawn anew in every epoch.
    Reference: Devlin et al., BERT: Pre-training of Deep Bidirectional Transformers, NAACL 2019, Sect. 3.1; Sattler et
        al., FedAUX, TNNLS 2021, Sect. V.
    """
    if not 0.0 < share < 1.0:
        raise FedstillError(f"method.share = {share} is impossible: it must be above 0 and below 1 (BERT: 0.15)")
    for key, value in {"mask_id": mask_id, "first_word_id": first_word_id}.items():
        if value is not None:
            positive(key, value)
    training = _training(epochs, batch_size, pretrain_lr, weight_decay, clip)
    pretext = masked_tokens(share, training, mask_id=mask_id, first_word_id=first_word_id)
    return _from_pretrained(pretext, pretrain_seed, weighting, buffers)


def next_token(
    *,
    epochs: int = 3,
    batch_size: int = 32,
    pretrain_lr: float = 1e-3,
    weight_decay: float = 0.01,
    clip: float | None = 1.0,
    pretrain_seed: int | None = None,
    weighting: Weighting = "size",
    buffers: BufferPolicy = "average",
) -> Method:
    """Next-token prediction: before round 1 the text network learns to continue the unlabeled text.

        L = mean over i of -log p(x_{i+1} | x_1, ..., x_i)

    Each token sees itself and those before it; in the rounds that follow tokens see the whole text again. It is made to
    be joined, FedAUX's "+P" for text: fedaux+next_token(epochs=3); alone it is FedAvg from a pre-trained network. The
    loss has a head of its own, which is thrown away; the pooling of [CLS] and the classifier are not pre-trained.
    The extractor is kept on disk and taken again by every run that asks for the same.

    Args:
        epochs: passes over the unlabeled text; 0 is FedAvg bit for bit.
        batch_size: texts in a step.
        pretrain_lr: learning rate of AdamW.
        weight_decay: of AdamW.
        clip: bound of the gradient norm; None switches it off (in TOML: a large number).
        pretrain_seed: draws first weights and batches, so that runs of different seeds share one extractor; None takes
            the run's seed and first weights.
        weighting: "size" takes p_k = n_k / sum_j n_j, "uniform" takes p_k = 1 / |S|.
        buffers: BatchNorm statistics of the new model: "average", "pooled", "reset", "local" or "last" (see fedavg).

    Reveals: nothing beyond what the method that it is joined with sends: clients have no part in it.
    Differs from the paper: FedAUX names next-word prediction on BookCorpus and no more; optimiser, rate and epochs are
        ours, and words are tokens.
    Reference: Sattler et al., FedAUX: Leveraging Unlabeled Auxiliary Data in Federated Learning, TNNLS 2021, Sect. V.
    """
    training = _training(epochs, batch_size, pretrain_lr, weight_decay, clip)
    return _from_pretrained(next_words(training), pretrain_seed, weighting, buffers)


def _training(epochs: int, batch_size: int, lr: float, weight_decay: float, clip: float | None) -> Training:
    not_negative("epochs", epochs)
    positive("batch_size", batch_size)
    positive("pretrain_lr", lr)
    not_negative("weight_decay", weight_decay)
    if clip is not None:
        positive("clip", clip)
    return Training(
        epochs=epochs, batch_size=batch_size, optimizer="adamw", lr=lr, weight_decay=weight_decay, clip=clip
    )


def _from_pretrained(pretext: Pretext, seed: int | None, weighting: Weighting, buffers: BufferPolicy) -> Method:
    if seed is not None:
        not_negative("pretrain_seed", seed)
    server = (pretrain(pretext, seed=seed),) if pretext.training.epochs else ()
    return Method(cross_entropy(), average(weighting, buffers=buffers), server)
