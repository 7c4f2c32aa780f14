from __future__ import annotations

import json
import math
import re
import struct

import numpy as np
import pytest
import safetensors.torch
import torch
from run_helpers import LoopEngine, fedavg, linear_model, toy_federation, toy_uploads
from running import changed_on_the_way, federate
from toy import same_bits

from fedstill.core.errors import FedstillError
from fedstill.core.trainer import Messages
from fedstill.core.tree import as_tree, flatten, leaves, select, tree_map
from fedstill.core.types import Training, Weights
from fedstill.data import federation_from_tensors
from fedstill.loop.guard import Guard, admit, find_faults
from fedstill.loop.message import encode, template_of, with_digest
from fedstill.loop.outliers import scale_of, sizes_of
from fedstill.methods.lookup import build_method
from fedstill.models import build_model

BAD = 2  # position of the bad client in the cohort; its id is 12


def with_row(leaf: torch.Tensor, value) -> torch.Tensor:
    leaf = leaf.clone()
    leaf[BAD] = value
    return leaf


def poison_params(uploads, value):
    params = {
        **uploads.weights.params,
        "bias": with_row(uploads.weights.params["bias"], torch.tensor([0.0, value, 0.0])),
    }
    return uploads._replace(weights=uploads.weights._replace(params=params))


def poison_buffers(uploads, value):
    buffers = {**uploads.weights.buffers, "scale": with_row(uploads.weights.buffers["scale"], value)}
    return uploads._replace(weights=uploads.weights._replace(buffers=buffers))


def poison_extra(uploads, value):
    return uploads._replace(
        extra={"control": {"weight": with_row(uploads.extra["control"]["weight"], value)}, "none": {}}
    )


FAULTS = {
    "NaN params": (lambda u: poison_params(u, math.nan), "params hold NaN or Inf"),
    "Inf params": (lambda u: poison_params(u, math.inf), "params hold NaN or Inf"),
    "-Inf params": (lambda u: poison_params(u, -math.inf), "params hold NaN or Inf"),
    "NaN buffers": (lambda u: poison_buffers(u, math.nan), "buffers hold NaN or Inf"),
    "NaN extra": (lambda u: poison_extra(u, math.nan), "extra upload holds NaN or Inf"),
    "size 0": (lambda u: u._replace(size=with_row(u.size, 0)), "size 0 is not in"),
    "size -5": (lambda u: u._replace(size=with_row(u.size, -5)), "size -5 is not in"),
    "size 1e12": (lambda u: u._replace(size=with_row(u.size, 1e12)), r"size 1e\+12 is not in \(0, 1e\+09\]"),
    "size NaN": (lambda u: u._replace(size=with_row(u.size, math.nan)), "size nan is not in"),
    "size Inf": (lambda u: u._replace(size=with_row(u.size, math.inf)), "size inf is not in"),
    "NaN loss": (lambda u: u._replace(loss=with_row(u.loss, math.nan)), "loss is NaN or Inf"),
    "negative count": (lambda u: u._replace(label_counts=with_row(u.label_counts, -1)), "label counts"),
    "NaN count": (lambda u: u._replace(label_counts=with_row(u.label_counts, math.nan)), "label counts"),
    "count 3e38": (
        lambda u: u._replace(label_counts=with_row(u.label_counts, 3e38)),
        r"label counts hold a number that is not in \[0, 1e\+09\]",
    ),
    "count Inf": (lambda u: u._replace(label_counts=with_row(u.label_counts, math.inf)), "label counts hold a number"),
    "far away": (lambda u: poison_params(u, 10.0), "update norm 10.0.* exceeds the bound 1"),
}
GUARD = Guard(norm_bound=1.0)


def through_stack(uploads, start, guard, **how):
    return admit(uploads, start, guard, round=5, **how)


def through_bytes(uploads, start, guard, **how):
    messages = {int(c): encode(select(uploads, i), round=5) for i, c in enumerate(uploads.ids)}
    return admit(Messages(messages, template_of(uploads)), start, guard, round=5, **how)


def through_mappings(uploads, start, guard, **how):
    messages = {int(c): as_tree(select(uploads, i)) for i, c in enumerate(uploads.ids)}
    return admit(Messages(messages, template_of(uploads)), start, guard, round=5, **how)


DOORS = pytest.mark.parametrize("door", [through_stack, through_bytes, through_mappings])


def stretched(uploads, start, factor, place=2):
    """One client's move, statistics and slots, all `factor` times as long."""

    def longer(leaf, centre=0.0):
        leaf = leaf.clone()
        leaf[place] = centre + factor * (leaf[place] - centre)
        return leaf

    params = {name: longer(leaf, start.params[name]) for name, leaf in uploads.weights.params.items()}
    scale = longer(uploads.weights.buffers["scale"], start.buffers["scale"])
    weights = Weights(params, {**uploads.weights.buffers, "scale": scale})
    return uploads._replace(weights=weights, extra=tree_map(longer, uploads.extra))


def equal_lengths():
    """Four clients whose moves, statistics and slots are equally long and differ."""
    uploads, start = toy_uploads(
        extra={"control": {"weight": torch.tensor([[3.0, 4.0], [5.0, 0.0], [0.0, 5.0], [4.0, 3.0]])}}
    )
    start = Weights(start.params, {**start.buffers, "scale": start.buffers["scale"] + 0.5})
    moves = uploads.weights.params["weight"] - start.params["weight"]
    lengths = moves.flatten(1).norm(dim=1).reshape(-1, 1, 1)
    params = {**uploads.weights.params, "weight": start.params["weight"] + moves / lengths}
    return uploads._replace(weights=uploads.weights._replace(params=params)), start


def rounds_of_wide_claims(uploads, start):
    """What is known of three rounds in which clients claimed widely different numbers of samples and steps."""
    sizes = {name: values.double().numpy() for name, values in sizes_of(uploads, start).items()}
    return 3 * [{name: [middle, spread, 9.0] for name, (middle, spread, _) in scale_of(sizes).items()}]


@DOORS
@pytest.mark.parametrize("factor", [-4.0, -15.0, 6.0])
def test_an_upload_that_is_too_long_is_shortened_and_the_others_keep_their_bits(door, factor):
    """The move to the root of 20, because all others have the length 1; statistics and slots to the middle."""
    honest, start = equal_lengths()
    past = rounds_of_wide_claims(honest, start)
    admitted = door(stretched(honest, start, factor), start, Guard(), past=past)
    assert admitted.kept.tolist() == [0, 1, 2, 3]
    if factor == -4.0:  # below the root of 20
        assert admitted.records == []
        assert same_bits(as_tree(admitted.uploads), as_tree(stretched(honest, start, factor)))
        return
    assert all(record["client"] == 12 and record["note"] for record in admitted.records)
    assert [record["reason"].split()[:3] for record in admitted.records] == [
        ["move", f"{abs(factor):.3g}", "is"], ["buffers", f"{abs(factor) / 2:.3g}", "is"], ["the", "norm", "of"],
    ]  # fmt: skip
    for got, sent in zip(leaves(as_tree(admitted.uploads)), leaves(as_tree(honest)), strict=True):
        assert torch.equal(got[[0, 1, 3]], sent[[0, 1, 3]])
    expected = stretched(honest, start, math.copysign(1.0, factor))
    params = stretched(honest, start, math.copysign(math.sqrt(20.0), factor)).weights.params
    expected = expected._replace(weights=expected.weights._replace(params=params))
    for got, hoped in zip(leaves(as_tree(admitted.uploads)), leaves(as_tree(expected)), strict=True):
        torch.testing.assert_close(got, hoped)


@pytest.mark.parametrize("how", [{"past": None}, {"past": [], "alike": False}])
def test_where_uploads_have_noise_or_networks_differ_nothing_is_shortened(how):
    honest, start = equal_lengths()
    long = stretched(honest, start, -15.0)
    admitted = admit(long, start, Guard(), round=1, **how)
    assert admitted.records == []
    assert same_bits(as_tree(admitted.uploads), as_tree(long))


@DOORS
@pytest.mark.parametrize("kind", FAULTS)
def test_a_bad_upload_is_quarantined_alone_with_its_name_and_reason(door, kind):
    poison, reason = FAULTS[kind]
    clean, start = toy_uploads(label_counts=True)
    admitted = door(poison(clean), start, GUARD)
    assert [(r["round"], r["client"]) for r in admitted.records] == [(5, 12)]
    assert re.search(reason, admitted.records[0]["reason"])
    assert admitted.kept.tolist() == [0, 1, 3]
    assert admitted.uploads.ids.tolist() == [10, 11, 13]
    expected, found = flatten(as_tree(select(clean, [0, 1, 3]))), flatten(as_tree(admitted.uploads))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@DOORS
def test_a_clean_cohort_passes_untouched(door):
    uploads, start = toy_uploads(label_counts=True)
    admitted = door(uploads, start, GUARD)
    assert admitted.records == []
    assert admitted.kept.tolist() == [0, 1, 2, 3]
    expected, found = flatten(as_tree(uploads)), flatten(as_tree(admitted.uploads))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@DOORS
def test_exact_label_counts_sum_to_the_size_and_noisy_ones_need_not(door):
    uploads, start = toy_uploads(label_counts=True)
    counts = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 1.0], [2.0, 2.0, 0.0], [4.0, 0.0, 0.0]])  # sizes 1, 2, 3, 4
    uploads = uploads._replace(label_counts=counts)
    records = door(uploads, start, GUARD, exact_counts=True).records
    assert [(r["client"], r["reason"]) for r in records] == [(12, "label counts sum to 4, and size is 3")]
    assert door(uploads, start, GUARD).records == []


def test_exact_counts_of_a_huge_client_may_be_rounded():
    """2^24 + 1 is no float32."""
    uploads, start = toy_uploads(label_counts=True)
    sizes = uploads._replace(size=torch.full((4,), 2.0**24 + 1, dtype=torch.float64))
    counts = torch.zeros(4, 3).index_fill(1, torch.tensor([0]), 2.0**24 + 1)
    assert float(counts[0, 0]) != float(sizes.size[0])
    assert find_faults(sizes._replace(label_counts=counts), start, Guard(), exact_counts=True) is None


def test_a_clean_cohort_costs_one_host_sync(monkeypatch):
    uploads, start = toy_uploads(label_counts=True)
    syncs = []
    for name in ("__bool__", "item", "tolist", "cpu", "numpy", "__float__", "__int__"):
        original = getattr(torch.Tensor, name)

        def counted(self, *args, _name=name, _original=original, **kwargs):
            syncs.append(_name)
            return _original(self, *args, **kwargs)

        monkeypatch.setattr(torch.Tensor, name, counted)
    assert find_faults(uploads, start, GUARD) is None
    assert len(syncs) == 1


def test_large_finite_numbers_are_not_mistaken_for_infinity():
    uploads, start = toy_uploads()
    params = {**uploads.weights.params, "weight": with_row(uploads.weights.params["weight"], 3e38)}
    uploads = uploads._replace(weights=Weights(params, uploads.weights.buffers))
    assert not params["weight"][BAD].sum().isfinite()
    assert admit(uploads, start, Guard(), round=1).records == []


def test_the_norm_is_that_of_the_whole_update_not_of_the_model():
    uploads, start = toy_uploads()
    start = Weights({**start.params, "bias": torch.full((3,), 1000.0)}, start.buffers)
    weight = start.params["weight"].repeat(4, 1, 1)
    bias = start.params["bias"].repeat(4, 1)
    weight[BAD, 0, 0] += 3.0
    bias[BAD, 0] += 4.0
    uploads = uploads._replace(weights=Weights({"weight": weight, "bias": bias}, uploads.weights.buffers))
    assert find_faults(uploads, start, Guard(norm_bound=5.001)) is None
    faults = find_faults(uploads, start, Guard(norm_bound=4.999))
    assert [fault is None for fault in faults] == [True, True, False, True]


@pytest.mark.parametrize(
    ("quorum", "cohort", "needed"),
    [(1, 10, 1), (0, 10, 1), (3, 10, 3), (0.5, 10, 5), (0.25, 10, 3), (1.0, 10, 10), (0.0, 4, 1)],
)
def test_quorum_is_a_count_or_a_share(quorum, cohort, needed):
    assert Guard(quorum=quorum).needed(cohort) == needed


@DOORS
def test_a_missed_quorum_voids_the_round_and_says_so(door):
    uploads, start = toy_uploads(label_counts=True)
    admitted = door(poison_params(uploads, math.nan), start, Guard(quorum=1.0))
    assert admitted.uploads is None
    assert len(admitted.kept) == 0
    assert [r["client"] for r in admitted.records] == [12, None]
    assert "3 of 4 uploads left, 4 needed" in admitted.records[-1]["reason"]


@DOORS
@pytest.mark.parametrize("quorum", [3, 0.75])
def test_a_quorum_of_exactly_the_uploads_that_are_left_is_met(door, quorum):
    uploads, start = toy_uploads(label_counts=True)
    admitted = door(poison_params(uploads, math.nan), start, Guard(quorum=quorum))
    assert admitted.uploads.ids.tolist() == [10, 11, 13]
    assert [r["client"] for r in admitted.records] == [12]


@DOORS
def test_nobody_left_is_a_missed_quorum_whatever_it_is(door):
    uploads, start = toy_uploads(label_counts=True)
    admitted = door(uploads._replace(size=torch.zeros(4, dtype=torch.float64)), start, Guard(quorum=0))
    assert admitted.uploads is None
    assert [r["client"] for r in admitted.records] == [10, 11, 12, 13, None]


def test_a_client_that_raised_is_one_bad_client():
    uploads, start = toy_uploads()
    messages = {int(c): encode(select(uploads, i), round=1) for i, c in enumerate(uploads.ids)}
    messages[12] = RuntimeError("out of\nmemory")
    admitted = admit(Messages(messages, template_of(uploads)), start, Guard(), round=1)
    assert admitted.records == [{"round": 1, "client": 12, "reason": "client raised RuntimeError: out of memory"}]
    assert admitted.kept.tolist() == [0, 1, 3]


@pytest.mark.parametrize("spoil", ["names", "shape", "dtype"])
def test_stacked_uploads_of_another_form_are_refused_for_all(spoil):
    uploads, start = toy_uploads()
    params = dict(uploads.weights.params)
    if spoil == "names":
        params["other"] = params.pop("bias")
    else:
        params["bias"] = params["bias"].double() if spoil == "dtype" else params["bias"][:, :2]
    admitted = admit(uploads._replace(weights=Weights(params, uploads.weights.buffers)), start, Guard(), round=1)
    assert admitted.uploads is None
    assert all(f"wrong {spoil}" in r["reason"] for r in admitted.records[:-1])


@pytest.mark.parametrize(
    "settings", [{"norm_bound": 0.0}, {"norm_bound": math.nan}, {"size_cap": -1}, {"quorum": -1}, {"quorum": 1.5}]
)
def test_impossible_settings_are_named(settings):
    with pytest.raises(FedstillError, match=f"guard.{next(iter(settings))} = "):
        Guard(**settings)


def test_without_a_cap_any_finite_size_is_believed():
    uploads, start = toy_uploads()
    big = uploads._replace(size=with_row(uploads.size, 1e300))
    assert admit(big, start, Guard(size_cap=None), round=1).records == []
    endless = uploads._replace(size=with_row(uploads.size, np.inf))
    assert [r["client"] for r in admit(endless, start, Guard(size_cap=None), round=1).records] == [12]


def test_without_a_cap_any_finite_label_count_is_believed():
    uploads, start = toy_uploads(label_counts=True)
    big = uploads._replace(label_counts=with_row(uploads.label_counts, 3e38))
    assert admit(big, start, Guard(size_cap=None), round=1).records == []
    endless = uploads._replace(label_counts=with_row(uploads.label_counts, np.inf))
    assert [r["client"] for r in admit(endless, start, Guard(size_cap=None), round=1).records] == [12]


# One finite but huge upload must not stop learning for the rounds to come.


def blobs(clients: int = 4, size: int = 20):
    """Two classes a straight line can part; every client has both."""
    generator = torch.Generator().manual_seed(0)
    pairs = []
    for _ in range(clients + 1):
        y = torch.arange(size) % 2
        pairs.append((torch.randn(size, 3, generator=generator) + 3.0 * y[:, None], y))
    return federation_from_tensors(pairs[:-1], test=pairs[-1])


def run(method: str, spoil, guard: Guard):
    """Eight rounds; in the second one, client 0's upload passes through `spoil`."""
    method = build_method(method, {})[0].method
    seen = []

    def transmit(uploads, start, seed):
        seen.append(None)
        return spoil(uploads) if len(seen) == 2 else uploads

    return federate(
        method=changed_on_the_way(method, transmit),
        model=build_model("mlp", input_shape=(3,), classes=2, hidden=(8,), init="torch"),
        federation=blobs(),
        training=Training(epochs=2, batch_size=10, lr=0.1),
        rounds=8,
        cohort=4,
        guard=guard,
    )


def huge_control(uploads):
    delta = {name: leaf.clone() for name, leaf in uploads.extra["control_delta"].items()}
    for leaf in delta.values():
        leaf[0] = 1e30
    return uploads._replace(extra={"control_delta": delta})


def huge_params(uploads):
    for leaf in uploads.weights.params.values():
        leaf[0] = 1e20
    return uploads


def test_a_bound_on_what_is_sent_beside_the_model_keeps_scaffold_learning():
    result = run("scaffold", huge_control, Guard(extra_bound=1e3))
    assert [record["client"] for record in result.history.audit] == [0]
    assert "extra upload" in result.history.audit[0]["reason"]
    assert result.history.last["accuracy"] > 0.9


def test_a_server_state_that_overflows_is_not_kept():
    result = run("fedadam", huge_params, Guard(outlier=0))
    assert any(record["client"] is None for record in result.history.audit)
    assert result.history.last["accuracy"] > result.history.rows[1]["accuracy"]


def test_a_bound_must_be_positive():
    with pytest.raises(FedstillError, match=r"guard\.extra_bound"):
        Guard(extra_bound=0.0)


# One client of ten sends something bad, in 14 ways: the run goes on, the model stays finite, the audit tells.


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
    return with_digest(safetensors.torch.save(tensors, metadata=split(data)[0]["__metadata__"]))


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


def run_with_liar(spoil=None, run_dir=None, **settings):
    federation, model = toy_federation([12] * 10), linear_model()
    tamper = None if spoil is None else lambda _, client, data: spoil(data) if client == LIAR else data
    return federate(
        method=fedavg(), model=model, federation=federation, engine=LoopEngine(model, federation),
        training=Training(batch_size=6, lr=0.2), rounds=ROUNDS, cohort=10,
        tamper=tamper, run_dir=run_dir, **settings,
    )  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_the_run_goes_on_and_the_audit_names_the_client_and_the_reason(kind, tmp_path):
    spoil, reason = KINDS[kind]
    result = run_with_liar(spoil, guard=Guard(norm_bound=5.0), run_dir=tmp_path)
    assert len(result.history.rows) == ROUNDS
    assert all(leaf.isfinite().all() for leaf in leaves(result.weights))
    assert result.history.last["accuracy"] > 0.7
    audit = [json.loads(line) for line in (tmp_path / "audit.jsonl").read_text().splitlines()]
    assert [(record["round"], record["client"]) for record in audit] == [(t + 1, LIAR) for t in range(ROUNDS)]
    assert all(re.search(reason, record["reason"]) for record in audit)


def test_what_is_left_is_as_if_the_bad_client_had_not_been_there():
    """Whatever it sends, the model is the same: nothing of a quarantined upload leaks into the average."""
    models = [run_with_liar(spoil, guard=Guard(norm_bound=5.0)).weights for spoil, _ in KINDS.values()]
    for model in models[1:]:
        assert all(torch.equal(a, b) for a, b in zip(leaves(model), leaves(models[0]), strict=True))


def test_the_wire_changes_nothing_for_honest_clients():
    direct, wired = run_with_liar(), run_with_liar(lambda data: data)
    assert wired.audit == []
    assert all(torch.equal(a, b) for a, b in zip(leaves(direct.weights), leaves(wired.weights), strict=True))


@pytest.mark.parametrize("kind", ["x 1e6", "size 1e12"])
def test_without_its_rule_the_attack_would_have_worked(kind):
    """So the tests above can fail: the bound and the cap are what stops these two."""
    result = run_with_liar(KINDS[kind][0], guard=Guard(size_cap=None, outlier=0))
    honest = run_with_liar()
    assert result.audit == []
    gap = (result.weights.params["weight"] - honest.weights.params["weight"]).norm()
    assert gap > 0.1
