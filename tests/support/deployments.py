"""A deployment of three sites with tables of a few rows, and its sites as desks of this process."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fedstill.deploy.folder import Deployment, read_deployment, read_site
from fedstill.deploy.site import OpenedSite, open_site
from fedstill.deploy.starter import Asked, write_deployment
from fedstill.experiment.config import Experiment
from fedstill.population.loopback import Loopback

NAMES = ("north", "south", "west")
ROWS = {"north": 40, "south": 30, "west": 20}


def table(path: Path, count: int, seed: int, *, unit: float = 1.0) -> Path:
    """Write a table in which the class follows from two numbers and a word."""
    draw = random.Random(seed)
    lines = ["patient_id,sex,age,glucose,outcome"]
    for row in range(count):
        sex, age, glucose = draw.choice("fm"), draw.gauss(60, 9), draw.gauss(95, 18)
        ill = (age - 60) / 9 + (glucose - 95) / 18 + (sex == "m") + draw.gauss(0, 0.5) > 0.5
        lines.append(f"p{row},{sex},{age:.1f},{glucose / unit:.3f},{'ill' if ill else 'well'}")
    path.write_text("\n".join(lines) + "\n")
    return path


def experiment(place: Path, method: str = "scaffold", **changes: Any) -> Experiment:
    settings: dict[str, Any] = {
        "name": "heart", "rounds": 3, "cohort": 3, "method": method,
        "data": {"source": str(place), "label": "outcome", "drop": ["patient_id"], "client_test_share": 0.2},
        "partition": {"scheme": "iid", "clients": 3}, "model": {"name": "mlp", "hidden": [8]},
        "local": {"batch_size": 8, "lr": 0.1}, "engine": {"name": "looped", "device": "cpu"},
    }  # fmt: skip
    return Experiment.model_validate({**settings, **changes})


def a_deployment(folder: Path, method: str = "scaffold", *, seats: int = 0, **changes: Any) -> Deployment:
    """Write a deployment with a table for each site, and name the tables in the sites' own files."""
    pilot = table(folder / "pilot.csv", 60, 0)
    write_deployment(experiment(pilot, method, **changes), Asked(NAMES, folder / "dep", "localhost:9092", seats))
    deployment = read_deployment(folder / "dep")
    for seed, (name, count) in enumerate(ROWS.items(), 1):
        place = table(folder / f"{name}.csv", count, seed)
        set_line(deployment.site_folder(name) / "site.toml", "data", f'"{place}"')
    return deployment


def set_line(path: Path, key: str, value: str) -> None:
    """Change the value of a key as somebody with an editor would."""
    lines = path.read_text().splitlines()
    (place,) = (number for number, line in enumerate(lines) if line.startswith(f"{key} ="))
    lines[place] = f"{key} = {value}"
    path.write_text("\n".join(lines) + "\n")


def opened(deployment: Deployment) -> dict[int, OpenedSite]:
    sites = [open_site(read_site(deployment.site_folder(member.name))) for member in deployment.members]
    return {site.folder.client: site for site in sites}


class Faulty(Loopback):
    """A loopback on which `fault(exchange number, client, answer)` decides what arrives."""

    def __init__(self, sites: Mapping[int, OpenedSite], fault: Any = None) -> None:
        super().__init__({client: site.desk for client, site in sites.items()})
        self.fault, self.orders = fault, 0

    def exchange(self, common: bytes, each: Mapping[int, bytes]) -> Iterator[tuple[int, Any]]:
        self.orders += 1
        for client, own in each.items():
            if self.fault is None:
                yield client, self.desks[client].answer(common, own)
            else:
                yield from self.fault(self.orders, client, lambda c=client, o=own: self.desks[c].answer(common, o))
