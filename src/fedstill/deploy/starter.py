"""Write the folder of a deployment: what all parties agree on, who they are, and a start script for each."""

from __future__ import annotations

import importlib
import os
import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from fedstill import __version__
from fedstill.core.data import AT_SITES
from fedstill.core.errors import FedstillError
from fedstill.core.types import Dataset
from fedstill.deploy.folder import (
    EXPERIMENT_FILE,
    SERVER_FILE,
    SERVER_FOLDER,
    SITE_FILE,
    SITES_FOLDER,
    Deployment,
    Member,
    check_names,
    read_deployment,
    write_roster,
)
from fedstill.deploy.server import BY_SITES, built_for, server_experiment
from fedstill.experiment.build import agreed_data, build_federation
from fedstill.experiment.code_names import code_names
from fedstill.experiment.config import Experiment
from fedstill.experiment.run_folder import is_local, read_contract, unlabeled_place
from fedstill.loop.federate import check_built
from fedstill.methods.own_code import own_files
from fedstill.storage import toml as toml_io
from fedstill.storage.files import write_whole

TOKENIZER_FILE = "tokenizer.json"
TEST_SHARE = 0.2  # of a site's rows, where the server has none to test on


class Asked(NamedTuple):
    """What `fedstill deploy init` was asked for."""

    names: tuple[str, ...]
    folder: Path
    address: str
    seats: int = 0  # client ids; 0: as many as there are names
    contract: Path | None = None  # a run whose contract says the form of samples; None: the experiment's data say it


def write_deployment(experiment: Experiment, asked: Asked) -> list[str]:
    """Write the folder, and return what was decided and what is to be done next, a line each."""
    check_names(list(asked.names))
    if asked.folder.exists() and any(asked.folder.iterdir() if asked.folder.is_dir() else [asked.folder]):
        raise FedstillError(f"--out: '{asked.folder}' is there already and holds files: give a new folder")
    _refuse_what_sites_lack(experiment)
    form, notes = _form(experiment, asked.contract)
    agreed, more = _agreed(experiment, form, len(asked.names))
    seats = max(asked.seats, len(asked.names))
    run = f"{experiment.name}-{datetime.now(UTC):%Y%m%dT%H%M%S}"
    members = tuple(Member(client, name) for client, name in enumerate(asked.names))
    text = _EXPERIMENT_HEAD + toml_io.dumps(agreed.model_dump())
    _write_parties(asked, agreed, experiment, run, seats, text)
    write_roster(asked.folder, run, seats, members)
    if form.tokenizer is not None:
        for folder in (asked.folder, *(asked.folder / SITES_FOLDER / name for name in asked.names)):
            write_whole(folder / TOKENIZER_FILE, form.tokenizer.file)
    try:
        deployment = read_deployment(asked.folder)
        check_built(built_for(deployment, server_experiment(deployment)))  # what a run would refuse is refused now
    except FedstillError:
        shutil.rmtree(asked.folder)
        raise
    return [*notes, *more, *_write_transport(deployment), f"Next: read {asked.folder}/README.md"]


def _refuse_what_sites_lack(experiment: Experiment) -> None:
    """Refuse settings that rest on rows in one place, or on files that sites do not have."""
    data, lines = experiment.data, []
    if data.window is not None:
        lines.append("data.window: sites read tables, images and texts by data.tokens, no windows of characters yet")
    if (
        data.client_rows is not None
        or data.validation
        or (data.unlabeled not in ("none", "test", "", 0) and not unlabeled_place(experiment))
    ):
        key = "client_rows" if data.client_rows is not None else "validation" if data.validation else "unlabeled"
        lines.append(
            f"data.{key} takes rows away from clients, and here the server has none of theirs: set data.unlabeled and "
            "data.test to files of the server's own, and leave this key out"
        )
    if experiment.model.start is not None:
        lines.append("model.start: sites have no such file yet: leave it out")
    if files := own_files(code_names(experiment.model_dump())):
        lines.append(
            f"'{files[0]}': code of your own does not travel, and sites have only the installed fedstill: register it "
            "in a package that all parties install"
        )
    if lines:
        raise FedstillError(*lines)


def _form(experiment: Experiment, contract: Path | None) -> tuple[Dataset, list[str]]:
    """Return the task without rows, from the experiment's own keys, a run's contract, or a look at the data."""
    data = experiment.data
    if contract is not None:
        return read_contract(contract).data.data, [f"classes, columns and scale: as in the contract of {contract}"]
    if data.classes and (data.columns or data.shape) and (data.mean or data.scale == "none"):
        return agreed_data(experiment), ["classes, columns and scale: as the experiment file says them"]
    keys = experiment.partition.options.get("keys", []) if experiment.partition.scheme == "natural" else []
    owners = [keys] if isinstance(keys, str) else list(keys)
    table = {**data.model_dump(), "keys": [*data.keys, *(key for key in owners if key not in data.keys)]}
    if data.scale != "unlabeled" and data.tokens is None:
        table["unlabeled"] = "none"
    looked = experiment.replace(data={**table, "test": None}, partition={"scheme": "iid", "clients": 1}, cohort=1)
    dataset = build_federation(looked).train
    rows = f"{len(dataset.y):,} rows of {data.source}"
    if dataset.tokenizer is not None:
        return dataset, [f"classes: as in {data.source}", f"vocabulary: {_vocabulary(experiment, rows)}"]
    notes = [f"classes and columns: as in {data.source}"]
    if data.mean or data.scale != "train":
        return dataset, [*notes, "scale: as the experiment file says it"]
    return dataset, [
        *notes,
        f"scale: mean and deviation of {rows}, written as numbers into experiment.toml; if these rows are one party's, "
        "the numbers tell of them, so put public values there",
    ]


def _vocabulary(experiment: Experiment, rows: str) -> str:
    data = experiment.data
    if data.tokenizer is not None:
        return f"as in {data.tokenizer}"
    if unlabeled_place(experiment):
        return f"words of the server's own texts in {data.unlabeled}, written into {TOKENIZER_FILE}"
    return (
        f"words of {rows}, written into {TOKENIZER_FILE}; if these texts are one party's, it tells of them, so name "
        "texts of the server's own as data.unlabeled, or a public file as data.tokenizer"
    )


def _agreed(experiment: Experiment, form: Dataset, sites: int) -> tuple[Experiment, list[str]]:
    """Return the experiment as all parties get it, and what was decided on the way."""
    data, notes = experiment.data, list[str]()
    table = data.model_dump() | {
        "source": AT_SITES, "test": None, "keys": (), "drop": (), "size": None, "test_limit": data.test_limit,
        "classes": form.classes, "label": form.label or data.label, "scale": "train" if form.mean else "none",
        "unlabeled": "test" if data.unlabeled == "test" else "none",
    }  # fmt: skip
    if form.tokenizer is not None:
        table |= {"tokenizer": TOKENIZER_FILE, "inputs": tuple(column.name for column in form.columns)}
    else:
        table |= {"mean": form.mean, "std": form.std, "inputs": ()}
        if form.columns:
            table["columns"] = {column.name: _column(column) for column in form.columns}
            rules = form.columns[0]
            table |= {"missing": rules.missing, "unknown": rules.unknown}
        elif form.x.ndim == 4 and str(form.x.dtype) == "torch.uint8":
            table["shape"] = tuple(form.x.shape[1:])
        else:
            raise FedstillError(
                f"samples are {tuple(form.x.shape[1:])} {form.x.dtype}: parties can agree on tables, on images as "
                "bytes and on texts; save the images as bytes (uint8)"
            )
    changes: dict[str, Any] = {"partition": {"scheme": "natural", "clients": 0, "keys": "site"}}
    engine = experiment.engine.model_dump() | {"device": "auto"}
    if engine["name"] == "auto":
        engine["name"] = "looped"
    cohort = experiment.cohort if experiment.cohort < 1 else min(experiment.cohort, sites)
    if cohort != experiment.cohort:
        notes.append(f"cohort: {cohort} sites take part in a round, because there are no more")
    if data.test is None and experiment.privacy.epsilon is not None:
        raise FedstillError(
            "privacy.epsilon: the server has no rows to test on, and under a budget sites do not say how many rows the "
            "model gets right, because that has no noise: set data.test to rows of the server's own"
        )
    if data.test is None and experiment.evaluate == "global_test":
        share = data.client_test_share or TEST_SHARE
        table["client_test_share"] = share
        changes["evaluate"] = BY_SITES
        notes.append(
            f"test: the server has no rows to test on, so each site holds back {share:.0%} of its rows and says how "
            "many the model gets right (set data.test to rows of the server's own to change that)"
        )
    changes |= {"data": table, "engine": engine, "cohort": cohort, "compare": {}, "track": ()}
    if form.columns and form.tokenizer is None:
        _check_gaps(form)
    return experiment.replace(**changes), notes


def _column(column: Any) -> Any:
    if column.words:
        return column.words
    width = column.width - column.flag
    return "numbers" if width == 1 else width


def _check_gaps(form: Dataset) -> None:
    """Refuse a form in which gaps are filled and only some columns mark them, because the file cannot say that."""
    numbers = [column for column in form.columns if not column.words and column.width - column.flag == 1]
    if any(column.missing == "mean" and not column.flag for column in numbers):
        raise FedstillError(
            "data.missing = 'mean' marks gaps in a column only if there are some, and sites may have gaps anywhere: "
            "leave rows with gaps out (--set data.missing=skip), or add data.columns, data.mean and data.std by hand"
        )


def _write_parties(asked: Asked, agreed: Experiment, experiment: Experiment, run: str, seats: int, text: str) -> None:
    folder, server = asked.folder, asked.folder / SERVER_FOLDER
    try:
        write_whole(folder / EXPERIMENT_FILE, text)
        unlabeled = unlabeled_place(experiment) or ""
        places = {"test": experiment.data.test or "", "unlabeled": unlabeled}
        places = {
            key: str(Path(place).resolve()) if place and is_local(place) else place for key, place in places.items()
        }
        words = {"address": asked.address, **places}
        write_whole(
            server / SERVER_FILE, _filled(_SERVER, **{key: toml_io.toml_value(word) for key, word in words.items()})
        )
        _write_script(server / "start.sh", _SERVER_START)
        place = str(folder.resolve()).replace("%", "%%")
        write_whole(server / "fedstill-server.service", _filled(_SERVER_UNIT, run=run, folder=place))
        for client, name in enumerate(asked.names):
            site = folder / SITES_FOLDER / name
            write_whole(site / EXPERIMENT_FILE, text)
            facts = {"run": run, "name": name, "client": client, "seats": seats, "server": asked.address}
            lines = {key: toml_io.toml_value(value) for key, value in facts.items()}
            write_whole(site / SITE_FILE, _filled(_SITE, **lines))
            _write_script(site / "start.sh", _filled(_SITE_START, name=name))
            write_whole(site / f"fedstill-site-{name}.service", _filled(_SITE_UNIT, name=name, run=run))
            words = {"name": name, "run": run, "server": asked.address, "version": __version__}
            write_whole(site / "README.md", _filled(_SITE_README, **words))
        names = "\n".join(f"   - `sites/{name}/` goes to **{name}**" for name in asked.names)
        write_whole(
            folder / "README.md", _filled(_README, run=run, names=names, address=asked.address, first=asked.names[0])
        )
    except OSError as error:
        raise FedstillError(
            f"--out: cannot write into '{folder}' ({error.strerror or error}): give another folder"
        ) from error


def _write_script(path: Path, text: str) -> None:
    write_whole(path, text)
    os.chmod(path, 0o755)


def _filled(template: str, **words: Any) -> str:
    for key, word in words.items():
        template = template.replace(f"@{key}@", str(word))
    return template


def _write_transport(deployment: Deployment) -> list[str]:
    """Let the transport write its keys, certificates and app, if it is there; else say what is missing."""
    try:
        files = importlib.import_module("fedstill.deploy.flower.files")
    except ImportError:
        return [
            "missing: keys, certificates and the Flower app; install them with pip install 'fedstill[flower]' and call "
            "init again. `fedstill site` and `fedstill deploy rehearse` work without them"
        ]
    return list(files.write(deployment) or ())


_EXPERIMENT_HEAD = """\
# What all parties agree on: this file is the same at the server and at every site, byte for byte, and each party
# refuses to work with another one. [data] says the classes, the columns and the scale; nothing is fitted to one site.
"""

_SERVER = """\
# What the server decides alone. Written by `fedstill deploy init`.

# where sites reach the server
address = @address@
# seconds that a round waits for answers; whoever is later is left out of that round
deadline = 120.0
# sites that are drawn beyond the cohort; the first to answer fill it
spare = 0
# labeled rows of the server's own to test on, a file or folder that counts from here; "": none
test = @test@
# unlabeled rows of the server's own, for methods that distil on them; "": none
unlabeled = @unlabeled@
"""

_SITE = """\
# Who this site is (the operator wrote these five lines; leave them as they are).
run = @run@
name = @name@
client = @client@
seats = @seats@
server = @server@

# What this site decides alone. The server cannot change any of it.
data = ""                       # this site's rows: a CSV, parquet or npz file, or a folder; counted from here
memory = "memory"               # what the site remembers between rounds, its audit and its secret; keep it, back it up
socket = "socket/desk.sock"     # where the process that faces the network hands over orders
socket_group = ""               # a group of the system whose users may use the socket too; "": only this user
begin_anew = false              # true: go on with an empty memory if it was lost; false: be left out instead
evaluates = true                # true: say how many held-back rows a model gets right when the server asks
# epsilon = 4.0                 # this site's own privacy budget; the smaller one of this and the experiment's holds
"""

_SITE_START = """\
#!/bin/sh
# Starts site @name@: it reads this site's rows, asks for consent the first time, and waits for orders at its socket.
cd "$(dirname "$0")" && exec fedstill site . "$@"
"""

_SERVER_START = """\
#!/bin/sh
# Starts the run, or goes on with it after a stop.
cd "$(dirname "$0")/.." && exec fedstill deploy run . "$@"
"""

_SITE_UNIT = """\
# /etc/systemd/system/fedstill-site-@name@.service: write the user and the folders of your machine.
# First consent once by hand, as that user (./start.sh), because nobody can type yes here.
[Unit]
Description=fedstill site @name@ in the run @run@

[Service]
# a user that may read the rows; the process that faces the network runs as another one (see socket_group)
User=fedstill-data
WorkingDirectory=/srv/fedstill/@name@
ExecStart=/srv/fedstill/venv/bin/fedstill site .
Restart=on-failure
RestartSec=10
# this process has the rows, and no network at all
PrivateNetwork=yes
NoNewPrivileges=yes
ProtectSystem=strict
ProtectHome=yes
ReadWritePaths=/srv/fedstill/@name@

[Install]
WantedBy=multi-user.target
"""

_SERVER_UNIT = """\
# /etc/systemd/system/fedstill-server.service: write the user and the folders of your machine
[Unit]
Description=fedstill server of the run @run@
After=network-online.target
Wants=network-online.target

[Service]
# a user that may write the folder of the deployment
User=fedstill
WorkingDirectory=@folder@
ExecStart=/srv/fedstill/venv/bin/fedstill deploy run .
Restart=on-failure
RestartSec=30
NoNewPrivileges=yes
ProtectSystem=strict
ProtectHome=yes
ReadWritePaths="@folder@"

[Install]
WantedBy=multi-user.target
"""

_SITE_README = """\
# Site @name@ in the run @run@

The operator of the server at @server@ sent you this folder. Your rows stay with you.

1. Install fedstill @version@, the operator's version, with Flower: docs/flower.md of fedstill says how.
2. Name your data in `site.toml`: `data = "patients.csv"`. A path counts from this folder.
3. `fedstill site .` reads your rows, says where they differ from what was agreed (`experiment.toml`), and shows what
   would leave. Nothing leaves before you type yes. What you agreed to stands in `consent.json`, and you are asked
   again if it changes.
4. Leave it running. It waits at a socket of this machine and opens no port. Beside it start `flower/supernode.sh`,
   and leave it running, too: it fetches the server's orders and hands them to the socket. The operator adds `flower/`
   if it is not here.
5. `memory/audit.jsonl` has a line for everything that came and left; `metrics.prom` has numbers for Prometheus.

Keep `memory/`: it holds what your site remembers between rounds, how much of its budget is spent, and its secret. Give
`memory/secret` to nobody: your noise is made from it.
"""

_README = """\
# Deployment of the run @run@

The server at @address@ trains one model with the sites below. Their rows stay with them.

| file | who may change it |
|---|---|
| `experiment.toml` | nobody alone: every party has the same copy, and refuses to work with another one |
| `roster.json` | the operator: who takes part, and in which rounds (`first`, `last`) |
| `server/server.toml` | the operator: address, deadline, spare sites, the server's own rows |
| `sites/NAME/site.toml` | that site: its rows, its folders, its budget, what it agrees to |

In this order:

1. Operator: read `experiment.toml`, and agree on it with the sites, above all on `[data]`: classes, columns, scale.
2. Operator: `fedstill deploy rehearse .` starts the server and all sites on this machine, with rows that are made up
   (or with yours: `--data @first@=rows.csv`), and compares the result with a simulation.
3. Operator: send each site its folder, on a way that keeps it secret, because it may hold a key:
@names@
4. Each site: follow the README.md in that folder. It starts `fedstill site .` and `flower/supernode.sh`, and both must
   keep running.
5. Operator: `server/start.sh` runs the experiment, and goes on with it after a stop. The run's folder is `server/run`:
   `fedstill watch server/run`, `fedstill report server/run`, `fedstill predict server/run NEW_ROWS.csv`.

What happens to a site that is late, away, new or lost, and how a site leaves: docs/deploy.md of fedstill.
"""
