"""Who gets which rows before clients share theirs: the test set, the central pool, the server's validation rows.

The test set is drawn from a fixed seed, so that all seeds of an experiment are tested on the same rows.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from fedstill.core.errors import FedstillError
from fedstill.core.seeds import numpy_generator, seed_for
from fedstill.data.matching import load_like, match_classes, match_storage
from fedstill.data.source import Source, Unlabeled, keep_rows, row_ids, stratified_holdout
from fedstill.data.texts import in_one_list

FIXED = 0  # seed of what does not depend on the experiment's


def with_test_of(source: Source, place: str, *, label: str | None = None, cache_dir: str | None = None) -> Source:
    """The source with the test split of another one (cross-domain), in the task's form and with the task's classes.

    Inputs are normalised as the clients' are. label: the other source's label column, where it has one of that name.
    """
    try:
        other = load_like(place, source, key="data.test", labelled=True, label=label, cache_dir=cache_dir)
    except FedstillError:
        if label is None:
            raise
        other = load_like(place, source, key="data.test", labelled=True, cache_dir=cache_dir)
    if other.origin == source.origin:
        raise FedstillError(f"data.test: '{place}' is the clients' own dataset; leave data.test out for its test split")
    source, other = in_one_list(source, other)
    y = match_classes(other.test, source)
    if y is None:
        raise FedstillError(_unlike(place, other.test.classes, source.train.classes))
    data = source.train
    x = match_storage(other.test.x, data.x, where=f"'{place}'", key="data.test")
    test = replace(other.test, x=x, y=y, classes=data.classes, mean=data.mean, std=data.std)
    rows = {**source.rows, "test": other.rows.get("test", np.arange(len(y)))}
    notes = (*source.notes, f"tested on {other.test.name}, {len(y)} rows", *other.notes)
    return source._replace(test=test, rows=rows, notes=notes)


def _unlike(place: str, classes: tuple[str, ...], wanted: tuple[str, ...]) -> str:
    if len(classes) != len(wanted):
        return (
            f"data.test: '{place}' has {len(classes)} classes, the task {len(wanted)}; give a set of the same classes"
        )
    strange = next(name for name in classes if name not in wanted)
    shown = ", ".join(wanted[:10])
    return f"data.test: class '{strange}' of '{place}' is none of the task's ({shown}); name the same classes alike"


def central_pool(source: Source, client_rows: int, *, test_share: float) -> Source:
    """Clients keep some train rows; the rest of train and all of test is the server's: unlabeled, but for a test share.

    All rows stand in one order drawn from a fixed seed. The test set is taken from its front, the clients' train rows
    from its back, what lies between is unlabeled. So other `client_rows` with as many test rows are tested on the very
    same rows, as long as clients leave them; fewer test rows are a part of more.

    Reference: D2C-FL, Sect. 4.1 (20,000 train rows for clients; of 40,000 others 20 % to test, 80 % unlabeled).
    """
    train, test = len(source.train.y), len(source.test.y)
    if not 0 < client_rows <= train:
        raise FedstillError(
            f"data.client_rows = {client_rows}: {source.train.name} has {train} train rows; give 1 to that"
        )
    order = numpy_generator(seed_for(FIXED, "central")).permutation(train + test)  # train rows, then test rows
    clients = order[order < train][train - client_rows :]
    pool = order[~np.isin(order, clients)]
    count = min(max(1, round(test_share * len(pool))), len(pool) - 1)
    if count < 1:
        raise FedstillError(f"data.client_rows = {client_rows} leaves {len(pool)} rows to the server; give fewer")
    names = np.array([*row_ids(source, "train"), *row_ids(source, "test")], np.str_)
    x, y = (torch.cat([source.train.x, source.test.x]), torch.cat([source.train.y, source.test.y]))
    tested, unlabeled = (np.sort(rows) for rows in (pool[:count], pool[count:]))
    central = Unlabeled(x[unlabeled], tuple(names[unlabeled].tolist()), y[unlabeled])
    rest = keep_rows(source, "train", np.sort(clients))
    note = f"{client_rows} rows for clients, {len(unlabeled)} unlabeled for the server, {count} to test"
    return rest._replace(
        test=replace(source.test, x=x[tested], y=y[tested]),
        rows={**rest.rows, "test": names[tested]},
        central=central,
        notes=(*source.notes, note),
    )


def limit_test(source: Source, limit: int) -> Source:
    """A random part of the test set, of that size."""
    count = len(source.test.y)
    if limit >= count:
        return source
    rows = numpy_generator(seed_for(FIXED, "test", "limit")).choice(count, limit, replace=False)
    kept = keep_rows(source, "test", np.sort(rows))
    return kept._replace(notes=(*source.notes, f"tested on {limit} of {count} rows, drawn at random"))


def hold_validation(source: Source, count: int, *, seed: int) -> tuple[Source, tuple[Tensor, Tensor] | None]:
    """(what is left for the clients, labeled train rows for the server), each class by its share."""
    if not count:
        return source, None
    rows = len(source.train.y)
    if not 0 < count < rows:
        raise FedstillError(f"data.validation: cannot hold out {count} of {rows} train rows; give 1 to {rows - 1}")
    labels = source.train.y.numpy()
    kept, taken = stratified_holdout(labels, count / rows, seed=seed_for(seed, "validation"))
    index = torch.from_numpy(taken)
    return keep_rows(source, "train", kept), (source.train.x[index], source.train.y[index])
