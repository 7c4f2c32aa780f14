"""The folder of a deployment: who takes part in which run, and what each party has to know. Files become objects here.

experiment.toml           the experiment, the same bytes for everybody
roster.json               the run's name, and each site: client id, name, public key, first and last round
server/server.toml        what the server alone decides: address, deadline, spare clients, its own rows
sites/NAME/               all that one site needs; it is sent to the site as it is
    experiment.toml       the same copy
    site.toml             who the site is, and what it alone decides: its data, its folders, its budget
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Gt, Le
from pydantic import AfterValidator, ConfigDict, Strict, TypeAdapter, ValidationError
from pydantic_core import PydanticCustomError

from fedstill.core.errors import FedstillError
from fedstill.core.limits import Count, CountOrNone, Flag, Positive, Text
from fedstill.core.population import Stay
from fedstill.experiment.config import Experiment
from fedstill.storage import toml as toml_io
from fedstill.storage.files import read_json, write_whole

EXPERIMENT_FILE, ROSTER_FILE, SERVER_FILE, SITE_FILE = "experiment.toml", "roster.json", "server.toml", "site.toml"
SERVER_FOLDER, SITES_FOLDER, RUN_FOLDER = "server", "sites", "run"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
NAMED_FILE = re.compile(r"[/\\]|\.\w+$")  # a place that can only be meant as a file or folder
MOST_SEATS = 100_000
# settings that each party chooses for its own machine: no upload and no answer depends on them
OWN_BUSINESS = {"engine", "track", "compare", "early_stop", "target", "best", "checkpoint_every", "evaluate_every"}


ALWAYS = Stay()


@dataclass(frozen=True)
class Member:
    """A site as the roster names it. Its client id never comes from the site itself."""

    client: int
    name: str
    public_key: str = ""  # by which the transport knows it; empty: not known yet
    stay: Stay = ALWAYS


@dataclass(frozen=True)
class Deployment:
    """What the server knows: the run, its members, and how long it waits for them.

    seats: client ids of the run. More than there are members leaves room for sites that join later.
    deadline: seconds that the server waits for the answers of a round.
    test, unlabeled: the server's own rows, a file or folder each; empty: it has none.
    """

    folder: Path
    run: str
    experiment: Experiment
    facts: Mapping[str, str]  # what server and sites must say alike; population/wire.py adds fedstill's version
    members: tuple[Member, ...]
    seats: int
    address: str
    deadline: float
    spare: int = 0
    test: str = ""
    unlabeled: str = ""

    @property
    def quorum(self) -> int | float:
        """Uploads that a round needs: a number, or a share of the cohort. It stands in the experiment."""
        return self.experiment.guard.quorum

    @property
    def stays(self) -> dict[int, Stay]:
        return {member.client: member.stay for member in self.members if member.stay != ALWAYS}

    @property
    def names(self) -> tuple[str, ...]:
        """Return a name for each seat; a seat that nobody holds yet is called so."""
        named = {member.client: member.name for member in self.members}
        return tuple(named.get(client, f"(seat {client})") for client in range(self.seats))

    @property
    def run_dir(self) -> Path:
        """Return the folder of the server's run: numbers, models, audit and report."""
        return self.folder / SERVER_FOLDER / RUN_FOLDER

    def site_folder(self, name: str) -> Path:
        return self.folder / SITES_FOLDER / name


@dataclass(frozen=True)
class SiteFolder:
    """What a site knows: who it is in which run, where its data are, and what it decides alone."""

    folder: Path
    run: str
    experiment: Experiment
    facts: Mapping[str, str]  # as the server's
    name: str
    client: int
    seats: int
    server: str  # the address, for people
    data: str
    memory: Path
    socket: Path
    group: str = ""
    begin_anew: bool = False
    evaluates: bool = True
    epsilon: float | None = None


_FORM = ConfigDict(extra="forbid", allow_inf_nan=False)


def _in_a_line(word: str) -> str:
    """Refuse a word that could write lines of its own into what people consent to, or steer their terminal."""
    if not word.isprintable():
        raise PydanticCustomError("line", "it has signs that cannot be printed")
    return word


Line = Annotated[Text, AfterValidator(_in_a_line)]


@dataclass(frozen=True)
class _RosterSite:
    __pydantic_config__ = _FORM
    client: CountOrNone
    name: Line
    public_key: Line = ""
    first: Count = 1
    last: Count | None = None


@dataclass(frozen=True)
class _Roster:
    __pydantic_config__ = _FORM
    run: Line
    seats: Annotated[int, Strict(), Gt(0), Le(MOST_SEATS)]
    sites: tuple[_RosterSite, ...]


@dataclass(frozen=True)
class _Server:
    """server.toml, with the defaults that `fedstill deploy init` writes."""

    __pydantic_config__ = _FORM
    address: Line
    deadline: Positive = 120.0
    spare: CountOrNone = 0
    test: Line = ""
    unlabeled: Line = ""


@dataclass(frozen=True)
class _Site:
    """site.toml."""

    __pydantic_config__ = _FORM
    run: Line
    name: Line
    client: CountOrNone
    seats: Count
    server: Line
    data: Line = ""
    memory: Line = "memory"
    socket: Line = "socket/desk.sock"
    socket_group: Line = ""
    begin_anew: Flag = False
    evaluates: Flag = True
    epsilon: Positive | None = None


def facts_of(run: str, experiment: Experiment) -> dict[str, str]:
    """Return the run's name and a digest of everything in the experiment that decides what a site computes."""
    table = {key: value for key, value in experiment.model_dump().items() if key not in OWN_BUSINESS}
    digest = hashlib.blake2b(json.dumps(table).encode(), digest_size=16).hexdigest()
    return {"run": run, "experiment": digest}


def read_deployment(folder: str | Path) -> Deployment:
    """Read and check the folder that `fedstill deploy init` wrote; a mistake is one line that names its file."""
    folder = Path(folder)
    if not (folder / ROSTER_FILE).is_file():
        raise FedstillError(
            f"'{folder}' is no folder of a deployment (no {ROSTER_FILE}): give the one of `fedstill deploy init`"
        )
    try:
        tree = read_json(folder / ROSTER_FILE)
    except (ValueError, OSError) as error:
        raise FedstillError(f"{folder / ROSTER_FILE} is no JSON ({error}): correct it") from None
    roster = _checked(_Roster, tree, folder / ROSTER_FILE)
    path = folder / SERVER_FOLDER / SERVER_FILE
    server = _checked(_Server, toml_io.read_toml(path), path)
    members = tuple(
        Member(site.client, site.name, site.public_key, Stay(site.first, site.last)) for site in roster.sites
    )
    _check_members(members, roster.seats, folder / ROSTER_FILE)
    experiment, facts = _read_experiment(folder, roster.run)
    return Deployment(
        folder,
        roster.run,
        experiment,
        facts,
        members,
        roster.seats,
        server.address,
        server.deadline,
        server.spare,
        *(_as_place(path.parent, place) for place in (server.test, server.unlabeled)),
    )


def read_site(folder: str | Path) -> SiteFolder:
    """Read and check a site's own folder; its places count from there."""
    folder = Path(folder)
    if not (folder / SITE_FILE).is_file():
        raise FedstillError(
            f"'{folder}' is no folder of a site (no {SITE_FILE}): give the one that the operator sent, such as "
            "sites/north of a deployment"
        )
    site = _checked(_Site, toml_io.read_toml(folder / SITE_FILE), folder / SITE_FILE)
    if site.client >= site.seats:
        raise FedstillError(f"{folder / SITE_FILE}: client = {site.client} has no place among {site.seats} seats")
    experiment, facts = _read_experiment(folder, site.run)
    return SiteFolder(
        folder,
        site.run,
        experiment,
        facts,
        site.name,
        site.client,
        site.seats,
        site.server,
        _as_place(folder, site.data),
        folder / site.memory,
        folder / site.socket,
        site.socket_group,
        site.begin_anew,
        site.evaluates,
        site.epsilon,
    )


def _read_experiment(folder: Path, run: str) -> tuple[Experiment, dict[str, str]]:
    """Return the experiment with the full path of its tokenizer, and the facts by which parties know each other."""
    experiment = Experiment.from_toml(folder / EXPERIMENT_FILE)
    facts, data = facts_of(run, experiment), experiment.data
    if data.tokenizer is not None:
        data = data.model_copy(update={"tokenizer": str(folder / data.tokenizer)})
    return experiment.model_copy(update={"data": data}), facts


def _as_place(folder: Path, place: str) -> str:
    """Return a place as it counts from a folder; the name of a dataset that is no file stays as it is."""
    path = folder / Path(place).expanduser()
    return "" if not place else str(path) if path.exists() or NAMED_FILE.search(place) else place


def write_roster(folder: Path, run: str, seats: int, members: tuple[Member, ...]) -> None:
    """Write roster.json, a line for each site, so that people can read and change it."""
    lines = [
        json.dumps({
            "client": member.client, "name": member.name, "public_key": member.public_key,
            "first": member.stay.first, "last": member.stay.last,
        })
        for member in members
    ]  # fmt: skip
    listed = ",\n  ".join(lines)
    text = f'{{"run": {json.dumps(run)},\n "seats": {seats},\n "sites": [\n  {listed}\n]}}\n'
    write_whole(folder / ROSTER_FILE, text)


def with_public_keys(deployment: Deployment, keys: Mapping[str, str]) -> Deployment:
    """Write public keys into roster.json, and return the deployment with them. keys: by the names of sites."""
    members = tuple(
        replace(member, public_key=keys.get(member.name, member.public_key)) for member in deployment.members
    )
    write_roster(deployment.folder, deployment.run, deployment.seats, members)
    return replace(deployment, members=members)


def check_names(names: list[str]) -> None:
    """Refuse names of sites that cannot be a folder, or that two of them share where case does not count."""
    for name in names:
        if not NAME.fullmatch(name):
            raise FedstillError(f"site '{name}': a name has letters, digits, '.', '_' and '-', because it is a folder")
    folded = [name.casefold() for name in names]
    if twice := sorted({name for name in names if folded.count(name.casefold()) > 1}):
        raise FedstillError(f"site '{twice[0]}' is named twice: each site needs a name of its own")


def _check_members(members: tuple[Member, ...], seats: int, path: Path) -> None:
    try:
        check_names([member.name for member in members])
    except FedstillError as error:
        raise FedstillError(f"{path}: {error}") from None
    ids = [member.client for member in members]
    if not ids:
        raise FedstillError(f"{path}: there is no site: name at least one")
    if len(set(ids)) < len(ids):
        raise FedstillError(f"{path}: two sites have one client id: give each its own")
    if max(ids) >= seats:
        raise FedstillError(f"{path}: client {max(ids)} has no place among {seats} seats (0 to {seats - 1})")
    keys = [member.public_key for member in members if member.public_key]
    if len(set(keys)) < len(keys):
        raise FedstillError(f"{path}: two sites have one public key, so that nobody could tell them apart")
    for member in members:
        if member.stay.last is not None and member.stay.last < member.stay.first:
            raise FedstillError(f"{path}: site '{member.name}' leaves before it comes: last must not be below first")


def _checked(kind: type[Any], table: Any, path: Path) -> Any:
    try:
        return TypeAdapter(kind).validate_python(table, strict=False)
    except ValidationError as error:
        mistakes = []
        for mistake in error.errors():
            key = ".".join(map(str, mistake["loc"]))
            known = mistake["type"] == "unexpected_keyword_argument"
            mistakes.append(f"{path}: {key}: {'no such key' if known else mistake['msg'].lower()}")
        raise FedstillError(*mistakes) from None
