"""The work of a cohort travels as JSON and safetensors, and trains the same in another process."""

from __future__ import annotations

import json
import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import pytest
import torch
from safetensors.torch import load, save

from fedstill import build_method
from fedstill.about.toy import trial_federation
from fedstill.compose.combine import broadcast_of, first_state
from fedstill.compose.phases import method_at
from fedstill.core.errors import FedstillError
from fedstill.core.trainer import LocalWork
from fedstill.core.tree import as_tree, flatten, stack
from fedstill.core.types import Training
from fedstill.engine import build_engine
from fedstill.loop.federate import share_states_of, suited
from fedstill.loop.local_work import Packed, Unpack, pack
from fedstill.models import build_model, mixed_model

IDS = np.array([3, 0, 2])
TEXTS = ["scaffold", "fedlmd(beta=0.5)+fedprox(mu=0.1)", "fedavg until 1 then moon", "feddyn"]


def network(kind: str):
    mlp = build_model("mlp", input_shape=(1, 8, 8), classes=3, hidden=(8,))
    if kind == "mlp":
        return mlp
    return mixed_model({"mlp": mlp, "cnn": build_model("cnn", input_shape=(1, 8, 8), classes=3)}, 4)


def work_of(text: str, training: Training, kind: str = "mlp"):
    """(the work of a round in which slots and states are not zero, the clients' states)."""
    model = network(kind)
    first, phases = share_states_of(suited(build_method(text), model, training), model.init(0), model)
    method, start = method_at(phases, 2), model.init(1)
    noise = torch.Generator().manual_seed(0)
    received = broadcast_of(method, first_state(method, start))
    for leaf in flatten(received).values():
        leaf.add_(0.01 * torch.randn(leaf.shape, generator=noise))
    states = stack([first] * len(IDS))
    return LocalWork(method.objective, training, start, received, 2, 11, phases[0].text), states


def trained(work, states, kind: str = "mlp"):
    engine = build_engine("looped", "cpu", model=network(kind), federation=trial_federation())
    result = engine.train(work, IDS, states)
    return {**flatten(as_tree(result.uploads), "uploads"), **flatten(result.states, "states")}


def train_elsewhere(facts: str, tensors: bytes, text: str, kind: str) -> bytes:
    """Runs in a process that was given text and bytes alone; it makes the clients' first states by itself."""
    torch.set_num_threads(1)
    work = Unpack(network(kind), build_method)(Packed(facts, tensors))
    found = trained(work, work_of(text, work.training, kind)[1], kind)
    return save({name: leaf.contiguous() for name, leaf in found.items()})


def test_another_process_sends_the_same_bits():
    cases = [(text, Training(batch_size=8, lr=0.1, augment=("flip",)), "mlp") for text in TEXTS]
    cases += [
        ("fedprox", Training(batch_size=8, part="head"), "mlp"),
        ("fedavg", Training(batch_size=8, momentum=0.9, keep_optimizer=True), "mlp"),
        ("scaffold", Training(batch_size=8), "mixed"),
    ]
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            for text, training, kind in cases:
                work, states = work_of(text, training, kind)
                sent = pool.submit(train_elsewhere, *pack(work), text, kind)
                wanted, found = trained(work, states, kind), load(sent.result())
                assert found.keys() == wanted.keys(), text
                assert all(torch.equal(found[name], leaf) for name, leaf in wanted.items()), text
    finally:
        torch.set_num_threads(before)


def test_a_method_is_built_once_for_all_rounds():
    unpack, (work, _) = Unpack(network("mlp"), build_method), work_of("moon", Training())
    assert unpack(pack(work)).objective is unpack(pack(work)).objective


def test_all_but_the_objective_is_data():
    work, _ = work_of("fedprox(mu=0.1)", Training(augment=("crop",), lr=0.3))
    facts = json.loads(pack(work).facts)
    assert facts["method"] == "fedprox(mu=0.1)"
    assert (facts["round"], facts["seed"], facts["training"]["lr"]) == (2, 11, 0.3)
    again = Unpack(network("mlp"), build_method)(pack(work))
    assert (again.training, again.round, again.seed, again.method) == (work.training, 2, 11, work.method)


def test_a_method_without_a_text_stays_in_its_process():
    with pytest.raises(FedstillError, match="made in Python cannot go to another process: name it by its text"):
        pack(LocalWork(None, Training(), network("mlp").init(0)))
