"""Find a method for one's own data: a tournament under a budget, then a fair comparison of its best.

A level of the tournament plays its candidates for a share of the rounds with some seeds, and the best go on to the next
level (successive halving: Jamieson & Talwalkar, AISTATS 2016). A candidate's score comes from rows that clients hold
back and that nobody trains on. The last step compares the winner with its runners-up and with FedAvg: on the test rows,
with all training rows and with seeds that no level had. So choosing among many does not flatter the winner's figures.

Every decision follows from the scores and the costs of finished runs, in their order. They are written to choose.json
after each run. A tournament that was killed repeats its decisions from them and goes on with the first missing run.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from fedstill.core.errors import FedstillError, in_one_line, suggest
from fedstill.core.types import Federation, Need
from fedstill.data import Source
from fedstill.experiment.build import build, build_federation, load_source
from fedstill.experiment.candidates import Candidates, one_of_each_kind
from fedstill.experiment.cluster import in_one_process
from fedstill.experiment.code_names import check_code
from fedstill.experiment.compare import Comparison, compare, folder_name
from fedstill.experiment.config import Experiment, MethodSection, checked_experiment
from fedstill.experiment.points import HELD_BACK
from fedstill.experiment.run import run_built
from fedstill.experiment.run_folder import CONFIG_FILE, check_run_folder
from fedstill.experiment.side_by_side import Job, run_side_by_side
from fedstill.loop.callbacks import Callback
from fedstill.loop.cautions import each_once
from fedstill.loop.evaluate import is_lower_better
from fedstill.loop.history import Result
from fedstill.methods.lookup import label, split_methods
from fedstill.models.mixed import MIXED
from fedstill.report import counted, human_bytes
from fedstill.report.panels.tournament import shown
from fedstill.storage.files import read_json, working_in, write_whole
from fedstill.storage.toml import loads

CHOICE_FILE = "choose.json"
CHOSEN_FILE = "chosen.toml"
PLAYING = "playing"  # the folder of runs that are not over; a finished run is a line of choose.json
SMOOTHED = 5  # a score is the mean over the last fifth of the rounds, because a cohort's luck moves a single round
BEST_PARTS, BEST_VARIED, RUNNERS_UP = 6, 5, 2
SEATS = 3  # of level 2, for compositions that lead our leaderboard
FINAL_SEEDS, FEWEST_SEEDS = 5, 3
FRESH = 1000  # added to the seed for the final comparison
BATCH = 4  # runs for each worker process between two looks at the budget


class Level(NamedTuple):
    """How long and how often each candidate of a level plays."""

    share: float  # of the experiment's rounds
    seeds: int
    kept: float  # the share of the candidates that go on to the next level


LEVELS = (Level(0.25, 1, 1 / 3), Level(0.5, 2, 1 / 2), Level(1.0, 3, 0.0))
# the shares of the budget that may be spent when a step ends: parts alone, mixtures, neighbours, and the later levels
ENDS = (0.22, 0.28, 0.34, 0.52, 0.77)

_UNITS = {
    "s": ("seconds", 1),
    "m": ("seconds", 60),
    "min": ("seconds", 60),
    "h": ("seconds", 3600),
    "round": ("rounds", 1),
    "rounds": ("rounds", 1),
    "kB": ("bytes", 1e3),
    "MB": ("bytes", 1e6),
    "GB": ("bytes", 1e9),
    "TB": ("bytes", 1e12),
    "epsilon": ("epsilon", 1),
}


@dataclass(frozen=True)
class Budget:
    """How much all runs of a tournament may cost together."""

    amount: float
    unit: str  # seconds | rounds | bytes (sent and received) | epsilon (the sum of the runs' claims)

    @classmethod
    def parse(cls, text: str) -> Budget:
        """
        >>> Budget.parse("30m"), Budget.parse("2000 rounds")
        (Budget(amount=1800.0, unit='seconds'), Budget(amount=2000.0, unit='rounds'))
        """
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*", text)
        if match is None or match[2] not in _UNITS or not float(match[1]):
            raise FedstillError(f"--budget {text}: give a number and a unit: 30m, 2h, 2000rounds, 5GB or 8epsilon")
        unit, factor = _UNITS[match[2]]
        return cls(float(match[1]) * factor, unit)

    def spent_by(self, result: Result, at_once: int) -> float:
        """Return the cost of a run; of runs side by side each one's share of the time."""
        if self.unit == "seconds":
            return result.seconds / at_once
        if self.unit == "rounds":
            return float(len(result.history.rows))
        if self.unit == "bytes":
            return float(result.history.bytes_up + result.history.bytes_down)
        claims = result.privacy.strongest() if result.privacy else []
        return max((claim.epsilon for claim in claims), default=math.inf)

    def shown(self, amount: float) -> str:
        if self.unit == "seconds":
            return f"{amount / 60:.1f} min"
        return human_bytes(amount) if self.unit == "bytes" else f"{amount:,.4g} {self.unit}"


class Played(NamedTuple):
    """One finished run of the tournament; a line of choose.json."""

    level: int
    method: str
    seed: int
    score: float | None  # None: the run failed, or its metric is not defined
    cost: float
    rounds: int
    failure: str = ""


@dataclass(frozen=True)
class Choice:
    """The end of a tournament: its winner, the final comparison, and everything that was decided on the way."""

    method: str
    comparison: Comparison
    record: Mapping[str, Any]  # the content of choose.json
    run_dir: Path


def choose(
    experiment: Experiment,
    budget: str,
    *,
    run_dir: str | Path,
    methods: Sequence[str] = (),
    without: Sequence[str] = (),
    tell: Callable[[str], None] = lambda line: None,
    callbacks: Callable[[str, int], Sequence[Callback]] = lambda method, seed: (),
) -> Choice:
    """Find the method that suits an experiment's data and split best, and return it with a comparison on fresh seeds.

    budget: "30m", "2h", "2000rounds", "5GB" (sent and received) or "8epsilon": the cost of all runs together. A
        budget in rounds makes the choice a function of the experiment and its seed.
    run_dir: the results. A tournament that is there already goes on.
    methods: the parts to try, "fedavg", "fedprox(mu=0.1)", ...; by default all methods and aggregates, and the methods
        of the experiment.
    without: needs that no candidate may have, by the names of `Need` in lower case: "unlabeled", "client_state", ...
    tell: gets a line about each step. callbacks: of the final comparison, as in `compare`.
    """
    named = split_methods(methods) if isinstance(methods, str) else list(methods)
    tournament = Tournament(checked_experiment(experiment), Budget.parse(budget), Path(run_dir), tell)
    record = {"experiment": experiment.to_toml(), "budget": budget, "methods": named, "without": list(without)}
    check_run_folder(experiment, tournament.folder, asked="run_dir")
    with ExitStack() as stack:
        stack.enter_context(working_in(tournament.folder))
        tournament.begin(record, [_need(name) for name in without])
        finalists = tournament.find()
    return tournament.finish(finalists, callbacks)


def choose_again(run_dir: str | Path, **how: Any) -> Choice:
    """Go on with the tournament in a folder; see `choose`."""
    record = read_record(Path(run_dir))
    try:
        place = Path(run_dir) / CHOICE_FILE
        table = loads(record["experiment"], where=str(place))
        check_code(table, place)
        check_code({"compare": {"methods": record["methods"]}}, place)
        experiment = Experiment.model_validate(table)
        given = {key: record[key] for key in ("budget", "methods", "without")}
    except (KeyError, TypeError):
        raise _damaged(Path(run_dir)) from None
    return choose(experiment, **given, run_dir=run_dir, **how)


def read_record(folder: Path) -> dict[str, Any]:
    """Return choose.json as a table."""
    try:
        record = read_json(folder / CHOICE_FILE)
    except (OSError, ValueError):
        record = None
    if not isinstance(record, dict):
        raise _damaged(folder)
    return record


def _damaged(folder: Path) -> FedstillError:
    return FedstillError(f"'{folder / CHOICE_FILE}' is missing or damaged: start `fedstill choose` in a new folder")


def _need(name: str) -> Need:
    names = {need.name.lower(): need for need in Need}
    if name not in names:
        raise FedstillError(f"--without {name} is no need of a method: {suggest(name, names)}")
    return names[name]


@dataclass
class Tournament:
    """Plays candidates level by level. `played` grows in an order that only scores and costs decide."""

    experiment: Experiment
    budget: Budget
    folder: Path
    tell: Callable[[str], None]
    played: list[Played] = field(default_factory=list)
    decisions: list[dict[str, Any]] = field(default_factory=list)

    def begin(self, record: Mapping[str, Any], banned: Sequence[Need]) -> None:
        """Take up the finished runs of a tournament in the folder, or begin a new one."""
        data = {**self.experiment.data.model_dump(), "client_test_share": HELD_BACK}
        quiet = {**self.experiment.compare.model_dump(), "references": False}
        fields = {"data": data, "compare": quiet, "evaluate": "client_rows", "track": (), "target": None}
        self._scored = self.experiment.replace(**fields)
        self._source: Source = load_source(self._scored)
        self._federations: dict[int, Federation] = {}
        self._known: dict[tuple[int, str, int], Played] = {}
        self._warned: set[str] = set()
        self._record = dict(record)
        if (self.folder / CHOICE_FILE).exists():
            earlier = read_record(self.folder)
            if others := [key for key in record if earlier.get(key) != record[key]]:
                raise FedstillError(
                    f"'{self.folder}' holds another tournament ({', '.join(others)} differ): use a new folder, or "
                    f"`fedstill resume {self.folder}`"
                )
            try:
                known = [Played(**line) for line in earlier["played"]]
            except (KeyError, TypeError):
                raise _damaged(self.folder) from None
            self._known = {(line.level, line.method, line.seed): line for line in known}
        elif (self.folder / CONFIG_FILE).exists():
            raise FedstillError(f"'{self.folder}' already holds a run: choose another folder")
        if self.budget.unit == "epsilon" and self.experiment.privacy.epsilon is None:
            raise FedstillError("--budget in epsilon needs runs that claim one: set privacy.epsilon, e.g. 2")
        least = math.ceil(sum(2 * level.share * level.seeds for level in LEVELS) + 2 * FEWEST_SEEDS)
        if self.budget.unit == "rounds" and self.budget.amount < least * self.experiment.rounds:
            raise FedstillError(
                f"--budget {record['budget']} is too small: a tournament of FedAvg and one other method takes about "
                f"{least * self.experiment.rounds} rounds, {least} times the experiment's; give at least so many"
            )
        self.candidates = Candidates(self._scored, self._federation(0), list(record["methods"]), banned)

    def find(self) -> list[str]:
        """Play all levels, and return the methods of the last one, the best first."""
        first = LEVELS[0]
        alone = self.candidates.alone()
        if len(alone) < 2:
            reasons = "; ".join(f"{label(text)}: {why}" for text, why in list(self.candidates.refused.items())[:3])
            raise FedstillError(f"choose: the experiment allows fewer than two methods ({reasons}): name others")
        self._play(0, alone, ENDS[0], "each method alone")
        ranked = self._ranked(0)
        parts = one_of_each_kind(ranked)[:BEST_PARTS]
        self._play(0, self.candidates.pairs(parts), ENDS[1], "mixtures of the best")
        varied = one_of_each_kind(self._ranked(0))[:BEST_VARIED]
        near = self.candidates.neighbours(varied, parts)
        self._play(0, near, ENDS[2], "other options of the best")
        kept = first.kept
        for place, level in enumerate(LEVELS[1:], start=1):
            ranked = one_of_each_kind(self._ranked(place - 1))
            going = ranked[: max(3, math.ceil(kept * len(ranked)))]
            title = f"the best {len(going)}"
            if place == 1 and (proven := self.candidates.proven()[:SEATS]):
                title += f" and {counted(len(proven), 'composition')} of our leaderboard"
                in_turn = [text for pair in zip(going, proven, strict=False) for text in pair]
                going = one_of_each_kind([*in_turn, *proven, *going])
            self._play(place, going, ENDS[2 + place], title)
            kept = level.kept
        ranked = one_of_each_kind(self._ranked(len(LEVELS) - 1))
        if not ranked:
            raise FedstillError(f"choose: no run of the last level ended well: see {self.folder / CHOICE_FILE}")
        return ranked

    def finish(self, ranked: Sequence[str], callbacks: Callable[[str, int], Sequence[Callback]]) -> Choice:
        """Compare the winner with the runners-up and the base on test rows and fresh seeds; write the files."""
        winner = ranked[0]
        finalists = list(dict.fromkeys([*ranked[: 1 + RUNNERS_UP], self.candidates.base]))
        cost = sum(self._estimate(text, self.experiment.rounds) for text in finalists)
        left = self.budget.amount - self.spent
        seeds = max(FEWEST_SEEDS, min(FINAL_SEEDS, math.floor(left / cost) if cost else FINAL_SEEDS))
        section = MethodSection.model_validate({"name": winner})
        table = {
            **self.experiment.compare.model_dump(),
            "methods": [f"{text}()" if text == section.name and text != winner else text for text in finalists],
            "seeds": seeds,
            "references": self.experiment.model.name != MIXED,
        }
        chosen = self.experiment.replace(method=section.model_dump(), compare=table)
        write_whole(self.folder / CHOSEN_FILE, chosen.to_toml())
        words = f"{counted(len(finalists), 'method')}, {counted(seeds, 'fresh seed')}, test rows"
        self.tell(f"final comparison: {words}")
        fresh = chosen.replace(seed=self.experiment.seed + FRESH)
        again = (self.folder / CONFIG_FILE).exists()
        comparison = compare(fresh, run_dir=self.folder, callbacks=callbacks, resume=again)
        results = [result for each in comparison.results.values() for result in each]
        cost = sum(self.budget.spent_by(result, self.experiment.compare.jobs) for result in results)
        self._record |= {"chosen": winner, "finalists": finalists, "final_seeds": seeds, "final_cost": cost}
        self._save()
        return Choice(winner, comparison, self._record, self.folder)

    @property
    def spent(self) -> float:
        return sum(line.cost for line in self.played)

    def _play(self, place: int, texts: Sequence[str], end: float, title: str) -> None:
        """Play the candidates of a step, as far as the budget reaches, and two of a level in any case."""
        level, jobs = LEVELS[place], self.experiment.compare.jobs
        rounds = max(1, math.ceil(level.share * self.experiment.rounds))
        seeds = [self.experiment.seed + shift for shift in range(level.seeds)]
        fresh = [text for text in texts if text not in {line.method for line in self.played if line.level == place}]
        about = f"{counted(rounds, 'round')}, {counted(len(seeds), 'seed')}"
        self.tell(f"level {place + 1} of {len(LEVELS)} ({about}), {title}: {counted(len(fresh), 'candidate')}")
        least = 2 if place or not self.played else 0
        waiting, tried, left_out = list(fresh), 0, list[str]()
        while waiting:
            batch: list[str] = []
            cost = self.spent
            while waiting and len(batch) * len(seeds) < (BATCH * jobs if jobs > 1 else 1):
                text = waiting.pop(0)
                cost += len(seeds) * self._estimate(text, rounds)
                if cost > end * self.budget.amount and tried + len(batch) >= least:
                    cost -= len(seeds) * self._estimate(text, rounds)
                    left_out.append(text)
                else:
                    batch.append(text)
            self._run_all(place, batch, seeds, rounds)
            tried += len(batch)
        self.decisions.append(
            {
                "level": place + 1,
                "step": title,
                "rounds": rounds,
                "seeds": seeds,
                "played": [text for text in fresh if text not in left_out],
                "not_afforded": left_out,
                "spent": self.spent,
            }
        )
        self._save()

    def _run_all(self, place: int, texts: Sequence[str], seeds: Sequence[int], rounds: int) -> None:
        """Run each text with each seed, those that no record holds; side by side where the experiment has jobs."""
        jobs = self.experiment.compare.jobs
        missing = [(text, seed) for text in texts for seed in seeds if (place, text, seed) not in self._known]
        if jobs > 1 and len(missing) > 1:
            work = [
                Job(label(text), self._experiment(text, seed, rounds), folder, (folder / CONFIG_FILE).exists())
                for text, seed in missing
                for folder in [self._place(place, text, seed)]
            ]
            with suppress(FedstillError):  # the run is repeated below, and its failure noted
                run_side_by_side(work, self.experiment, callbacks=lambda method, seed: (), warned=self._warned)
        for text in texts:
            for seed in seeds:
                known = self._known.get((place, text, seed))
                if known is None:
                    known = self._run(place, text, seed, rounds)
                self.played.append(known)
                self._known[place, text, seed] = known
                self._save()
            score = self._score(place, text)
            result = "failed" if score is None else shown(score)
            self.tell(f"  {label(text)}: {result} ({self.budget.shown(self.spent)} spent)")

    def _run(self, place: int, text: str, seed: int, rounds: int) -> Played:
        """Play one run to its end, from its checkpoint if there is one, and return its line."""
        experiment, folder = self._experiment(text, seed, rounds), self._place(place, text, seed)
        try:
            with each_once(self._warned):
                built = build(experiment, self._federation(seed - self.experiment.seed))
                again = (folder / CONFIG_FILE).exists()
                result = run_built(experiment, built, run_dir=folder, resume=again, pictures=False)
        except Exception as error:  # one of hundreds of mixtures must not end the tournament
            shutil.rmtree(folder, ignore_errors=True)
            return Played(place, text, seed, None, 0.0, 0, in_one_line(error))
        shutil.rmtree(folder, ignore_errors=True)
        metric, history = experiment.best, result.history
        score = history.mean_last(max(1, len(history.evaluated) // SMOOTHED), metric)
        score = -score if is_lower_better(metric) else score
        cost = self.budget.spent_by(result, self.experiment.compare.jobs)
        return Played(place, text, seed, score if math.isfinite(score) else None, cost, len(history.rows))

    def _experiment(self, text: str, seed: int, rounds: int) -> Experiment:
        section = MethodSection.model_validate({"name": text})
        run = self._scored.model_copy(update={"method": section, "seed": seed, "rounds": rounds})
        return in_one_process(run) if self.experiment.compare.jobs > 1 else run  # runs are spread, not their clients

    def _place(self, place: int, text: str, seed: int) -> Path:
        return self.folder / PLAYING / str(place) / folder_name(label(text)) / f"seed-{seed}"

    def _federation(self, shift: int) -> Federation:
        if shift not in self._federations:
            seeded = self._scored.model_copy(update={"seed": self.experiment.seed + shift})
            self._federations[shift] = build_federation(seeded, self._source)
        return self._federations[shift]

    def _estimate(self, text: str, rounds: int) -> float:
        """Return what a run will cost, from the runs of this method so far, else from all runs."""
        lines = [line for line in self.played if line.rounds]
        alike = [line for line in lines if line.method == text] or lines
        return rounds * statistics.fmean(line.cost / line.rounds for line in alike) if alike else 0.0

    def _score(self, place: int, text: str) -> float | None:
        """Return the mean over seeds; None where a run failed."""
        scores = [line.score for line in self.played if (line.level, line.method) == (place, text)]
        known = [score for score in scores if score is not None]
        return statistics.fmean(known) if known and len(known) == len(scores) else None

    def _ranked(self, place: int) -> list[str]:
        """Return the candidates of a level, the best mean first; failed ones are left out."""
        texts = dict.fromkeys(line.method for line in self.played if line.level == place)
        scores = {text: score for text in texts if (score := self._score(place, text)) is not None}
        return sorted(scores, key=lambda text: (-scores[text], text))

    def _save(self) -> None:
        lines = {(line.level, line.method, line.seed): line for line in self.played}
        later = [line for key, line in self._known.items() if key not in lines]  # of an earlier start, not come to yet
        self._record |= {
            "spent": self.spent,
            "unit": self.budget.unit,
            "amount": self.budget.amount,
            "base": self.candidates.base,
            "metric": self.experiment.best,
            "refused": self.candidates.refused,
            "decisions": self.decisions,
            "played": [line._asdict() for line in [*self.played, *later]],
        }
        write_whole(self.folder / CHOICE_FILE, json.dumps(self._record, indent=1, ensure_ascii=False) + "\n")
