"""FedGen as its public code has it."""

from __future__ import annotations

from torch import Tensor

from fedstill.core.limits import Count
from fedstill.core.types import Method
from fedstill.methods.data_free.feature_generator import FeatureGenerator, GeneratorTraining
from fedstill.methods.data_free.fedgen import with_generated_features
from fedstill.server.aggregate import average


def fedgen(*, gen_batch: Count = 32, generator: FeatureGenerator = FeatureGenerator()) -> Method:
    """FedGen whose generator counts the mean cross-entropy of a batch by the mean share of its classes.

    Args:
        gen_batch: generated samples in a client's step.
        generator: the generator on the server and how it learns each round.
    """
    return with_generated_features(GeneratorTraining(generator, spread=mean_of_batch), average(), gen_batch=gen_batch)


def mean_of_batch(share: Tensor) -> Tensor:
    """Return the mean share (C, 1) of a batch, as a broadcast in the code makes it."""
    return share.mean(1, keepdim=True)
