"""Methods by name: each is a recipe over local terms and server steps."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, get_type_hints

from fedstill.algorithms.avglogit import avglogit, avgprob
from fedstill.algorithms.d2cfl import d2cfl
from fedstill.algorithms.dp_fedavg import dp_fedavg
from fedstill.algorithms.fedaux import fedaux
from fedstill.algorithms.fedavg import fedavg
from fedstill.algorithms.fedbe import fedbe
from fedstill.algorithms.fedcurv import fedcurv
from fedstill.algorithms.feddf import feddf
from fedstill.algorithms.feddf_gen import feddf_gen
from fedstill.algorithms.feddyn import feddyn
from fedstill.algorithms.fedftg import fedftg
from fedstill.algorithms.fedgen import fedgen
from fedstill.algorithms.fedlmd import fedlmd, fedlmd_tf
from fedstill.algorithms.fedmmd import fedmmd
from fedstill.algorithms.fednova import fednova
from fedstill.algorithms.fedntd import fedntd, fedntd_tf
from fedstill.algorithms.fedopt import fedadagrad, fedadam, fedavgm, fedopt, fedyogi
from fedstill.algorithms.fedprox import fedprox
from fedstill.algorithms.fedrs import fedrs
from fedstill.algorithms.kd import kd
from fedstill.algorithms.label_smoothing import label_smoothing
from fedstill.algorithms.language import masked_lm, next_token
from fedstill.algorithms.moon import moon
from fedstill.algorithms.mrtf import mrtf
from fedstill.algorithms.options import check_type
from fedstill.algorithms.scaffold import scaffold
from fedstill.algorithms.simclr import simclr
from fedstill.algorithms.update_noise import update_noise
from fedstill.core.errors import FedstillError, suggest
from fedstill.core.types import Algorithm

METHODS: dict[str, Callable[..., Algorithm]] = {
    "fedavg": fedavg,
    "fedprox": fedprox,
    "fedavgm": fedavgm,
    "fedadam": fedadam,
    "fedyogi": fedyogi,
    "fedadagrad": fedadagrad,
    "fedopt": fedopt,
    "scaffold": scaffold,
    "fednova": fednova,
    "feddyn": feddyn,
    "fedcurv": fedcurv,
    "moon": moon,
    "fedmmd": fedmmd,
    "kd": kd,
    "fedntd": fedntd,
    "fedntd_tf": fedntd_tf,
    "fedlmd": fedlmd,
    "fedlmd_tf": fedlmd_tf,
    "label_smoothing": label_smoothing,
    "fedrs": fedrs,
    "avglogit": avglogit,
    "avgprob": avgprob,
    "feddf": feddf,
    "feddf_gen": feddf_gen,
    "fedaux": fedaux,
    "fedbe": fedbe,
    "mrtf": mrtf,
    "d2cfl": d2cfl,
    "fedftg": fedftg,
    "fedgen": fedgen,
    "update_noise": update_noise,
    "dp_fedavg": dp_fedavg,
    "simclr": simclr,
    "masked_lm": masked_lm,
    "next_token": next_token,
}


def build_algorithm(name: str, options: Mapping[str, Any] | None = None) -> Algorithm:
    """The method `name` with its options; a mistake is one line that names the key and the nearest right word.

    >>> build_algorithm("fedprox", {"mu": 0.1}).server.needs
    frozenset()
    """
    if name not in METHODS:
        raise FedstillError(f"algorithm.name '{name}' is not a method: {suggest(name, METHODS)}")
    factory, chosen = METHODS[name], dict(options or {})
    known, hints = inspect.signature(factory).parameters, get_type_hints(factory)
    for key, value in chosen.items():
        if key not in known:
            raise FedstillError(f"algorithm.{key} is not an option of {name}: {suggest(key, known)}")
        check_type(key, value, hints[key])
    return factory(**chosen)


__all__ = [
    "METHODS",
    "avglogit",
    "avgprob",
    "build_algorithm",
    "d2cfl",
    "dp_fedavg",
    "fedadagrad",
    "fedadam",
    "fedaux",
    "fedavg",
    "fedavgm",
    "fedbe",
    "fedcurv",
    "feddf",
    "feddf_gen",
    "feddyn",
    "fedftg",
    "fedgen",
    "fedlmd",
    "fedlmd_tf",
    "fedmmd",
    "fednova",
    "fedntd",
    "fedntd_tf",
    "fedopt",
    "fedprox",
    "fedrs",
    "fedyogi",
    "kd",
    "label_smoothing",
    "masked_lm",
    "moon",
    "mrtf",
    "next_token",
    "scaffold",
    "simclr",
    "update_noise",
]
