from __future__ import annotations

import json
import struct
import tracemalloc

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from run_helpers import toy_uploads

from fedstill.core.errors import FedstillError
from fedstill.core.tree import as_tree, flatten, select
from fedstill.loop.message import HEADER_LIMIT, decode, encode, from_mapping, template_of, with_digest

UPLOADS, START = toy_uploads(label_counts=True)
TEMPLATE = template_of(UPLOADS)
GOOD = encode(select(UPLOADS, 1), round=3)


def header_of(data: bytes) -> tuple[dict, bytes]:
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def message(header: dict, payload: bytes) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + payload


def read(data):
    return decode(data, TEMPLATE, client=11, round=3)


@pytest.mark.parametrize("label_counts", [True, False])
def test_an_upload_comes_back_bit_for_bit(label_counts):
    uploads, _ = toy_uploads(label_counts=label_counts)
    for i, client in enumerate(uploads.ids.tolist()):
        sent = select(uploads, i)
        arrived = decode(encode(sent, round=1), template_of(uploads), client=client, round=1)
        assert (arrived.label_counts is not None) == label_counts
        expected, found = flatten(as_tree(sent)), flatten(as_tree(arrived))
        assert expected.keys() == found.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        assert all(found[name].dtype == expected[name].dtype for name in expected)
        assert arrived.extra["none"] == {}


def test_special_floats_and_shared_memory_survive_the_wire():
    uploads, _ = toy_uploads(extra={})
    view = uploads.weights.params["bias"]
    uploads = uploads._replace(extra={"alias": view}, loss=torch.tensor([float("nan"), float("inf"), -0.0, 1e-40]))
    for i, text in enumerate(["nan", "inf", "-0.0", "9.99994610111476e-41"]):
        arrived = decode(encode(select(uploads, i), round=1), template_of(uploads), client=10 + i, round=1)
        assert str(arrived.loss.item()) == text
        assert torch.equal(arrived.extra["alias"], view[i])


def change(name: str, **entry) -> bytes:
    header, payload = header_of(GOOD)
    header[name].update(entry)
    return with_digest(message(header, payload))


def rename(old: str, new: str) -> bytes:
    header, payload = header_of(GOOD)
    header[new] = header.pop(old)
    return with_digest(message(header, payload))


def without_envelope() -> bytes:
    header, payload = header_of(GOOD)
    del header["__metadata__"]
    return message(header, payload)


REFUSED = {
    "nothing": (b"", "unreadable"),
    "cut header": (GOOD[:40], "unreadable"),
    "cut payload": (GOOD[:-1], "unreadable"),
    "appended": (GOOD + b"x", "unreadable"),
    "other numbers of the same count": (
        change("params/weight", shape=[4, 3]),
        r"wrong shape of params/weight: \(4, 3\)",
    ),
    "lying shape": (change("params/weight", shape=[3000, 4000]), "unreadable"),
    "overflowing shape": (change("params/weight", shape=[2**62, 2**62]), "unreadable"),
    "negative shape": (change("params/weight", shape=[-3, -4]), "unreadable"),
    "other dtype of the same width": (change("params/weight", dtype="I32"), "wrong dtype of params/weight"),
    "unknown dtype": (change("params/weight", dtype="F128"), "unreadable"),
    "overlapping": (change("params/weight", data_offsets=[0, 48]), "unreadable"),
    "renamed": (rename("params/weight", "params/other"), "missing name 'params/weight'"),
    "no envelope": (without_envelope(), "no fedstill envelope"),
    "too long": (GOOD + bytes(HEADER_LIMIT + 1), "at most"),
    "text": ("hello", "is a str, not bytes"),
    "none": (None, "is a NoneType, not bytes"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_anything_but_the_expected_form_is_refused_in_one_line(kind):
    data, reason = REFUSED[kind]
    with pytest.raises(FedstillError, match=reason) as refusal:
        read(data)
    assert "\n" not in str(refusal.value)


def test_an_extra_name_is_refused():
    bigger = UPLOADS._replace(extra={**UPLOADS.extra, "more": torch.zeros(4, 1)})
    with pytest.raises(FedstillError, match="unexpected name 'extra/more'"):
        read(encode(select(bigger, 1), round=3))


def test_a_message_of_another_client_or_round_is_refused():
    with pytest.raises(FedstillError, match="envelope says version 2, client 11, round 3"):
        decode(GOOD, TEMPLATE, client=12, round=3)
    with pytest.raises(FedstillError, match="expected version 2, client 11, round 4"):
        decode(GOOD, TEMPLATE, client=11, round=4)


def test_a_mapping_is_held_against_the_same_template():
    upload = as_tree(select(UPLOADS, 1))
    arrived = from_mapping(upload, TEMPLATE, client=11)
    assert torch.equal(arrived.weights.params["weight"], UPLOADS.weights.params["weight"][1])
    bad = {
        "missing name 'size'": {k: v for k, v in upload.items() if k != "size"},
        "unexpected name 'more'": {**upload, "more": torch.zeros(())},
        "wrong shape of params/bias": {**upload, "params": {**upload["params"], "bias": torch.zeros(4)}},
        "wrong dtype of size": {**upload, "size": torch.tensor(1.0)},
        "neither a tensor nor a mapping": {**upload, "size": 1.0},
        "'loss' is not a plain tensor": {**upload, "loss": torch.empty((), device="meta")},
    }
    for reason, mapping in bad.items():
        with pytest.raises(FedstillError, match=reason):
            from_mapping(mapping, TEMPLATE, client=11)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
@example(struct.pack("<Q", 2**64 - 1) + b"{}")
@example(message({}, b""))
@example(struct.pack("<Q", 100_000) + b"[" * 100_000)
@example(message({"__metadata__": {"fedstill": "[" * 50_000}}, b""))
@example(message({"__metadata__": {"fedstill": "7"}}, b""))
@example(message({"__metadata__": {"fedstill": '{"version": 1, "client": [11], "round": "' + "x" * 999 + '"}'}}, b""))
def test_arbitrary_bytes_are_only_ever_refused(data):
    with pytest.raises(FedstillError):
        read(data)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, len(GOOD) - 1), st.integers(1, 255), st.integers(0, 12))
def test_a_damaged_message_is_refused(position, flip, dropped):
    data = bytearray(GOOD)
    data[position] ^= flip
    del data[position + 1 : position + 1 + dropped]
    with pytest.raises(FedstillError):
        read(bytes(data))


def test_every_flipped_bit_of_a_message_is_refused():
    for place in range(0, len(GOOD) * 8, 7):
        data = bytearray(GOOD)
        data[place // 8] ^= 1 << place % 8
        with pytest.raises(FedstillError):
            read(bytes(data))


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(sorted(header_of(GOOD)[0])), st.sampled_from(["dtype", "shape", "data_offsets"]), JSON_VALUES)
def test_a_forged_header_is_only_ever_refused(name, key, value):
    header, payload = header_of(GOOD)
    key = "fedstill" if name == "__metadata__" else key
    if header[name][key] == value:
        return
    header[name][key] = value
    with pytest.raises(FedstillError):
        read(message(header, payload))


def test_a_lying_header_allocates_nothing():
    liar = change("params/weight", shape=[10**6, 10**6], data_offsets=[0, 4 * 10**12])
    tracemalloc.start()
    with pytest.raises(FedstillError):
        read(liar)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20
