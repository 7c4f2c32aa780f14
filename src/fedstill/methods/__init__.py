"""Methods by name: each is a recipe over local terms and server steps."""

from __future__ import annotations

from collections.abc import Callable

from fedstill.core.types import Method
from fedstill.methods.d2cfl import d2cfl
from fedstill.methods.data_free.feddf_gen import feddf_gen
from fedstill.methods.data_free.fedftg import fedftg
from fedstill.methods.data_free.fedgen import fedgen
from fedstill.methods.dp_fedavg import dp_fedavg
from fedstill.methods.fedaux import fedaux
from fedstill.methods.fedavg import fedavg
from fedstill.methods.fedbe import fedbe
from fedstill.methods.fedcurv import fedcurv
from fedstill.methods.feddf import avglogit, avgprob, feddf
from fedstill.methods.feddyn import feddyn
from fedstill.methods.fedlmd import fedlmd, fedlmd_tf
from fedstill.methods.fedmmd import fedmmd
from fedstill.methods.fednova import fednova
from fedstill.methods.fedntd import fedntd, fedntd_tf
from fedstill.methods.fedopt import fedadagrad, fedadam, fedavgm, fedopt, fedyogi
from fedstill.methods.fedprox import fedprox
from fedstill.methods.fedrs import fedrs
from fedstill.methods.kd import kd
from fedstill.methods.label_smoothing import label_smoothing
from fedstill.methods.moon import moon
from fedstill.methods.mrtf import mrtf
from fedstill.methods.pretraining.language import masked_lm, next_token
from fedstill.methods.pretraining.simclr import simclr
from fedstill.methods.scaffold import scaffold
from fedstill.methods.update_noise import update_noise

METHODS: dict[str, Callable[..., Method]] = {
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
