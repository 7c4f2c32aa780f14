"""Is this machine ready? Versions, device, extras, and both engines on a tiny problem; what to do where not."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from fedstill.about.toy import trial_run
from fedstill.core.errors import FedstillError
from fedstill.core.tree import leaves
from fedstill.engine import check_compiler, choose_device
from fedstill.experiment.run_folder import CORE_PACKAGES, EXTRAS, describe_device, version_of
from fedstill.methods.lookup import build_method

TOLERANCE = 1e-4  # float32 sums in another order, over a few rounds
ROUNDS = 20


@dataclass(frozen=True)
class Check:
    """One finding. `required` ones make the doctor unhappy; the others are opportunities."""

    name: str
    ok: bool
    found: str
    advice: str = ""
    required: bool = True


def examine() -> list[Check]:
    """Return all checks; the checks of the engines take about a second."""
    return [*_basics(), *_extras(), *_engines(), _compiler()]


def is_healthy(checks: list[Check]) -> bool:
    return all(check.ok for check in checks if check.required)


def as_json(checks: list[Check]) -> dict[str, Any]:
    return {"healthy": is_healthy(checks), "checks": [asdict(check) for check in checks]}


def _basics() -> Iterator[Check]:
    version = ".".join(str(part) for part in sys.version_info[:3])
    fits = (3, 11) <= sys.version_info[:2] < (3, 14)
    yield Check("python", fits, version, "" if fits else "fedstill needs Python 3.11 to 3.13")
    for package in ("fedstill", *CORE_PACKAGES):
        installed = version_of(package)
        yield Check(
            package, installed is not None, installed or "missing", "" if installed else f"pip install {package}"
        )
    device = describe_device()
    if device["kind"] == "cuda":
        yield Check("device", True, f"{device['name']}, {device['gigabytes']} GB")
    else:
        advice = "fine for small models; for CNNs a GPU and a CUDA build of torch are many times faster"
        yield Check("device", True, f"cpu ({device['name']}), {device['threads']} threads", advice, required=False)


def _extras() -> Iterator[Check]:
    for extra, packages in EXTRAS.items():
        missing = [package for package in packages if version_of(package) is None]
        present = [package for package in packages if package not in missing]
        installed = ", ".join(present) or "not installed"
        advice = f"for {', '.join(missing)}: pip install 'fedstill[{extra}]'" if missing else ""
        yield Check(f"extra {extra}", not missing, installed, advice, required=False)


def _engines() -> Iterator[Check]:
    """Play the same tiny run in both engines: equal weights but for rounding, and how fast."""
    device, method, weights = str(choose_device("auto")), build_method("fedavg", {})[0].method, []
    for engine in ("looped", "batched"):
        try:
            trial_run(method, rounds=1, engine=engine, device=device)  # warms up objects that are made once
            began = time.perf_counter()
            weights.append(list(leaves(trial_run(method, rounds=ROUNDS, engine=engine, device=device).weights.params)))
            rate = ROUNDS / (time.perf_counter() - began)
        except Exception as error:  # whatever breaks here is the finding
            advice = "please report this with the output of `fedstill doctor --format json`"
            yield Check(f"engine {engine}", False, " ".join(f"{type(error).__name__}: {error}".split()), advice)
        else:
            yield Check(f"engine {engine}", True, f"{rate:.0f} tiny rounds a second on {device}")
    if len(weights) == 2:
        gap = max(float((a - b).abs().max()) for a, b in zip(*weights, strict=True))
        advice = "" if gap <= TOLERANCE else "results depend on engine.name here: please report this"
        yield Check("engines agree", gap <= TOLERANCE, f"largest difference of a weight {gap:.1e}", advice)


def _compiler() -> Check:
    """Whether engine.compile = true can be had here."""
    name = "engine.compile"
    try:
        check_compiler(choose_device("auto"))
    except FedstillError as error:
        return Check(name, False, "not here", str(error).removeprefix(f"{name}: "), required=False)
    return Check(name, True, "can be switched on", required=False)
