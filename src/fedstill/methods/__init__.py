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

Factory = Callable[..., Method]
AVERAGES: tuple[Factory, ...] = (fedavg, fedprox, fedavgm, fedadam, fedyogi, fedadagrad, fedopt)
CORRECTIONS: tuple[Factory, ...] = (scaffold, fednova, feddyn, fedcurv)
LOCAL_LOSSES: tuple[Factory, ...] = (moon, fedmmd, kd, fedntd, fedntd_tf, fedlmd, fedlmd_tf, label_smoothing, fedrs)
DISTILLATIONS: tuple[Factory, ...] = (avglogit, avgprob, feddf, feddf_gen, fedaux, fedbe, mrtf, d2cfl, fedftg, fedgen)
TO_BE_JOINED: tuple[Factory, ...] = (update_noise, dp_fedavg, simclr, masked_lm, next_token)

METHODS: dict[str, Factory] = {
    factory.__name__: factory for factory in (*AVERAGES, *CORRECTIONS, *LOCAL_LOSSES, *DISTILLATIONS, *TO_BE_JOINED)
}
