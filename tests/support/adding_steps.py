"""Server steps on one number: they add to it, count their runs, and may believe and report something."""

from __future__ import annotations

import torch

from fedstill.core.types import Method, Need, Objective, Round, ServerStep, Stage, Targets, Uploads, Weights


def model_at(value: float) -> Weights:
    return Weights({"w": torch.tensor(value)}, {"count": torch.tensor(3)})


def at_round(number: int) -> Round:
    nobody = Uploads(*[None] * len(Uploads._fields))
    return Round(number, model_at(0.0), nobody, None, 1, None, 0, None)


def term(scale: float = 1.0, **parts) -> Objective:
    return Objective(lambda output, batch, local: scale * local.params["w"].sum(), **parts)


def method_of(*steps: ServerStep) -> Method:
    return Method(term(), steps[0], steps[1:])


def adding(amount: float, name: str = "adding") -> ServerStep:
    """Moves the model by `amount` and counts how often it ran."""

    def apply(candidate, state, round):
        moved = candidate._replace(params={"w": candidate.params["w"] + amount})
        return moved, {"runs": state["runs"] + 1}

    return ServerStep(name, apply, init=lambda weights: {"runs": torch.tensor(0)})


def believing(amount: float, name: str = "believing") -> ServerStep:
    """Adds `amount`, counts, believes in class 0 as strongly as it has run often, and reports the model it made."""
    inner = adding(amount)

    def apply(candidate, state, round):
        moved, after_step = inner.apply(candidate, state, round)
        belief = Targets(torch.tensor([[float(after_step["runs"]), 0.0]]), torch.tensor([True]))
        return moved, {**after_step, "reported": Weights(moved.params, {}), "targets": belief._asdict()}

    return ServerStep(
        name,
        apply,
        inner.init,
        lambda state: {f"runs of {amount}": state["runs"]},
        frozenset({Need.UNLABELED}),
        stage=Stage.KEEP,
    )
