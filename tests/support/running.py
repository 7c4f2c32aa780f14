"""`federate` and `built` with flat keywords, because a test says only the few settings that it is about."""

from __future__ import annotations

import dataclasses
from typing import Any

from wire import Wire

from fedstill.about.toy import trial_federation, trial_model
from fedstill.core.types import Mechanism, Method, PerClient, Training
from fedstill.engine import Engines, build_engines
from fedstill.loop import federate as loop
from fedstill.loop.federate import Built, Schedule
from fedstill.loop.history import Result

_SCHEDULE = {field.name for field in dataclasses.fields(Schedule)}
_CALL = ("run_dir", "callbacks", "resume", "state_budget")


def built(**settings: Any) -> Built:
    """A `Built` from its parts and from the keys of `Schedule`; an engine is a name or an object."""
    schedule = {key: settings.pop(key) for key in _SCHEDULE & settings.keys()}
    engine, device = settings.pop("engine", "auto"), settings.pop("device", "auto")
    options = settings.pop("engine_options", {})
    tamper = settings.pop("tamper", None)
    settings = {key: value for key, value in settings.items() if value is not None}

    def engines(**data: Any) -> Engines:
        made = build_engines(engine, device, **options, **data)
        return made if tamper is None else made._replace(cohort=Wire(made.cohort, data["model"], tamper))

    return Built(engines=engines, schedule=Schedule(**schedule), **settings)


def federate(**settings: Any) -> Result:
    call = {key: settings.pop(key) for key in _CALL if key in settings}
    return loop.federate(built(**settings), **call)


def run_on_trial(method: Any, **settings: Any) -> Result:
    """Run a method on the trial federation of `explain`: four clients, two of them in each of three rounds."""
    given = {
        "model": trial_model(), "federation": trial_federation(), "training": Training(batch_size=8, lr=0.05),
        "rounds": 3, "cohort": 2, "engine": "looped", "device": "cpu",
    }  # fmt: skip
    return federate(method=method, **{**given, **settings})


def changed_on_the_way(method: Method, change: PerClient) -> Method:
    """The method whose clients change their uploads by `change` instead; its releases stay."""
    quiet = tuple(dataclasses.replace(stage, per_client=None) for stage in method.way)
    return dataclasses.replace(method, way=(*quiet, Mechanism(per_client=change)))
