"""What would leave a site, in plain words, and the consent of its people to exactly these words."""

from __future__ import annotations

import getpass
import hashlib
import json
import re
import textwrap
from dataclasses import replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from fedstill.about.explain import explain
from fedstill.core.errors import FedstillError
from fedstill.core.tree import byte_size
from fedstill.deploy.folder import SiteFolder
from fedstill.experiment.overrides import without_defaults
from fedstill.loop.privacy_plan import rounds_a_client_may_play, stretches_of_client
from fedstill.population.desk import Desk
from fedstill.privacy.statement import statement
from fedstill.report import counted, human_bytes
from fedstill.storage.files import read_json, write_whole

CONSENT_FILE = "consent.json"
WIDTH = 100


def what_leaves(site: SiteFolder, desk: Desk) -> str:
    """Return in plain words what this run takes in, what leaves this site, what stays, and what protects it.

    `fedstill explain` says what the method sends, and the privacy statement says what is protected: both are asked.
    """
    experiment, task = site.experiment, desk.task
    name = without_defaults(experiment.method)
    facts = _explained(name)
    held, tested = int(task.federation.offsets[-1]), task.federation.client_test
    rounds = desk.rounds
    weights = desk._first
    lines = [
        f"Site {site.name} (client {site.client} of {site.seats}) in the run {site.run}",
        f"Server: {site.server}",
        f"Method: {name}; at most {rounds} rounds; network: {experiment.model.name}",
        "",
        "LEAVES this site, in each round in which it takes part:",
        *_listed([f"the trained model ({human_bytes(byte_size(weights))})", *_slots(facts["leaves_a_client"][1:])]),
    ]
    if once := facts["leaves_a_client_once"]:
        lines += ["LEAVES this site once, before the first round:", *_listed(_slots(once))]
    if desk.evaluates and tested is not None:
        lines += [
            "LEAVES this site when the server asks how good a model is:",
            *_listed([f"how many of {len(tested[0])} held-back rows the model gets right, and its loss on them"]),
        ]
    lines += [
        "LEAVES this site beside that:",
        *_listed([
            "when it answers and how long it takes, fedstill's version, and the name of the run",
            "where it cannot answer, the reason in one line, without rows and without names of folders",
        ]),
        "STAYS at this site:",
        *_listed([f"all rows: {held} to train on{_beside(tested)}", *_slots(facts["stays_on_a_client"][1:])]),
        "COMES to this site:",
        *_listed([*_slots(facts["sent_to_a_client"]), "no code: the method is this site's own installed fedstill"]),
        "PROTECTED is:",
        *_listed(protection(desk)),
        "A model tells something of the rows that it was trained on; noise bounds how much, where there is noise.",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


@cache
def _explained(name: str) -> dict[str, Any]:
    """Return what `fedstill explain` says of a method, which it finds in a tiny round."""
    return explain(name)


def protection(desk: Desk) -> list[str]:
    """Return the privacy statement after all rounds that this site may answer, a line each."""
    task, weights = desk.task, desk._first
    after = stretches_of_client(task, weights)
    allowed = rounds_a_client_may_play(task, weights, desk.rounds)
    played = desk.rounds if allowed is None else allowed
    stretches = after(played)
    if desk.evaluates and task.federation.client_test is not None and desk.allowed is None:
        stretches = [
            replace(stretch, leaves={**stretch.leaves, "measured": "how good models are here"}) for stretch in stretches
        ]
    made = statement(stretches, task.privacy.delta)
    lines = [f"after {counted(played, 'round')}: {line}" for line in made.text().split("\n") if line != "no claim"]
    if not made.claims:
        lines.insert(0, "nothing by noise: who gets what leaves can compute from it whatever it tells of the rows")
    if allowed is not None:
        lines.append(
            f"this site's own budget: epsilon = {task.privacy.epsilon:g}, which allows {counted(allowed, 'round')}; "
            "then it answers no more, whatever the server asks"
        )
    return lines


def _listed(items: list[str]) -> list[str]:
    return [
        line for item in items for line in textwrap.wrap(item, WIDTH, initial_indent="  - ", subsequent_indent="    ")
    ]


def _slots(items: list[str]) -> list[str]:
    """Say of a slot's name that it is a name: 'control: as large as the model'."""
    return [re.sub(r"^(\w+): ", r"what the method calls \1: ", item) for item in items]


def _beside(tested: Any) -> str:
    return "" if tested is None or not len(tested[0]) else f", {len(tested[0])} held back to measure on"


def text_digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def given_consent(folder: Path, text: str) -> str:
    """Return who consented when to exactly this text; empty: nobody did."""
    try:
        kept = read_json(folder / CONSENT_FILE)
        return f"{kept['user']}, {kept['time']}" if kept["digest"] == text_digest(text) else ""
    except FileNotFoundError:
        return ""
    except (OSError, ValueError, KeyError, TypeError):
        raise FedstillError(f"{folder / CONSENT_FILE} cannot be read: remove it, and consent again") from None


def record_consent(folder: Path, text: str, *, how: str) -> None:
    """Write who consented when to which text, with a digest of it. how: typed, or by --yes."""
    facts = {"digest": text_digest(text), "time": datetime.now(UTC).isoformat(timespec="seconds"), "how": how}
    try:
        facts["user"] = getpass.getuser()
    except (OSError, KeyError):  # a user without a name
        facts["user"] = "unknown"
    write_whole(folder / CONSENT_FILE, json.dumps({**facts, "text": text}, indent=1, ensure_ascii=False) + "\n")
