"""What a fifth of hostile clients does to methods, and what protects them: the record behind docs/attacks.md.

    python benchmarks/storm/attacks.py             plays what is not on record yet (docs/results/attacks.json)
    python benchmarks/storm/attacks.py --write     writes the tables of docs/attacks.md from the record, plays nothing

The federation has 20 clients with the embedded digits (LDA), all of whom take part in every round; 4 are hostile in
every round. A run takes a second on an idle core. Each run is one seed: another split, model and other hostile clients.
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from fedstill.experiment.build import build, build_federation
from fedstill.experiment.config import Experiment
from fedstill.experiment.overrides import attack_table, parse_method
from fedstill.loop.federate import federate
from fedstill.storage.files import write_whole

ROOT = Path(__file__).resolve().parents[2]
FLOWER = ROOT / "docs" / "results" / "flower_defences.json"
ONCE = ROOT / "docs" / "results" / "one_upload.json"
RECORD, PAGE = ROOT / "docs" / "results" / "attacks.json", ROOT / "docs" / "attacks.md"
SEEDS = (0, 1, 2)
FEDERATION: dict[str, Any] = {
    "rounds": 15,
    "cohort": 20,
    "evaluate_every": 15,
    "data": {"source": "digits", "unlabeled": 300},
    "model": {"name": "mlp", "hidden": [64], "init": "torch"},
    "local": {"epochs": 2, "batch_size": 20, "lr": 0.1},
    "engine": {"device": "cpu", "threads": 1},
}
ATTACKS = {  # heading -> --attack
    "none": "",
    "sign x4": "sign:4",
    "sign x20": "sign:20",
    "noise x4": "gaussian:4",
    "label flip": "label_flip",
    "adaptive": "adaptive",
    "short adaptive": "adaptive(quantile=0.2)",
    "backdoor x5": "backdoor:5",
    "adaptive backdoor": "backdoor(adaptive=true)",
    "quiet backdoor": "backdoor:1",
}
SOME = ("none", "sign x4", "adaptive", "short adaptive", "backdoor x5", "adaptive backdoor")
FEW = {name: ATTACKS[name] for name in SOME}
KRUM = "+krum(f=4, m=14, lengthen=true)"
STUDENT = "student.steps=40"
METHODS = {  # name -> (as it is, with the recommended setting)
    "FedAvg": ("fedavg", f"fedavg{KRUM}"),
    "FedDF": (f"feddf({STUDENT})", f"feddf({STUDENT}){KRUM}"),
    "FedAUX": (f"fedaux({STUDENT})", f"fedaux({STUDENT}, largest_share=2.0){KRUM}"),
    "MrTF": (f"mrtf({STUDENT})", f"mrtf({STUDENT}, largest_share=2.0){KRUM}"),
    "D2C-FL": ("d2cfl(student.epochs=1)", f"d2cfl(student.epochs=1){KRUM}"),
}
DEFENCES = {  # of FedAvg and FedDF, each by itself
    "fedavg+krum(f=4, m=14)": "fedavg+krum(f=4, m=14)",
    "fedavg+median": "fedavg+median",
    "fedavg+trimmed_mean(share=0.2)": "fedavg+trimmed_mean(share=0.2)",
    "fedavg+geometric_median": "fedavg+geometric_median",
    "fedavg+norm_bound(bound=1.5)": "fedavg+norm_bound(bound=1.5)",
    "fedavg+centred_clipping": "fedavg+centred_clipping",
    "feddf+median": f"feddf({STUDENT})+median",
    "feddf+centred_clipping": f"feddf({STUDENT})+centred_clipping",
    'feddf(pool="median")': f'feddf({STUDENT}, pool="median")',
    'feddf(pool="trimmed")': f'feddf({STUDENT}, pool="trimmed")',
    'feddf(pool="vote")': f'feddf({STUDENT}, pool="vote")',
}
ODDS = {  # FedAUX asked how sure clients are, with score = "odds"
    "no bound": f'fedaux({STUDENT}, score="odds")',
    "largest_share=2.0": f'fedaux({STUDENT}, score="odds", largest_share=2.0)',
}
BESIDE = {  # of FedAvg; Flower's strategies as benchmarks/storm/flower_defences.py names them
    "plain average": "fedavg",
    **{f"Flower's {name}": f'fedavg+flower(strategy="{name}")'
       for name in ("FedMedian", "FedTrimmedAvg", "Krum", "MultiKrum", "Bulyan")},
    "the recommended setting": f"fedavg{KRUM}",
}  # fmt: skip
STRONG = {text: text for text in ("fedavg", f"fedavg{KRUM}", "fedavg+centred_clipping")}


class Case(NamedTuple):
    """One run: a method's text under an attack, on clients that differ by alpha."""

    method: str
    attack: str
    alpha: float
    seed: int


def cases() -> Iterator[Case]:
    for seed in SEEDS:
        for attack in ATTACKS.values():
            yield from (Case(text, attack, 0.5, seed) for pair in METHODS.values() for text in pair)
    for seed in SEEDS:
        for attack in ("", "sure"):
            yield from (Case(text, attack, 0.1, seed) for text in ODDS.values())
        for attack in FEW.values():
            yield from (Case(text, attack, 0.1, seed) for text in STRONG.values())
    for seed in SEEDS:
        for attack in FEW.values():
            yield from (Case(text, attack, 0.5, seed) for text in DEFENCES.values())


def play(case: Case) -> dict[str, Any]:
    """Return the row of one run."""
    split = {"scheme": "lda", "clients": 20, "alpha": case.alpha, "min_size": 10}
    attack = attack_table(case.attack) if case.attack else {}
    experiment = Experiment.model_validate({**FEDERATION, "partition": split, "seed": case.seed, "attack": attack})
    experiment = experiment.model_copy(update={"method": parse_method(case.method, experiment)})
    result = federate(build(experiment, build_federation(experiment)))
    last = result.history.last
    assert last is not None
    refused = sum(record["client"] is not None and not record.get("note") for record in result.audit)
    row = {**case._asdict(), "accuracy": round(last["accuracy"], 5), "refused": refused}
    if "backdoor_success" in last:
        row["backdoor_success"] = round(last["backdoor_success"], 5)
    return row


def recorded() -> list[dict[str, Any]]:
    """Return the runs on record."""
    return json.loads(RECORD.read_text())["runs"] if RECORD.exists() else []


def case_of(row: dict[str, Any]) -> Case:
    return Case(*(row[key] for key in Case._fields))


def play_all() -> None:
    rows = recorded()
    known = {case_of(row) for row in rows}
    for case in cases():
        if case not in known:
            rows.append(play(case))
            about = {"setting": FEDERATION, "script": "benchmarks/storm/attacks.py"}
            lines = ",\n".join(json.dumps(row) for row in rows)
            write_whole(RECORD, json.dumps(about)[:-1] + ', "runs": [\n' + lines + "\n]}\n")
            print(*case, rows[-1]["accuracy"], rows[-1].get("backdoor_success", ""), flush=True)


class Table:
    """The tables of the page."""

    def __init__(self, rows: list[dict[str, Any]], alpha: float = 0.5) -> None:
        self.rows, self.alpha = {case_of(row): row for row in rows}, alpha

    def mean(self, method: str, attack: str, key: str = "accuracy") -> float:
        """Return the mean over seeds, in per cent."""
        rows = [self.rows[Case(method, attack, self.alpha, seed)] for seed in SEEDS]
        return 100 * statistics.fmean(row[key] for row in rows)

    def cell(self, method: str, attack: str) -> str:
        shown = f"{self.mean(method, attack):.1f}"
        if "backdoor" in attack:
            shown += f" / {self.mean(method, attack, 'backdoor_success'):.0f}"
        return shown

    def of(self, first: str, rows: dict[str, str], attacks: dict[str, str]) -> str:
        lines = [f"| {first} | {' | '.join(attacks)} |", "|---" + "|--:" * len(attacks) + "|"]
        for name, method in rows.items():
            lines.append(f"| {name} | {' | '.join(self.cell(method, attack) for attack in attacks.values())} |")
        return "\n".join(lines)


def once(runs: list[dict[str, Any]]) -> str:
    """Return the table of benchmarks/storm/one_upload.py, from its record: of each method the worst of its seeds."""
    lines = ["| method | seeds | clean | kinds that pass | worst kind | points lost |", "|---|--:|--:|--:|---|--:|"]
    for method in dict.fromkeys(run["method"] for run in runs):
        runs_of_method = [run for run in runs if run["method"] == method]
        worst = max(runs_of_method, key=lambda run: run["worst_loss"])
        clean = f"{statistics.fmean(run['clean'] for run in runs_of_method):.1f}"
        passed = f"{max(run['passed'] for run in runs_of_method)} of {worst['kinds']}"
        facts = (
            method.partition("(")[0],
            str(len(runs_of_method)),
            clean,
            passed,
            worst["worst"] if worst["worst_loss"] > 0 else "none",
            f"{worst['worst_loss']:.1f}",
        )
        lines.append(f"| {' | '.join(facts)} |")
    return "\n".join(lines)


def tables(rows: list[dict[str, Any]]) -> dict[str, str]:
    """Return the tables of the page by their names."""
    methods: dict[str, str] = {}
    for name, (plain, safe) in METHODS.items():
        methods |= {name: plain, f"{name}, recommended": safe}
    strong, single = Table(rows, alpha=0.1), json.loads(ONCE.read_text())["runs"]
    beside = Table(rows + json.loads(FLOWER.read_text())["runs"])
    return {
        "methods": Table(rows).of("", methods, ATTACKS),
        "defences": Table(rows).of("", {f"`{name}`": text for name, text in DEFENCES.items()}, FEW),
        "flower": beside.of("FedAvg with", BESIDE, FEW),
        "odds": strong.of('FedAUX, `score="odds"`', ODDS, {"none": "", "sure of everything": "sure"}),
        "once": once(single),
        "strong": strong.of("LDA, alpha 0.1", {f"`{name}`": text for name, text in STRONG.items()}, FEW),
    }


def with_tables(page: str, tables: dict[str, str]) -> str:
    """Return the page with its generated tables replaced."""
    for name, table in tables.items():
        block = re.compile(rf"(<!-- generated by benchmarks/storm/attacks\.py: {name} -->\n).*?(\n<!-- end -->)", re.S)
        page, count = block.subn(lambda match, table=table: match[1] + table + match[2], page)
        assert count == 1, f"docs/attacks.md has {count} places for the table '{name}'"
    return page


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true")
    if parser.parse_args().write:
        write_whole(PAGE, with_tables(PAGE.read_text(), tables(recorded())))
    else:
        logging.disable(logging.WARNING)
        play_all()
