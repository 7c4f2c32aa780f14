"""SimCLR pre-training on the server."""

from __future__ import annotations

from fedstill.core.errors import FedstillError
from fedstill.core.limits import Count, CountOrNone, Temperature
from fedstill.core.types import Method
from fedstill.local.terms import cross_entropy
from fedstill.methods.pretraining.contrastive import neighbour_probe, simclr_pretext
from fedstill.server.aggregate import average
from fedstill.server.pretrain import Pretraining, pretrain


def simclr(
    *,
    training: Pretraining = Pretraining(epochs=100, batch_size=512, weight_decay=1e-6),
    temperature: Temperature = 0.5,
    projection: Count = 128,
    hidden: Count = 512,
    neighbours: CountOrNone = 200,
) -> Method:
    """SimCLR: before the first round the server teaches the extractor, on unlabeled images, to know two views of one.

        l_i = -ln( exp(<z_i, z_j> / t) / sum_{k != i} exp(<z_i, z_k> / t) ),   mean over the 2 B views of a batch

    z_i is the projected feature of a random view (crop, flip, colours, grey) at length 1, z_j that of the other view
    of the same image. The projection is thrown away; the classification head is the run's own random one. Then FedAvg.
    It is made to be joined ("+P"): fedavg+simclr, feddf+simclr. The extractor is kept on disk under these options, the
    model, the unlabeled images and the seed: every later run and method with the same ones takes the same bits.

    Args:
        training: how Adam trains; a step has batch_size images (B).
        temperature: t.
        projection: length of z.
        hidden: width of the layer between the features and z.
        neighbours: k of the nearest-neighbour look at the extractor before and after; 0 leaves it out. It needs labels
            that only a simulation has (of the unlabeled images, else of the test set), and decides nothing.

    Tries: temperature = 0.1, 0.5, 1.0; training.lr = 0.0003, 0.001, 0.003.
    Reveals: the same as FedAvg, because pre-training asks nothing of the clients.
    Differs from the paper: the last epoch is kept, where the reference code keeps the one whose nearest-neighbour
        accuracy, by labels, is best. Brightness, contrast and saturation change in random order and the hue after
        them (there its place is random too), without rounding to bytes in between.
    Reference: Chen et al., A Simple Framework for Contrastive Learning of Visual Representations, ICML 2020; as FedAUX
        uses it: Sattler et al., FedAUX: Leveraging Unlabeled Auxiliary Data in Federated Learning, IEEE TNNLS 2021.
    """
    if training.batch_size < 2:
        setting = f"method.training.batch_size = {training.batch_size!r} is impossible"
        raise FedstillError(f"{setting}: it must be 2 or more, because views are compared with views of other images")
    if not training.epochs:
        return Method(cross_entropy(), average())
    pretext = simclr_pretext(training.by("adam"), temperature=temperature, projection=projection, hidden=hidden)
    probe = neighbour_probe(k=neighbours) if neighbours else None
    return Method(cross_entropy(), average(), (pretrain(pretext, seed=training.seed, probe=probe),))
