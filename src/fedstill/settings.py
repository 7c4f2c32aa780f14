"""Words of the command line as parts of an experiment (`--set local.lr=0.1`, `fedprox(mu=0.1)`); a split in words."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from fedstill import toml_io
from fedstill.config import AlgorithmSection, Experiment, quickstart_table
from fedstill.core.errors import FedstillError

_CHOICES = {"partition": "scheme", "model": "name", "algorithm": "name"}
_KEPT = {"clients"}


def read_experiment(file: Path | None, settings: Iterable[str]) -> Experiment:
    """The experiment of a file, or the quick start, with the settings of the command line."""
    table = quickstart_table() if file is None else toml_io.read_toml(file)
    return Experiment.model_validate(apply_settings(table, settings))


def apply_settings(table: dict[str, Any], settings: Iterable[str]) -> dict[str, Any]:
    """A copy of an experiment's table with every `key=value` set; another name drops the old one's own keys."""
    changed = copy.deepcopy(table)
    pairs = [_pair(setting) for setting in settings]
    for path, value in sorted(pairs, key=lambda pair: not _is_choice(pair[0])):
        _set(changed, path, value)
    return changed


def _pair(setting: str) -> tuple[list[str], Any]:
    key, equals, text = setting.partition("=")
    path = key.strip().split(".")
    if not equals:
        raise FedstillError(f"--set {setting}: write it as key=value, e.g. --set rounds=20 or --set local.lr=0.1")
    if not all(path):
        raise FedstillError(f"--set {setting}: '{key}' is no key: write section.key=value, e.g. --set local.lr=0.1")
    return path, toml_io.parse_value(text.strip())


def _is_choice(path: Sequence[str]) -> bool:
    return path[0] in _CHOICES and (len(path) == 1 or path[1] == _CHOICES[path[0]])


def _set(table: dict[str, Any], path: Sequence[str], value: Any) -> None:
    if _is_choice(path):
        section, key = path[0], _CHOICES[path[0]]
        old = table.get(section, {})
        old = {key: old} if isinstance(old, str) else old
        if old.get(key) != value:
            old = {name: kept for name, kept in old.items() if name in _KEPT}
        table[section] = {**old, key: value}
        return
    *parents, name = path
    for parent in parents:
        table = table.setdefault(parent, {})
        if not isinstance(table, dict):
            raise FedstillError(f"--set {'.'.join(path)}: '{parent}' is a single value, it has no keys below it")
    table[name] = value


def parse_method(entry: str, experiment: Experiment) -> AlgorithmSection:
    """One entry of compare: a name takes the experiment's own options when it is the experiment's method."""
    own = experiment.algorithm
    return own if entry.strip() == own.name else AlgorithmSection.model_validate({"name": entry.strip()})


def describe_partition(experiment: Experiment) -> str:
    """The split in words: lda(alpha=0.1) over 100 clients."""
    options = ", ".join(f"{key}={value}" for key, value in experiment.partition.options.items())
    clients = f" over {experiment.partition.clients} clients" if experiment.partition.clients else ""
    return f"{experiment.partition.scheme}({options}){clients}"
