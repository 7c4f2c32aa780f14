"""A whole server phase of FedFTG in the engine's turns, against the slow one from the equations."""

from __future__ import annotations

from functools import partial

import pytest
import slow_fedftg as reference
from hard_rounds import COUNTS, contest, models_of, network, play
from papers import module_of
from toy import furthest

from fedstill.core.types import Weights
from fedstill.methods.data_free.hard_samples import discrepancy, hardness

paper = module_of("fedftg")
CODE = {"sought": "l1", "through": "student", "cls": "sample", "learnt": "forward_kl", "per_class": True}
FORMS = {  # name -> (the contest, the words of the slow version)
    "code": ({}, CODE),
    "joint": ({"one_by_one": False, "generator": {"steps": 2}}, CODE),
    "paper": (
        {
            "one_by_one": False,
            "hardness": partial(discrepancy, "reverse_kl"),
            "lesson": partial(paper.lesson, "reverse_kl", per_class=False),
        },
        {**CODE, "sought": "reverse_kl", "through": "both", "learnt": "reverse_kl", "per_class": False},
    ),
    "released": ({"recognise": paper.recognition_of_clients, "generator": {"steps": 2}}, {**CODE, "cls": "client"}),
    "mse": (
        {"hardness": hardness("mse"), "lesson": partial(paper.lesson, "mse", per_class=True)},
        {**CODE, "sought": "mse", "learnt": "mse"},
    ),
    "easy": (
        {"hardness": None, "generator": {"lam_cls": 0.7, "lam_dis": 0.3}, "student": {"batch_norm": "frozen"}},
        {**CODE, "sought": "none"},
    ),
}


def as_rules(rules, words) -> dict:
    return {
        **words,
        "lam_cls": rules.generator.lam_cls,
        "lam_dis": rules.generator.lam_dis,
        "generator_lr": rules.generator.lr,
        "generator_steps": rules.generator.steps,
        "server_lr": rules.student.lr,
        "weight_decay": rules.student.weight_decay,
        "student_steps": rules.student.steps,
        "each": rules.one_by_one,
        "training": rules.student.batch_norm == "train",
    }


@pytest.mark.parametrize("net", ["mlp", "norm"])
@pytest.mark.parametrize("form", FORMS)
def test_the_server_phase_equals_its_equations(form, net):
    options, words = FORMS[form]
    rules = contest(**{**options, "student": {"lr": 0.4, "weight_decay": 0.01, **options.get("student", {})}})
    played = play(rules, net=net)
    teachers = models_of(network(net))
    student, generator = reference.phase(
        as_rules(rules, words),
        net,
        played.candidate,
        teachers,
        played.generator("before"),
        COUNTS,
        *played.drawn.values(),
    )
    assert list(played.drawn) == ["z", "y"]
    assert furthest(played.learnt, played.candidate) > 1e-3, "a phase that moves nothing proves nothing"
    assert furthest(played.learnt, Weights(*student)) < 1e-8
    assert furthest(played.generator(), Weights(*generator)) < 1e-6
