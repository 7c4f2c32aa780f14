"""DP-FedAvg."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Literal

import torch
from annotated_types import Ge, Le
from pydantic import Strict

from fedstill.compose.sealed import of_sums
from fedstill.core.errors import FedstillError
from fedstill.core.limits import Example, NotNegative, OpenShare, Positive
from fedstill.core.tree import clone
from fedstill.core.types import (
    Mechanism,
    Method,
    OnCohort,
    Release,
    Round,
    SealedRound,
    Seed,
    ServerStep,
    Stage,
    Tree,
    Weights,
)
from fedstill.local.terms import cross_entropy
from fedstill.privacy.correlated import banded_root, correlated_noise
from fedstill.privacy.mechanisms import BELOW, noisy_mean, noisy_moves
from fedstill.server.aggregate import average

BOUND = "clip_bound"  # the server step that keeps the bound
Bands = Annotated[int, Strict(), Ge(1), Le(64)]  # 64 models of 8 bytes a parameter in memory
BANDED = (
    "the noises of rounds take each other back in part ({} bands); a client pays by how often and how soon it comes "
    "again, and no effect of a secret cohort is counted"
)
CLIP_LR = 0.2  # eta_C of Andrew et al., who found it to serve all of their tasks
LEAST, MOST = 1e-4, 1e6  # epsilon of a round: 2e8 and, at a delta of 1e-5, 0


def dp_fedavg(
    *,
    clip: Positive = 1.0,
    noise_multiplier: NotNegative = 1.0,
    trust: Literal["server", "nobody"] = "server",
    quantile: Annotated[OpenShare | None, Example(0.5)] = None,
    bands: Bands = 1,
) -> Method:
    """DP-FedAvg: FedAvg with bounded moves and noise, so that the models do not show any client's data.

        d_k = (w_k - w) min(1, C / ||w_k - w||)
        trust the server:  w <- w + (sum_{k in S} d_k + z C e) / m,           e   ~ N(0, I),  m = E|S|
        trust nobody:      w <- w + (1 / |S|) sum_{k in S} (d_k + z C e_k),   e_k ~ N(0, I)
        with a quantile q: C <- C exp(-0.2 (b - q)),  b = the noisy share of moves that are no longer than C
        with B bands:      sum_{j < B} a_j n_{t-j} = |a| z C e_t  in place of n_t = z C e_t,  a = 1, 1/2, 3/8, 5/16, ...

    Replacing all that one client holds moves a sum by at most 2 C, so a round is a Gaussian mechanism of multiplier
    z / 2. The rounds are composed over the run; with sampling = "poisson" and a trusted server each client's chance to
    be absent counts too. It is made to be joined: dp_fedavg+fedprox(mu=0.01), dp_fedavg(trust="nobody")+feddf.

    Clients count alike, because a weight by size would tell the size. BatchNorm statistics are never taken from
    clients: the model keeps its first ones. Use a network without BatchNorm, or join a method that re-estimates them on
    unlabeled data, as feddf does.

    Helps: where a promise of privacy is needed. It costs accuracy on all data, because each round adds noise of
        standard deviation z C / m to every parameter. With m = 5 clients the noise is larger than the moves; take
        hundreds.

    Args:
        clip: bound of the norm of a client's move over all parameters (C; the paper's S).
        noise_multiplier: standard deviation of the noise in units of clip (z); 0 adds none and claims nothing.
        trust: "server": a trusted server adds the noise once, to the sum, and shows its steps nothing else; the claim
            holds against everybody else. "nobody": every client adds its own; the claim holds against the server too,
            at the price of sqrt(|S|) times as much noise in the average.
        quantile: the share of moves that the bound shall not cut (gamma): the bound goes there from `clip`, by a noisy
            count that is part of the same release. None keeps the bound. It needs trust = "server".
        bands: rounds over which noises take each other back (1: none, each round has noise of its own), so that less
            adds up in the model. epsilon stays the same where no client comes again within so many rounds: sampling =
            "cyclic", and at least bands * cohort clients. It needs trust = "server", and no quantile.

    Tries: clip = 0.3, 1.0, 3.0; quantile = none, 0.5.
    Reveals: with trust = "server" the trained model, its size and loss go to the server as in FedAvg, and the noisy
        mean to everybody else; with trust = "nobody" a noisy model, and in place of size, steps, loss and BatchNorm
        statistics the same constants from everybody.
    Differs from the paper: clients count alike. Neighbouring federations differ in a client's data being replaced, not
        in the client being there or not, so our epsilon at the same z is larger (about twice for small ones).
        Without Poisson sampling no amplification is claimed. trust = "nobody" is not in the paper.
        With a quantile the count's noise is at least z, so that moves never pay more than 15 % for it.
        With bands a closed form takes the place of an optimiser's numbers, in sixteenths, and we count how often and
        how soon clients really come again instead of a bound on it.
    Reference: McMahan et al., Learning Differentially Private Recurrent Language Models, ICLR 2018, Algorithm 1;
        Andrew et al., Differentially Private Learning with Adaptive Clipping, NeurIPS 2021, Algorithm 1 (the quantile);
        Choquette-Choo et al., (Amplified) Banded Matrix Factorization, NeurIPS 2023, and Kalinin and Lampert, Banded
        Square Root Matrix Factorization, NeurIPS 2024 (the bands).
    """
    if noise_multiplier and not LEAST <= noise_multiplier <= MOST:
        raise FedstillError(
            f"method.noise_multiplier = {noise_multiplier!r} is impossible: it must be from {LEAST:g} to {MOST:g} "
            "(usual are 0.5 to 20), or 0 for no noise and no claim"
        )
    local = trust == "nobody"
    if local and quantile is not None:
        raise FedstillError(
            "method.quantile needs method.trust = 'server', which counts the moves: leave quantile out, or trust the "
            "server"
        )
    if bands > 1 and (local or quantile is not None):
        raise FedstillError(
            f"method.bands = {bands} needs method.trust = 'server' and no method.quantile, because one party must make "
            "the noise of all rounds in units of one bound: set bands = 1, or change these"
        )
    factor = banded_root(bands)
    release = Release(
        "model updates",
        unit="client",
        multiplier=noise_multiplier / 2 or None,
        when="round",
        against="server" if local else "public",
        why=(BANDED.format(bands) if bands > 1 else "") if noise_multiplier else "no noise: set noise_multiplier",
        covers=("model", "buffers", "numbers"),
        without_trust="" if local else "dp_fedavg(trust='nobody')",
        factor=factor,
    )
    moves = noisy_moves(clip, noise_multiplier) if local else None
    mean = None if local else noisy_mean(clip, noise_multiplier)
    if bands > 1:
        noise = correlated_noise(factor)

        def by_round(state: Tree, past: Sequence[Seed]) -> OnCohort:
            return noisy_mean(clip, noise_multiplier, noise=noise, past=past)

        stage = Mechanism(on_cohort=mean, by_round=by_round, releases=(release,))
        return Method(cross_entropy(), average("uniform"), (keep_statistics(),), way=(stage,))
    if quantile is None:
        stage = Mechanism(per_client=moves, on_cohort=mean, releases=(release,))
        return Method(cross_entropy(), average("uniform"), (keep_statistics(),), way=(stage,))

    def by_bound(state: Tree, past: Sequence[Seed]) -> OnCohort:
        bound = float(state[BOUND]["clip"]) if BOUND in state else clip
        return noisy_mean(bound, noise_multiplier, counts_below=True)

    stage = Mechanism(on_cohort=mean, by_round=by_bound, releases=(release,))
    steps = (keep_statistics(), follow_quantile(clip, quantile))
    return Method(cross_entropy(), average("uniform"), steps, way=(stage,))


def follow_quantile(clip: float, quantile: float) -> ServerStep:
    """C <- C exp(-0.2 (b - quantile)), b the noisy share of moves that were no longer than C; the model passes through.

    Slot: "clip" (float64), from `clip` on and within a factor of a million of it. Reports: clip, the next bound.
    """

    def init(weights: Weights) -> Tree:
        return {"clip": torch.tensor(clip, dtype=torch.float64)}

    def apply(candidate: Weights, state: Tree, round: Round) -> tuple[Weights, Tree]:
        below = float(round.uploads.extra[BELOW][0])
        bound = float(state["clip"]) * math.exp(-CLIP_LR * (min(max(below, 0.0), 1.0) - quantile))
        bound = min(max(bound, clip * 1e-6), clip * 1e6)
        round.metrics["clip"] = bound
        return candidate, {"clip": torch.tensor(bound, dtype=torch.float64)}

    return ServerStep(BOUND, apply, init, stage=Stage.KEEP)


def keep_statistics() -> ServerStep:
    """Keep the BatchNorm statistics that the server sent, and drop those that the aggregate made from the uploads."""

    def apply(candidate: Weights, state: Tree, round: Round | SealedRound) -> tuple[Weights, Tree]:
        return candidate._replace(buffers=clone(round.start.buffers)), state

    return ServerStep("statistics", of_sums(apply), stage=Stage.KEEP)
