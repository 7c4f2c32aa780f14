from __future__ import annotations

import hashlib
import json
import math
import struct
import tracemalloc

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedstill.core.errors import FedstillError
from fedstill.core.tree import flatten
from fedstill.population.wire import (
    DEPTH_LIMIT,
    FACTS_LIMIT,
    FORM,
    MAGIC,
    NAMES_LIMIT,
    check_form,
    pack_tree,
    seal,
    shown,
    unpack_tree,
    unseal,
)

LIMIT = 1 << 20
DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool,
]  # fmt: skip


@st.composite
def tensors(draw):
    """Any bits of any type: NaN, Inf, -0.0 and subnormal numbers among them."""
    dtype, shape = draw(st.sampled_from(DTYPES)), draw(st.lists(st.integers(0, 3), max_size=3))
    size = torch.empty(shape, dtype=dtype).numel()
    if dtype is torch.bool:
        return torch.tensor(draw(st.lists(st.booleans(), min_size=size, max_size=size)), dtype=dtype).reshape(shape)
    count = size * torch.empty((), dtype=dtype).element_size()
    words = bytearray(draw(st.binary(min_size=count, max_size=count)))
    return torch.frombuffer(words, dtype=dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)


names = st.text(st.characters(codec="utf-8"), max_size=8)
trees = st.dictionaries(
    names, st.recursive(tensors(), lambda inner: st.dictionaries(names, inner, max_size=3)), max_size=4
)
facts = st.dictionaries(names, st.one_of(st.integers(), names, st.booleans(), st.none()), max_size=4)


def bits_of(tree):
    """The nesting, and every tensor as type, shape and bytes, because NaN equals nothing."""
    if isinstance(tree, dict):
        return {name: bits_of(child) for name, child in tree.items()}
    return tree.dtype, tuple(tree.shape), bytes(tree.contiguous().reshape(-1).view(torch.uint8).tolist())


@given(trees)
def test_a_tree_comes_back_bit_for_bit_with_its_empty_parts(tree):
    assert bits_of(unpack_tree(pack_tree(tree))) == bits_of(tree)


def test_tensors_that_share_memory_or_lie_transposed_come_back():
    whole = torch.arange(6.0).reshape(2, 3)
    found = unpack_tree(pack_tree({"whole": whole, "again": whole, "turned": whole.T, "row": whole[1]}))
    assert torch.equal(found["whole"], found["again"])
    assert torch.equal(found["turned"], whole.T)
    assert torch.equal(found["row"], torch.tensor([3.0, 4.0, 5.0]))


@given(facts, st.binary(max_size=50))
def test_a_parcel_opens_to_what_was_put_in(said, body):
    assert unseal(seal(said, body), limit=LIMIT) == (said, body)


def test_every_flipped_bit_of_a_parcel_is_refused_in_one_line():
    data = seal({"round": 1}, b"body")
    for place in range(8 * len(data)):
        damaged = bytearray(data)
        damaged[place // 8] ^= 1 << place % 8
        with pytest.raises(FedstillError) as refused:
            unseal(bytes(damaged), limit=LIMIT)
        assert "\n" not in str(refused.value)


def test_a_parcel_that_ends_early_or_goes_on_is_refused():
    data = seal({"round": 1}, b"body")
    for other in [data[:end] for end in range(len(data))] + [data + b"x"]:
        with pytest.raises(FedstillError):
            unseal(other, limit=LIMIT)


@given(st.binary(max_size=200), st.booleans())
def test_random_bytes_are_refused_and_do_nothing_else(data, with_head):
    with pytest.raises(FedstillError):
        unseal(MAGIC + struct.pack("<H", FORM) + data if with_head else data, limit=LIMIT)
    with pytest.raises(FedstillError):
        unpack_tree(data)


@given(trees, st.lists(st.tuples(st.integers(0), st.integers(0, 255)), min_size=1, max_size=4), st.integers(0))
def test_a_changed_tree_gives_tensors_or_one_error(tree, changes, end):
    data = bytearray(pack_tree(tree))
    for place, byte in changes:
        data[place % len(data)] = byte
    try:
        found = unpack_tree(bytes(data[: len(data) - end % 3]))
    except FedstillError:
        return
    assert all(isinstance(leaf, torch.Tensor) for leaf in flatten(found).values())


outlines = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-2, 4), st.floats(), names),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(names, inner, max_size=3)),
)


@given(outlines)
def test_an_outline_that_does_not_place_each_tensor_once_is_refused(outline):
    data = safetensors.torch.save({"0": torch.ones(1), "1": torch.ones(2)}, {"outline": json.dumps(outline)})
    try:
        found = unpack_tree(data)
    except FedstillError:
        return
    assert sorted(tuple(leaf.shape) for leaf in flatten(found).values()) == [(1,), (2,)]


def raw(facts: bytes) -> bytes:
    """A parcel with a right checksum over any bytes in the place of its facts."""
    hashed = hashlib.blake2b(facts, digest_size=32).digest()
    return struct.pack("<8sHI32s", MAGIC, FORM, len(facts), hashed) + facts


@pytest.mark.parametrize(
    "words",
    [
        b"", b"{", b"[]", b"7", b"\xff\xfe", b'{"round": [1]}', b'{"round": {}}', b"[" * 200_000, b'{"a":' * 100_000,
        b'{"round": ' + b"9" * 5_000 + b"}",
    ],
    ids=lambda words: f"{words[:12]!r}-{len(words)}",
)  # fmt: skip
def test_facts_that_are_no_flat_table_are_refused(words):
    with pytest.raises(FedstillError, match="facts"):
        unseal(raw(words), limit=LIMIT)


@pytest.mark.parametrize("depth", [DEPTH_LIMIT + 1, 300, 900, 100_000])
def test_a_tree_that_is_deeper_than_any_method_s_is_refused(depth):
    def bytes_of(depth):
        return safetensors.torch.save({"0": torch.ones(1)}, {"outline": '{"a":' * depth + "0" + "}" * depth})

    assert list(flatten(unpack_tree(bytes_of(DEPTH_LIMIT)))) == ["/".join("a" * DEPTH_LIMIT)]
    with pytest.raises(FedstillError):
        unpack_tree(bytes_of(depth))


HUGE = 1 << 62


@pytest.mark.parametrize(
    "data",
    [
        struct.pack("<Q", HUGE) + b"{}",
        struct.pack("<Q", NAMES_LIMIT + 1) + b" " * 100,
        *(
            struct.pack("<Q", len(header)) + header
            for header in (
                b'{"__metadata__":{"outline":"{\\"a\\":0}"},"0":{"dtype":"F32","shape":[%d],"data_offsets":[0,%d]}}'
                % (size, 4 * size)
                for size in (1 << 40, 1 << 62)
            )
        ),
    ],
)
def test_a_claimed_size_costs_no_memory(data):
    tracemalloc.start()
    try:
        with pytest.raises(FedstillError):
            unpack_tree(data)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        ("F32", (0, 2**62, 4)),
        ("U8", (0, 2**63)),
        ("F32", (1,) * 70),
        ("F8_E4M3", (0,)),
        ("C64", (0,)),
        ("F4", (0, 2**64 - 1)),
    ],
)
def test_a_tensor_that_no_method_sends_is_refused_in_one_line(kind, shape):
    """Torch raises other errors than safetensors, here or where its numbers are looked at, and they would end a run."""
    size = 4 * math.prod(shape)
    head = {"__metadata__": {"outline": '{"a": 0}'}, "0": {"dtype": kind, "shape": shape, "data_offsets": [0, size]}}
    words = json.dumps(head).encode()
    data = struct.pack("<Q", len(words)) + words + bytes(size)
    with pytest.raises(FedstillError, match="these bytes hold"):
        unpack_tree(data)


def test_names_that_would_fill_the_memory_are_refused_before_they_are_read():
    header = b"[" + b"[]," * (NAMES_LIMIT // 3 + 1) + b"[]]"
    data = struct.pack("<Q", len(header)) + header
    tracemalloc.start()
    try:
        with pytest.raises(FedstillError, match="at most"):
            unpack_tree(data)
        assert tracemalloc.get_traced_memory()[1] < 1 << 16
    finally:
        tracemalloc.stop()


def test_a_parcel_over_the_limit_is_refused_before_it_is_hashed(monkeypatch):
    data = seal({}, bytes(1000))
    assert unseal(data, limit=len(data)).body == bytes(1000)
    monkeypatch.setattr("fedstill.population.wire._digest", lambda *_: pytest.fail("it was hashed"))
    with pytest.raises(FedstillError, match="at most"):
        unseal(data, limit=len(data) - 1)


def test_facts_over_their_limit_are_refused():
    with pytest.raises(FedstillError, match="checksum"):
        unseal(seal({"long": "x" * FACTS_LIMIT}), limit=2 * FACTS_LIMIT)


def test_a_parcel_of_another_form_says_what_to_do():
    data = bytearray(seal({}))
    data[8] += 1
    with pytest.raises(FedstillError, match="install one version at all sites"):
        unseal(bytes(data), limit=LIMIT)


def test_what_is_no_bytes_is_refused():
    with pytest.raises(FedstillError, match="str"):
        unseal("fedstill", limit=LIMIT)


ONE = {"model": {"w": torch.zeros(2, 3), "n": torch.zeros((), dtype=torch.int64)}}


@pytest.mark.parametrize(
    ("other", "line"),
    [
        ({"model": {"w": torch.zeros(2, 3)}}, "the order lacks '/model/n'"),
        ({**ONE, "more": torch.zeros(1)}, "the order has an unknown name '/more'"),
        (
            {"model": {**ONE["model"], "w": torch.zeros(3, 2)}},
            r"the order/model/w is float32 \(3, 2\), and float32 \(2, 3\)",
        ),
        ({"model": {**ONE["model"], "w": torch.zeros(2, 3).half()}}, "is float16"),
        ({"model": {**ONE["model"], "n": torch.zeros((), dtype=torch.int32)}}, "is int32"),
    ],
)
def test_the_first_difference_of_form_is_named(other, line):
    check_form(ONE, ONE, "the order")
    with pytest.raises(FedstillError, match=line):
        check_form(other, ONE, "the order")


def test_somebody_else_s_words_stay_in_one_line_and_steer_no_terminal():
    assert shown("a\nb\x1b[31m\u202e\ud800c", 100) == "a b?[31m??c"
    assert shown("x" * 100) == "x" * 40
