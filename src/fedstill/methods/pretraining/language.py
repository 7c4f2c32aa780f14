"""Pre-training on text."""

from __future__ import annotations

from fedstill.core.limits import Count, OpenShare
from fedstill.core.types import Method
from fedstill.local.terms import cross_entropy
from fedstill.methods.pretraining.words import masked_tokens, next_words
from fedstill.server.aggregate import average
from fedstill.server.pretrain import Pretext, Pretraining, pretrain


def masked_lm(
    *,
    training: Pretraining = Pretraining(clip=1.0),
    share: OpenShare = 0.15,
    mask_id: Count | None = None,
    first_word_id: Count | None = None,
) -> Method:
    """Masked prediction: before round 1 the text network learns to guess hidden words of the unlabeled text.

        L = mean over hidden tokens of -log p(x_i | x with 80 % of them masked, 10 % replaced, 10 % left)

    It is made to be joined, FedAUX's "+P" for text: fedaux+masked_lm(training.epochs=3); alone it is FedAvg from a
    pre-trained network. The loss has a head of its own, which is thrown away; the pooling of [CLS] and the classifier
    are not pre-trained. The extractor is kept on disk and taken again by every run that asks for the same.

    Args:
        training: how AdamW trains; a step has batch_size texts.
        share: of a text's words that are hidden, at least one; new ones in every epoch.
        mask_id: id of [MASK]; None takes the tokenizer's (4 in one that fedstill trains, 103 in bert-base-uncased).
        first_word_id: smaller ids are marks, never hidden and never put in place of a word; None takes the first that
            is no mark in the tokenizer (5 in one that fedstill trains, 999 in bert-base-uncased).

    Tries: training.lr = 0.0003, 0.001, 0.003; share = 0.15, 0.3.
    Reveals: nothing of its own, because clients have no part in it.
    Differs from the paper: FedAUX pre-trains by next-word prediction (see next_token); this is BERT's own task, without
        the prediction of whether two sentences follow each other. Masks are drawn anew in every epoch.
    Reference: Devlin et al., BERT: Pre-training of Deep Bidirectional Transformers, NAACL 2019, Sect. 3.1; Sattler et
        al., FedAUX, TNNLS 2021, Sect. V.
    """
    pretext = masked_tokens(share, training.by("adamw"), mask_id=mask_id, first_word_id=first_word_id)
    return _from_pretrained(pretext, training)


def next_token(*, training: Pretraining = Pretraining(clip=1.0)) -> Method:
    """Next-token prediction: before round 1 the text network learns to continue the unlabeled text.

        L = mean over i of -log p(x_{i+1} | x_1, ..., x_i)

    Each token sees itself and those before it; in the rounds that follow tokens see the whole text again. It is made to
    be joined, FedAUX's "+P" for text: fedaux+next_token(training.epochs=3); alone it is FedAvg from a pre-trained
    network. The loss has a head of its own, which is thrown away; the pooling of [CLS] and the classifier are not
    pre-trained. The extractor is kept on disk and taken again by every run that asks for the same.

    Args:
        training: how AdamW trains; a step has batch_size texts.

    Tries: training.lr = 0.0003, 0.001, 0.003.
    Reveals: nothing of its own, because clients have no part in it.
    Differs from the paper: FedAUX names next-word prediction on BookCorpus and no more; optimiser, rate and epochs are
        ours, and words are tokens.
    Reference: Sattler et al., FedAUX: Leveraging Unlabeled Auxiliary Data in Federated Learning, TNNLS 2021, Sect. V.
    """
    return _from_pretrained(next_words(training.by("adamw")), training)


def _from_pretrained(pretext: Pretext, training: Pretraining) -> Method:
    server = (pretrain(pretext, seed=training.seed),) if training.epochs else ()
    return Method(cross_entropy(), average(), server)
