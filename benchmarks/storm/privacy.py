"""Attack private runs: replay them from their published folders, cancel their noise, and measure what they give away.

    python benchmarks/storm/privacy.py [replay] [pairs] [audit] [--trials 24000] [--seed 0] [--json FILE]

replay: an adversary knows the experiment and two worlds that differ in all that one client holds. It reads the run's
    folder, replays both worlds with fedstill, and says in which one the run was. Forty runs with a secret, and forty
    whose seed is public, which shows that the attack works where it can.
pairs: 200 random pairs of settings, with public seeds and with secrets; the noise of a pair must have nothing in
    common.
audit: whole runs in which each client holds one of the two worst samples, which turn its move around, at the bound.
    Clients move along axes of their own, so that each of them is a trial. How often a threshold is right gives a lower
    bound of epsilon (Clopper-Pearson, 95 %), to be held against the claim.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import runpy
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fedstill
from fedstill.about.toy import trial_federation, trial_model
from fedstill.core.seeds import draw_cohort
from fedstill.core.types import Federation, Method, ServerStep, Training, Weights
from fedstill.engine import build_engines
from fedstill.experiment.build import build_federation
from fedstill.experiment.run_folder import make_contract
from fedstill.loop.checkpoint import load_checkpoint, load_weights
from fedstill.loop.federate import Built, Schedule, federate
from fedstill.loop.guard import Guard
from fedstill.methods import dp_fedavg
from fedstill.privacy.accountant import analytic_gaussian_multiplier
from fedstill.privacy.correlated import banded_root
from fedstill.privacy.plan import Privacy

DELTA = 1e-5
TARGET = 3  # the client whose data differ between the worlds
SURE_DIGITS = 10  # a number with so many significant digits is equal by intention, not by chance
AUDIT = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "privacy_audit.py"))

# ---- Replay ---------------------------------------------------------------------------------------------------------

EXPERIMENT = {
    "rounds": 3, "cohort": 8, "sampling": "poisson", "seed": 3, "checkpoint_every": 1,
    "data": {"source": "digits"},
    "partition": {"clients": 20},
    "model": {"name": "mlp", "hidden": [16]},
    "method": {"name": "dp_fedavg", "clip": 0.5, "noise_multiplier": 24.0},
    "engine": {"device": "cpu", "name": "looped"},
}  # fmt: skip


def experiment_of(**changes: Any) -> fedstill.Experiment:
    return fedstill.Experiment.model_validate({**EXPERIMENT, **changes})


def worlds(experiment: fedstill.Experiment) -> tuple[Federation, Federation]:
    """The federation, and the same one in which the target's images are negatives with other labels."""
    federation = build_federation(experiment)
    first, last = federation.offsets[TARGET : TARGET + 2].tolist()
    rows, x, y = federation.indices[first:last], federation.train.x.clone(), federation.train.y.clone()
    x[rows], y[rows] = 16 - x[rows], (y[rows] + 5) % 10
    return federation, replace(federation, train=replace(federation.train, x=x, y=y))


def facts_in(folder: Path) -> dict[str, Any]:
    """Every text and number in the JSON files of a run's folder, in its checkpoints and its log, by its place."""
    facts: dict[str, Any] = {}

    def note(place: str, value: Any) -> None:
        if isinstance(value, Mapping):
            for key, inner in value.items():
                note(f"{place}/{key}", inner)
        elif isinstance(value, list):
            for number, inner in enumerate(value):
                note(f"{place}/{number}", inner)
        else:
            facts[place] = value

    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.suffix == ".json":
            note(name, json.loads(path.read_text()))
        elif path.suffix in (".jsonl", ".txt"):
            for number, line in enumerate(path.read_text().splitlines()):
                note(f"{name}/{number}", json.loads(line) if path.suffix == ".jsonl" else line)
        elif path.suffix == ".zip":
            with zipfile.ZipFile(path) as file:
                note(name, json.loads(file.read("state.json")))
    return facts


def telling(value: Any, tested: int) -> bool:
    """Whether two worlds give an equal value only by intention: digests, and long numbers that count nothing."""
    if isinstance(value, str):
        return len(value) >= 12
    if isinstance(value, float) and math.isfinite(value):
        counted = abs(float(Fraction(value).limit_denominator(tested)) - value) < 1e-12
        return len(f"{value:.15g}".replace(".", "").lstrip("0-")) >= SURE_DIGITS and not counted
    return False


def vector(weights: Weights) -> torch.Tensor:
    return torch.cat([weights.params[name].double().flatten() for name in sorted(weights.params)])


@dataclass
class Adversary:
    """Knows the experiment and both worlds; `guess` reads a published folder."""

    experiment: fedstill.Experiment
    worlds: tuple[Federation, Federation]
    place: Path

    def __post_init__(self) -> None:
        public = self.experiment.replace(privacy={**asdict(self.experiment.privacy), "reproducible": True})
        self.replays, self.facts, means = [], [], []
        for number, federation in enumerate(self.worlds):
            folder = self.place / f"replay-{number}"
            fedstill.run(public, federation=federation, run_dir=folder, pictures=False)
            contract = {"contract of these data": make_contract(self.experiment, federation)["data"]}
            (folder / "guessed.json").write_text(json.dumps(contract))
            self.replays.append(vector(load_weights(folder / "last")))
            self.facts.append(facts_in(folder))
            quiet = {**self.experiment.method.model_dump(), "noise_multiplier": 0.0}
            whole = public.replace(method=quiet, rounds=1, cohort=20, sampling="fixed", privacy={})
            means.append(vector(fedstill.run(whole, federation=federation).weights))
        self.middle, self.apart = (means[0] + means[1]) / 2, means[0] - means[1]
        self.tested = len(self.worlds[0].test.y)

    def guess(self, folder: Path) -> tuple[int, str]:
        """Return the world, and what told: an equal fact, the replayed model, or the direction of the first move."""
        published, facts = vector(load_weights(folder / "last")), facts_in(folder)
        far = [float((published - replay).norm() / (replay.norm() + 1e-12)) for replay in self.replays]
        if min(far) < 1e-3 and abs(far[0] - far[1]) > 1e-9:
            return int(far[1] < far[0]), "the replayed model"
        values = {value for value in facts.values() if telling(value, self.tested)}
        known = [{v for v in world.values() if telling(v, self.tested)} for world in self.facts]
        score = len(values & (known[0] - known[1])) - len(values & (known[1] - known[0]))
        if score:
            return int(score < 0), "an equal fact"
        first = load_checkpoint(folder / "checkpoints" / "round-000001.zip", torch.device("cpu"))
        moved = vector(first.weights)
        return int(float((moved - self.middle) @ self.apart) < 0), "the direction of the first move"


def replay_attack(trials: int, *, seed: int, reproducible: bool) -> dict[str, Any]:
    """Let the adversary guess the world of so many runs."""
    experiment = experiment_of(privacy={"reproducible": reproducible})
    coins = np.random.Generator(np.random.PCG64(seed)).integers(0, 2, trials).tolist()
    right, reasons, claimed = 0, {}, None
    with tempfile.TemporaryDirectory() as place:
        adversary = Adversary(experiment, worlds(experiment), Path(place))
        for trial, world in enumerate(coins):
            folder = Path(place) / f"run-{trial}"
            result = fedstill.run(experiment, federation=adversary.worlds[world], run_dir=folder, pictures=False)
            claims = result.privacy.claims or result.privacy.with_a_secret
            claimed = claims[0].epsilon
            guess, why = adversary.guess(folder)
            right += guess == world
            reasons[why] = reasons.get(why, 0) + 1
    return {"right": right, "trials": trials, "epsilon": claimed, "by": reasons}


# ---- Pairs of settings ----------------------------------------------------------------------------------------------

LOUD = 1000.0  # noise so loud that a model's move is noise alone
ALIKE = 0.2  # of the cosine between two independent vectors of 1,000 numbers: six standard deviations


def changed_row(federation: Federation) -> Federation:
    x = federation.train.x.clone()
    x[0, 0, 0, 0] += 1
    return replace(federation, train=replace(federation.train, x=x))


def changed_label(federation: Federation) -> Federation:
    y = federation.train.y.clone()
    y[5] = (y[5] + 1) % 3
    return replace(federation, train=replace(federation.train, y=y))


def start_of(seed: int) -> Weights:
    return trial_model().init(seed)


CHANGES: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "clip": lambda how: {**how, "clip": how["clip"] * (1 + 1e-9)},
    "noise": lambda how: {**how, "noise": how["noise"] * (1 + 1e-9)},
    "lr": lambda how: {**how, "training": replace(how["training"], lr=how["training"].lr * 1.01)},
    "epochs": lambda how: {**how, "training": replace(how["training"], epochs=2)},
    "batch": lambda how: {**how, "training": replace(how["training"], batch_size=4)},
    "momentum": lambda how: {**how, "training": replace(how["training"], momentum=0.5)},
    "weight decay": lambda how: {**how, "training": replace(how["training"], weight_decay=1e-4)},
    "outlier": lambda how: {**how, "guard": replace(how["guard"], outlier=19.0)},
    "size cap": lambda how: {**how, "guard": replace(how["guard"], size_cap=1e6)},
    "norm bound": lambda how: {**how, "guard": replace(how["guard"], norm_bound=50.0)},
    "precision": lambda how: {**how, "precision": "bf16"},
    "engine": lambda how: {**how, "engine": "batched"},
    "options": lambda how: {**how, "settings": how["settings"] + "mu = 0.1;"},
    "row": lambda how: {**how, "federation": changed_row(how["federation"])},
    "label": lambda how: {**how, "federation": changed_label(how["federation"])},
    "seed": lambda how: {**how, "seed": how["seed"] + 1},
    "start": lambda how: {**how, "start": start_of(11)},
    "cohort": lambda how: {**how, "cohort": 3},
    "sampling": lambda how: {**how, "sampling": "poisson"},
    "delta": lambda how: {**how, "delta": 1e-6},
}


def released(how: Mapping[str, Any], *, reproducible: bool) -> torch.Tensor:
    """How far a run of one round moved its model, in units of its noise."""
    method: Method = dp_fedavg(clip=how["clip"], noise_multiplier=how["noise"], trust=how["trust"])
    start = start_of(7) if how["start"] is None else how["start"]
    made = federate(
        Built(
            method,
            trial_model(),
            how["federation"],
            how["training"],
            Schedule(rounds=1, cohort=how["cohort"], sampling=how["sampling"], seed=how["seed"]),
            partial(build_engines, how["engine"], "cpu", precision=how["precision"]),
            guard=how["guard"],
            privacy=Privacy(reproducible=reproducible, delta=how["delta"]),
            settings=how["settings"],
            start=start,
        )
    )
    moved = vector(made.weights) - vector(start)
    return moved / moved.norm()


def cancelling_pairs(count: int, *, seed: int, reproducible: bool) -> dict[str, Any]:
    """Draw pairs of settings that differ in something, and compare their noise."""
    draw = np.random.Generator(np.random.PCG64(seed))
    base = {
        "clip": 1.0, "noise": LOUD, "trust": "server", "training": Training(batch_size=8, lr=0.05), "guard": Guard(),
        "precision": "float32", "engine": "looped", "settings": "", "federation": trial_federation(), "seed": 0,
        "start": None, "cohort": 4, "sampling": "fixed", "delta": DELTA,
    }  # fmt: skip
    names, alike, worst = list(CHANGES), [], 0.0
    for number in range(count):
        common = set(draw.choice(names, size=int(draw.integers(0, 4)), replace=False).tolist())
        if number < len(names):
            only = {names[number]}
        else:
            only = set(draw.choice(names, size=int(draw.integers(1, 4)), replace=False).tolist())
        pair = []
        for chosen in (common - only, common | only):
            how = {**base, "trust": ("server", "nobody")[number % 2]}
            for name in names:
                how = CHANGES[name](how) if name in chosen else how
            pair.append(released(how, reproducible=reproducible))
        cosine = abs(float(pair[0] @ pair[1]))
        worst = max(worst, cosine)
        if cosine > ALIKE:
            alike.append((sorted(common), sorted(only), round(cosine, 3)))
    return {"pairs": count, "alike": alike, "largest_cosine": worst}


# ---- Audits ---------------------------------------------------------------------------------------------------------

CONFIDENCE = 0.95
CANARIES = 40  # clients in a run, each with one sample on an axis of its own


def linear_model() -> fedstill.Model:
    """Softmax regression of two classes without a bias, from zero: a sample moves it along its own features."""
    layer = torch.nn.Linear(CANARIES, 2, bias=False)
    torch.nn.init.zeros_(layer.weight)
    return fedstill.from_module(layer, input_shape=(CANARIES,), classes=2, check=False)


def canaries(labels: np.ndarray) -> Federation:
    """Client k holds one sample, on axis k, and its label turns the client's move around: the worst neighbours.

    Axes and their noise are independent, so that one run is a trial of each client.
    """
    axes = np.eye(CANARIES, dtype=np.float32)
    pairs = [(axes[k : k + 1], labels[k : k + 1]) for k in range(CANARIES)]
    nothing = (np.zeros((1, CANARIES), np.float32), np.zeros(1, np.int64))
    made = fedstill.federation_from_tensors(pairs, test=nothing, classes=["0", "1"], name="canaries")
    return replace(made, train=replace(made.train, mean=(0.0,), std=(1.0,)), public_facts=())


@dataclass(frozen=True)
class Case:
    """One kind of private run: the options of dp_fedavg, and how it is played."""

    name: str
    options: Mapping[str, Any]
    rounds: int = 1
    sampling: str = "fixed"
    share: float = 1.0  # of the clients in a cohort


def multiplier_of(epsilon: float, rounds: float) -> float:
    """z of dp_fedavg at which so many rounds of everybody cost this epsilon."""
    return 2 * math.sqrt(rounds) * analytic_gaussian_multiplier(epsilon, DELTA)


CASES = (
    Case("a trusted server, one round", {"noise_multiplier": multiplier_of(4, 1)}),
    Case("a trusted server, three rounds", {"noise_multiplier": multiplier_of(4, 3)}, rounds=3),
    Case("a trusted server, a bound that adapts", {"noise_multiplier": multiplier_of(4, 2), "quantile": 0.5}, rounds=2),
    Case("a trusted server, Poisson cohorts", {"noise_multiplier": 1.0}, rounds=2, sampling="poisson", share=0.5),
    Case(  # a = (8, 4, 3): the rows of three rounds are 8, 8 + 4 and 8 + 4 + 3, and |a|^2 = 89
        "a trusted server, noise in bands, everybody in each round",
        {"noise_multiplier": multiplier_of(4, (8**2 + 12**2 + 15**2) / 89), "bands": 3},
        rounds=3,
    ),
    Case(
        "a trusted server, noise in bands, clients in turn",
        {"noise_multiplier": multiplier_of(4, 2), "bands": 2},
        rounds=4,
        sampling="cyclic",
        share=0.5,
    ),
    Case("each client's own noise, two rounds", {"noise_multiplier": multiplier_of(4, 2), "trust": "nobody"}, rounds=2),
)


def one_run(case: Case, labels: np.ndarray, model: fedstill.Model) -> tuple[np.ndarray, float]:
    """Play one run; return how far each client's axis moved, as its adversary weighs it, and the claimed epsilon.

    Everybody but the server sees the models. Where no server is trusted it sees the uploads, one by one.
    """
    seen: list[np.ndarray] = []  # a round each

    def look(candidate: Weights, state: Any, round: Any) -> tuple[Weights, Any]:
        ids, sent = round.uploads.ids.numpy(), round.uploads.weights.params["weight"].double()
        start = round.start.params["weight"].double()
        if case.options.get("trust") == "nobody":
            apart = (sent - start)[:, 0] - (sent - start)[:, 1]
            seen.append(np.zeros(CANARIES))
            seen[-1][ids] = apart[np.arange(len(ids)), ids].numpy()
        else:
            moved = candidate.params["weight"].double() - start
            seen.append((moved[0] - moved[1]).numpy() / bound[0])
            bound[0] = float(state["clip"]) if "clip" in state else 1.0
        return candidate, state

    bound = [1.0]
    method = dp_fedavg(**case.options)
    method = replace(method, server=(*method.server, ServerStep("look", look)))
    made = federate(
        Built(
            method,
            model,
            canaries(labels),
            Training(batch_size=1, lr=1e6),  # so far that each round's move is cut to the bound
            Schedule(
                rounds=case.rounds,
                cohort=round(case.share * CANARIES),
                sampling=case.sampling,
                evaluate_every=case.rounds,
            ),
            partial(build_engines, "batched", "cpu"),
            privacy=Privacy(delta=DELTA),
        )
    )
    return weighed(np.stack(seen), case), made.privacy.claim("client", "public").epsilon


def weighed(seen: np.ndarray, case: Case) -> np.ndarray:
    """The statistic that tells most: A y, whose noises are independent, along the rows that the client moves."""
    rounds, everybody = len(seen), np.arange(CANARIES)
    turns = np.ones((rounds, CANARIES))
    if case.sampling == "cyclic":
        size = round(case.share * CANARIES)
        drawn = [draw_cohort(everybody, size, seed=0, round=at + 1, sampling="cyclic") for at in range(rounds)]
        turns = np.stack([np.isin(everybody, ids) for ids in drawn]).astype(float)
    numbers = enumerate(banded_root(case.options.get("bands", 1)))
    whole = sum((number * np.eye(rounds, k=-lag) for lag, number in numbers), np.zeros((rounds, rounds)))
    statistic: np.ndarray = ((whole @ seen) * (whole @ turns)).sum(axis=0)
    return statistic


def audited(case: Case, trials: int, *, seed: int = 0) -> dict[str, Any]:
    """Play runs until there are so many trials of each label, and find the largest epsilon that they rule out."""
    model, claims, by_label = linear_model(), set(), {0: [], 1: []}
    draw = np.random.Generator(np.random.PCG64(seed))
    while min(map(len, by_label.values())) < trials:
        labels = draw.integers(0, 2, CANARIES)
        seen, epsilon = one_run(case, labels, model)
        claims.add(epsilon)
        for label, outcomes in by_label.items():
            outcomes += seen[labels == label].tolist()
    (claimed,) = claims
    audit = AUDIT["audit"](
        lambda i: np.array([by_label[0][i]]), lambda i: np.array([by_label[1][i]]), claimed, DELTA, draws=trials,
        confidence=CONFIDENCE, direction=np.ones(1),
    )  # fmt: skip
    shown = audit.epsilon_at_least
    return {"claimed": claimed, "at_least": shown, "share": shown / claimed, "trials": trials}


# ---- Script ---------------------------------------------------------------------------------------------------------


def storm(parts: list[str], *, trials: int, seed: int) -> Iterator[tuple[str, dict[str, Any]]]:
    if "replay" in parts:
        yield "replay, a secret", replay_attack(40, seed=seed, reproducible=False)
        yield "replay, a public seed", replay_attack(40, seed=seed, reproducible=True)
    if "pairs" in parts:
        yield "pairs, public seeds", cancelling_pairs(200, seed=seed, reproducible=True)
        yield "pairs, secrets", cancelling_pairs(200, seed=seed + 1, reproducible=False)
    if "audit" in parts:
        for case in CASES:
            yield f"audit: {case.name}", audited(case, trials, seed=seed)


def main() -> None:
    reader = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    reader.add_argument("parts", nargs="*", default=["replay", "pairs", "audit"], choices=["replay", "pairs", "audit"])
    reader.add_argument("--trials", type=int, default=24000, help="trials of each world in an audit")
    reader.add_argument("--seed", type=int, default=0)
    reader.add_argument("--json", default="", help="where the figures go")
    options = reader.parse_args()
    logging.disable(logging.WARNING)
    figures = {}
    for name, figure in storm(options.parts, trials=options.trials, seed=options.seed):
        figures[name] = figure
        print(f"{name}: {json.dumps(figure)}", flush=True)
    if options.json:
        Path(options.json).write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
