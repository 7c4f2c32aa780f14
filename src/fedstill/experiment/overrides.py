"""Settings of the command line (`--set local.lr=0.1`, `fedprox(mu=0.1)`) put into an experiment."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from fedstill.core.errors import FedstillError
from fedstill.experiment.code_names import check_code, code_names
from fedstill.experiment.config import Experiment, MethodSection, quickstart_table
from fedstill.experiment.config_errors import keys_in
from fedstill.methods import options
from fedstill.methods.lookup import attack_parts, write
from fedstill.storage import toml as toml_io

_CHOICES = {"partition": "scheme", "model": "name", "method": "name"}
# the key that a bare word stands for
_WORDS = {**_CHOICES, "data": "source", "server": "aggregate", "engine": "name", "attack": "name"}
_SHORT_FORMS = {
    "seed": "seed",
    "rounds": "rounds",
    "device": "engine.device",
    "references": "compare.references",
    "jobs": "compare.jobs",
}
_KEPT = {"clients"}  # stays when another scheme is chosen
_NOTHING = "none"


def attack_table(text: str) -> dict[str, Any]:
    """Return the section [attack] that a short text stands for: kinds joined with +, each with numbers after colons.

    A number below 1 is the share of hostile clients, another one is the factor of the kind.

    >>> attack_table("sign:0.3")
    {'name': 'sign', 'share': 0.3}
    >>> attack_table("backdoor(target=1):0.1:5 + sure")
    {'name': 'backdoor(target=1, factor=5.0)+sure', 'share': 0.1}
    """
    kinds, shares = [], set[float]()
    for piece in toml_io.split_outside(text, "+"):
        kind, *numbers = (word.strip() for word in toml_io.split_outside(piece, ":"))
        (part, *more) = attack_parts(kind) or (None,)
        if part is None or more:
            raise FedstillError(f"--attack {text}: write a kind of attack, e.g. sign, sign:0.3 or scale:20")
        options = dict(part.options)
        for number in numbers:
            value = _number(number, text)
            if value < 1:
                shares.add(value)
            else:
                options["factor"] = value
        attack_parts(whole := write(part.name, options))
        kinds.append(whole)
    if len(shares) > 1:
        raise FedstillError(f"--attack {text} names several shares of hostile clients: name one")
    return {"name": "+".join(kinds), **({"share": shares.pop()} if shares else {})}


def _number(word: str, text: str) -> float:
    try:
        value = float(word)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise FedstillError(
            f"--attack {text}: '{word}' is neither a share below 1 nor a factor: write e.g. sign:0.3 or scale:20"
        )
    return value


def read_experiment(file: Path | None, settings: Iterable[str]) -> Experiment:
    """Read the experiment of a file, or the quick start without one, and put the command line's settings into it."""
    settings = list(settings)
    table = apply_settings(quickstart_table() if file is None else toml_io.read_toml(file), settings)
    if file is not None:
        check_code(table, file, spoken=code_names(apply_settings({}, settings)))
    return Experiment.model_validate(table)


def with_short_forms(settings: Sequence[str], values: Mapping[str, object]) -> list[str]:
    """Return the settings with one more for each short form that has a value; a key that is set already is refused.

    >>> with_short_forms(["local.lr=0.1"], {"device": "cpu", "rounds": None})
    ['local.lr=0.1', 'engine.device=cpu']
    """
    known = [_pair(setting) for setting in settings]
    more = []
    for option, value in values.items():
        if value is None:
            continue
        key = _SHORT_FORMS[option]
        section, _, name = key.rpartition(".")
        for path, text in known:
            table = toml_io.parse_value(text) if path == [section] else None
            if path == key.split(".") or (isinstance(table, dict) and name in table):
                raise FedstillError(f"--{option} and --set {'.'.join(path)} both set {key}: leave one of them out")
        more.append(f"{key}={value}")
    return [*settings, *more]


def apply_settings(table: dict[str, Any], settings: Iterable[str]) -> dict[str, Any]:
    """Return a copy of an experiment's table with every `key=value` set.

    A new name of a method, model or scheme drops the options of the old one. A table replaces its section, and single
    keys of the section are set afterwards. `key=none` removes a key, so that its default counts.
    """
    changed = copy.deepcopy(table)
    pairs = [_pair(setting) for setting in settings]
    for path, text in sorted(pairs, key=lambda pair: (len(pair[0]) > 1, not _is_choice(pair[0]))):
        if text == _NOTHING and _can_be_removed(changed, path):
            _remove(changed, path)
        else:
            value = toml_io.parse_value(text)
            if isinstance(value, str) and text.startswith("{"):
                raise FedstillError(
                    f"--set {'.'.join(path)}={text}: this is no TOML table: quote words in it and close every bracket, "
                    """e.g. --set 'model={name="mlp", hidden=[8]}'"""
                )
            _set(changed, path, value)
    _check_epochs_count(changed, {".".join(path): text for path, text in pairs})
    return changed


def _pair(setting: str) -> tuple[list[str], str]:
    key, equals, text = setting.partition("=")
    path = key.strip().split(".")
    if not equals:
        raise FedstillError(f"--set {setting}: write it as key=value, e.g. --set rounds=20 or --set local.lr=0.1")
    if not all(path):
        raise FedstillError(f"--set {setting}: '{key}' is no key: write section.key=value, e.g. --set local.lr=0.1")
    return path, text.strip()


def _is_choice(path: Sequence[str]) -> bool:
    return path[0] in _CHOICES and (len(path) == 1 or path[1] == _CHOICES[path[0]])


def _set(table: dict[str, Any], path: Sequence[str], value: Any) -> None:
    if _is_choice(path) and not isinstance(value, dict):
        section, key = path[0], _CHOICES[path[0]]
        old = table.get(section, {})
        old = {key: old} if isinstance(old, str) else old
        if old.get(key) != value:
            old = {name: kept for name, kept in old.items() if name in _KEPT}
        table[section] = {**old, key: value}
        return
    *parents, name = path
    if parents and isinstance(word := table.get(path[0]), str) and path[0] in _WORDS:
        table[path[0]] = {_WORDS[path[0]]: word}
    for parent in parents:
        table = table.setdefault(parent, {})
        if not isinstance(table, dict):
            raise FedstillError(f"--set {'.'.join(path)}: '{parent}' is a single value, it has no keys below it")
    table[name] = value


def _can_be_removed(table: dict[str, Any], path: Sequence[str]) -> bool:
    """Return whether `key=none` removes the key: not where `none` is a value of it (data.scale)."""
    section, key = path[0], path[-1]
    if _is_choice(path) or len(path) > 2:
        return False
    sections = keys_in(Experiment)
    kind: Any = Experiment if len(path) == 1 else sections[section].section if section in sections else None
    if kind is not None and key in keys_in(kind):
        known = keys_in(kind)[key]
        is_a_value = _is_fine(lambda: TypeAdapter(kind).validate_python({key: _NOTHING}))
        return known.default is None or not (known.section or is_a_value)
    chosen = table.get(section)
    if section not in _CHOICES or not isinstance(chosen, dict) or key not in chosen:
        return False
    name = str(chosen.get(_CHOICES[section]))
    present = {other: value for other, value in chosen.items() if other not in keys_in(kind)}
    return not _is_fine(lambda: options.check(section, name, {**present, key: _NOTHING}))


def _is_fine(check: Callable[[], object]) -> bool:
    try:
        check()
    except (FedstillError, ValidationError):
        return False
    return True


def _remove(table: dict[str, Any], path: Sequence[str]) -> None:
    *parents, name = path
    for parent in parents:
        table = table.get(parent, {})
    if isinstance(table, dict):  # not where a word stands for a section: method = "fedavg"
        table.pop(name, None)


def _check_epochs_count(table: dict[str, Any], settings: Mapping[str, str]) -> None:
    """Refuse `--set local.epochs` where the file has local.steps, because the epochs would have no effect."""
    local = table.get("local")
    steps = local.get("steps") if isinstance(local, dict) else None
    epochs = settings.get("local.epochs", _NOTHING)
    if steps is None or epochs == _NOTHING:
        return
    cure = "leave one of them out" if "local.steps" in settings else "add --set local.steps=none"
    raise FedstillError(f"local.epochs = {epochs} would do nothing: local.steps = {steps} counts; {cure}")


def without_defaults(section: MethodSection) -> str:
    """Return the text of a method with only the options that differ from their defaults."""
    name, values = section.name, section.options
    return write(name, _beyond(values, options.defaults("method", name) if values and section.is_single else {}))


def _beyond(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that differ from the defaults; tables are compared key by key."""
    old = {key: defaults.get(key) for key, value in values.items() if key not in defaults or defaults[key] != value}
    return {key: _beyond(values[key], was) if isinstance(was, dict) else values[key] for key, was in old.items()}


def parse_method(entry: str, experiment: Experiment) -> MethodSection:
    """Return the [method] section that an entry of compare stands for.

    The bare name of the experiment's method has the options of the experiment's section. An entry with brackets has
    the options inside them only: `feddf(student.lr=0.1)` and `feddf()` take nothing from the section.
    """
    section = experiment.method
    return section if entry.strip() == section.name else MethodSection.model_validate({"name": entry.strip()})


def describe_partition(experiment: Experiment) -> str:
    """Return the split in words: lda(alpha=0.1) over 100 clients."""
    section = experiment.partition
    return describe_split({**section.options, "scheme": section.scheme, "clients": section.clients})


def describe_split(table: Mapping[str, Any]) -> str:
    """Return a [partition] section in words.

    >>> describe_split({"scheme": "lda", "alpha": 0.1, "clients": 100})
    'lda(alpha=0.1) over 100 clients'
    """
    inside = ", ".join(f"{key}={value}" for key, value in table.items() if key not in ("scheme", "clients"))
    clients = f" over {table['clients']} clients" if table.get("clients") else ""
    return f"{table['scheme']}({inside}){clients}"
