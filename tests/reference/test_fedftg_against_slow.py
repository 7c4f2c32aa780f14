"""A whole server phase of FedFTG in the engine's turns, against the slow one from the equations."""

from __future__ import annotations

import pytest
import slow_fedftg as reference
from hard_rounds import COUNTS, contest, models_of, network, play
from server_rounds import furthest

from fedstill.core.types import Weights

FORMS = {
    "code": {},
    "joint": {"clients": "joint", "generator_steps": 2},
    "paper": {
        "clients": "joint", "discrepancy": "kl", "discrepancy_through": "both", "student_loss": "reverse_kl",
        "student_scale": "batch",
    },
    "released": {"cls_weights": "client", "generator_steps": 2},
    "mse": {"discrepancy": "mse", "student_loss": "mse"},
    "easy": {"discrepancy": "none", "lam_cls": 0.7, "lam_dis": 0.3, "batch_norm": "frozen"},
}  # fmt: skip


def as_rules(rules) -> dict:
    names = ("lam_cls", "lam_dis", "server_lr", "generator_lr", "weight_decay", "generator_steps", "student_steps")
    return {
        **{name: getattr(rules, name) for name in names},
        "each": rules.clients == "each",
        "sought": {"kl": "reverse_kl"}.get(rules.discrepancy, rules.discrepancy),
        "through": rules.discrepancy_through,
        "cls": rules.cls_weights,
        "learnt": rules.student_loss,
        "per_class": rules.student_scale == "class",
        "training": rules.batch_norm == "train",
    }


@pytest.mark.parametrize("net", ["mlp", "norm"])
@pytest.mark.parametrize("form", FORMS)
def test_the_server_phase_equals_its_equations(form, net):
    rules = contest(**FORMS[form], server_lr=0.4, weight_decay=0.01)
    played = play(rules, net=net)
    teachers = models_of(network(net))
    student, generator = reference.phase(
        as_rules(rules), net, played.candidate, teachers, played.generator("before"), COUNTS, *played.drawn.values()
    )
    assert list(played.drawn) == ["z", "y"]
    assert furthest(played.learnt, played.candidate) > 1e-3, "a phase that moves nothing proves nothing"
    assert furthest(played.learnt, Weights(*student)) < 1e-8
    assert furthest(played.generator(), Weights(*generator)) < 1e-6
