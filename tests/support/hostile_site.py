"""A site whose service answers as an attacker would, in each round in another way. Run as a program: FOLDER."""

from __future__ import annotations

import json
import struct
import sys

import safetensors.torch
import torch

from fedstill.deploy.folder import read_site
from fedstill.deploy.rows import read_rows
from fedstill.deploy.site import desk_of
from fedstill.deploy.socket import serve
from fedstill.loop.message import with_digest
from fedstill.population.desk import Desk
from fedstill.population.wire import seal, unseal

ATTACKS = ("garbage", "nan", "oversized", "replayed", "forged")  # round 2 is the first
LIMIT = 1 << 30
TOO_MUCH = 20 << 20  # bytes


def attack_of(round: int) -> str:
    return "" if round == 1 else ATTACKS[(round - 2) % len(ATTACKS)]


class Hostile:
    """Works as an honest desk does, and changes what it says."""

    def __init__(self, desk: Desk) -> None:
        self.desk, self.before = desk, b""

    def answer(self, common: bytes, own: bytes) -> bytes:
        honest = self.desk.answer(common, own)
        before, self.before = self.before, honest
        facts, body = unseal(honest, limit=LIMIT)
        match attack_of(unseal(common, limit=LIMIT).facts["round"]):
            case "garbage":
                return b"\x00garbage\xff" * 100
            case "nan":
                return seal(facts, with_nan(body))
            case "oversized":
                return seal(facts, body + bytes(TOO_MUCH))
            case "replayed":
                return before
            case "forged":
                return seal({**facts, "client": 0}, body)
        return honest


def with_nan(body: bytes) -> bytes:
    (length,) = struct.unpack("<Q", body[:8])
    metadata = json.loads(body[8 : 8 + length])["__metadata__"]
    tensors = safetensors.torch.load(body)
    broken = {
        name: torch.full_like(leaf, torch.nan) if leaf.is_floating_point() else leaf for name, leaf in tensors.items()
    }
    return with_digest(safetensors.torch.save(broken, metadata=metadata))


if __name__ == "__main__":
    site = read_site(sys.argv[1])
    serve(Hostile(desk_of(site, read_rows(site.experiment, site.data).data)), site.socket)
