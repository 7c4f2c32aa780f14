"""SimCLR pre-training on the server."""

from __future__ import annotations

from fedstill.core.errors import FedstillError
from fedstill.core.types import Method, Training
from fedstill.local.terms import cross_entropy
from fedstill.methods.options import not_negative, positive, temperature_of
from fedstill.methods.pretraining.contrastive import neighbour_probe, simclr_pretext
from fedstill.server.aggregate import BufferPolicy, Weighting, average
from fedstill.server.pretrain import pretrain


def simclr(
    *,
    epochs: int = 100,
    batch_size: int = 512,
    pretrain_lr: float = 1e-3,
    weight_decay: float = 1e-6,
    temperature: float = 0.5,
    projection: int = 128,
    hidden: int = 512,
    pretrain_seed: int | None = None,
    neighbours: int = 200,
    weighting: Weighting = "size",
    buffers: BufferPolicy = "average",
) -> Method:
    """SimCLR: before the first round the server teaches the extractor, on unlabeled images, to know two views of one.

        l_i = -ln( exp(<z_i, z_j> / t) / sum_{k != i} exp(<z_i, z_k> / t) ),   mean over the 2 B views of a batch

    z_i is the projected feature of a random view (crop, flip, colours, grey) at length 1, z_j that of the other view
    of the same image. The projection is thrown away; the classification head is the run's own random one. Then FedAvg.
    It is made to be joined ("+P"): fedavg+simclr, feddf+simclr. The extractor is kept on disk by what it follows from
    (these options, model, unlabeled images, seed): every later run and method takes the same bits from there.

    Args:
        epochs: passes over the unlabeled images; 0 is FedAvg (of the same weighting) bit for bit.
        batch_size: images in a step (B); the last, smaller batch of an epoch is left out.
        pretrain_lr: learning rate of Adam.
        weight_decay: of Adam, on every parameter.
        temperature: t.
        projection: length of z.
        hidden: width of the layer between the features and z.
        pretrain_seed: draws first weights, views and batches of the pre-training alone, so that runs of several seeds
            share one extractor (if they share the unlabeled images); None goes by the run's seed.
        neighbours: k of the nearest-neighbour look at the extractor before and after; 0 leaves it out. It needs labels
            that only a simulation has (of the unlabeled images, else of the test set), and decides nothing.
        weighting: of the average: p_k = n_k / sum_j n_j ("size") or 1 / |S| ("uniform").
        buffers: BatchNorm statistics of the new model: "average", "pooled", "reset", "local" or "last" (see fedavg).

    Reveals: what FedAvg reveals; pre-training asks nothing of the clients.
    Differs from the paper: the last epoch is kept, where the reference code keeps the one whose nearest-neighbour
        accuracy, by labels, is best. Brightness, contrast and saturation change in random order and the hue after
        them (there its place is random too), without rounding to bytes in between.
    Reference: Chen et al., A Simple Framework for Contrastive Learning of Visual Representations, ICML 2020; as FedAUX
        uses it: Sattler et al., FedAUX: Leveraging Unlabeled Auxiliary Data in Federated Learning, IEEE TNNLS 2021.
    """
    not_negative("epochs", epochs)
    not_negative("weight_decay", weight_decay)
    not_negative("neighbours", neighbours)
    for key, value in {"pretrain_lr": pretrain_lr, "projection": projection, "hidden": hidden}.items():
        positive(key, value)
    if batch_size < 2:
        raise FedstillError(f"method.batch_size = {batch_size!r} is impossible: it must be 2 or more")
    temperature_of("temperature", temperature)
    step = average(weighting, buffers=buffers)
    if not epochs:
        return Method(cross_entropy(), step)
    training = Training(
        epochs=epochs, batch_size=batch_size, optimizer="adam", lr=pretrain_lr, weight_decay=weight_decay
    )
    pretext = simclr_pretext(training, temperature=temperature, projection=projection, hidden=hidden)
    probe = neighbour_probe(k=neighbours) if neighbours else None
    return Method(cross_entropy(), step, (pretrain(pretext, seed=pretrain_seed, probe=probe),))
