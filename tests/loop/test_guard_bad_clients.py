"""One client of ten sends something bad, in 14 ways: the run goes on, the model stays finite, the audit tells."""

from __future__ import annotations

import json
import math
import re
import struct

import pytest
import safetensors.torch
import torch
from run_helpers import LoopEngine, fedavg, linear_model, toy_federation
from running import federate

from fedstill.core.tree import leaves
from fedstill.core.types import Training
from fedstill.loop.guard import Guard

LIAR = 7
ROUNDS = 3


def split(data: bytes) -> tuple[dict, bytes]:
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def edit(data: bytes, **changes) -> bytes:
    """Replace (or with None drop) tensors of a message, keeping its envelope; '/' is written '__'."""
    tensors = safetensors.torch.load(data)
    for name, value in changes.items():
        name = name.replace("__", "/")
        if callable(value):
            value = value(tensors[name])
        if value is None:
            del tensors[name]
        else:
            tensors[name] = value.contiguous()
    return safetensors.torch.save(tensors, metadata=split(data)[0]["__metadata__"])


def forge_shape(data: bytes) -> bytes:
    header, payload = split(data)
    header["params/weight"]["shape"] = [300_000, 400_000]
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + payload


def raise_error(data: bytes) -> bytes:
    raise RuntimeError("the client crashed")


def number(value: float):
    return lambda leaf: torch.full_like(leaf, value)


KINDS = {
    "NaN": (lambda d: edit(d, params__bias=number(math.nan)), "params hold NaN or Inf"),
    "Inf": (lambda d: edit(d, params__bias=number(math.inf)), "params hold NaN or Inf"),
    "x 1e6": (lambda d: edit(d, params__weight=lambda w: w * 1e6), "update norm .* exceeds the bound 5"),
    "x -10": (lambda d: edit(d, params__weight=lambda w: w * -10), "update norm .* exceeds the bound 5"),
    "size 0": (lambda d: edit(d, size=number(0)), "size 0 is not in"),
    "size negative": (lambda d: edit(d, size=number(-12)), "size -12 is not in"),
    "size 1e12": (lambda d: edit(d, size=number(1e12)), r"size 1e\+12 is not in"),
    "size NaN": (lambda d: edit(d, size=number(math.nan)), "size nan is not in"),
    "wrong shape": (lambda d: edit(d, params__weight=lambda w: w.T), "wrong shape of params/weight"),
    "lying shape": (forge_shape, "unreadable message"),
    "wrong dtype": (lambda d: edit(d, params__weight=lambda w: w.double()), "wrong dtype of params/weight"),
    "extra name": (lambda d: edit(d, params__backdoor=torch.zeros(1)), "unexpected name 'params/backdoor'"),
    "missing name": (lambda d: edit(d, params__bias=None), "missing name 'params/bias'"),
    "raising client": (raise_error, "client raised RuntimeError: the client crashed"),
}


def run(spoil=None, run_dir=None, **settings):
    federation, model = toy_federation([12] * 10), linear_model()
    tamper = None if spoil is None else lambda _, client, data: spoil(data) if client == LIAR else data
    return federate(
        method=fedavg(), model=model, federation=federation, engine=LoopEngine(model, federation),
        training=Training(batch_size=6, lr=0.2), rounds=ROUNDS, cohort=10,
        tamper=tamper, run_dir=run_dir, **settings,
    )  # fmt: skip


def test_there_are_fourteen_kinds():
    assert len(KINDS) == 14


@pytest.mark.parametrize("kind", KINDS)
def test_the_run_goes_on_and_the_audit_names_the_client_and_the_reason(kind, tmp_path):
    spoil, reason = KINDS[kind]
    result = run(spoil, guard=Guard(norm_bound=5.0), run_dir=tmp_path)
    assert len(result.history.rows) == ROUNDS
    assert all(leaf.isfinite().all() for leaf in leaves(result.weights))
    assert result.history.last["accuracy"] > 0.7
    audit = [json.loads(line) for line in (tmp_path / "audit.jsonl").read_text().splitlines()]
    assert [(record["round"], record["client"]) for record in audit] == [(t + 1, LIAR) for t in range(ROUNDS)]
    assert all(re.search(reason, record["reason"]) for record in audit)


def test_what_is_left_is_as_if_the_bad_client_had_not_been_there():
    """Whatever it sends, the model is the same: nothing of a quarantined upload leaks into the average."""
    models = [run(spoil, guard=Guard(norm_bound=5.0)).weights for spoil, _ in KINDS.values()]
    for model in models[1:]:
        assert all(torch.equal(a, b) for a, b in zip(leaves(model), leaves(models[0]), strict=True))


def test_the_wire_changes_nothing_for_honest_clients():
    direct, wired = run(), run(lambda data: data)
    assert wired.audit == []
    assert all(torch.equal(a, b) for a, b in zip(leaves(direct.weights), leaves(wired.weights), strict=True))


@pytest.mark.parametrize("kind", ["x 1e6", "size 1e12"])
def test_without_its_rule_the_attack_would_have_worked(kind):
    """So the tests above can fail: the bound and the cap are what stops these two."""
    result = run(KINDS[kind][0], guard=Guard(size_cap=None))
    honest = run()
    assert result.audit == []
    gap = (result.weights.params["weight"] - honest.weights.params["weight"]).norm()
    assert gap > 0.1
