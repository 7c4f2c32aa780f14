"""DP-FedAvg, whole runs in which some moves are clipped and others are not, against numpy from the equations.

The noise is made here and handed to the method, so that its scale and its denominators are checked to the last digits.
"""

import dataclasses

import numpy as np
import numpy_methods as reference
import pytest
import torch
from by_hand import blobs, federation_of, linear_model, number
from running import federate

from fedstill.core.seeds import draw_cohort
from fedstill.core.types import Training, Weights
from fedstill.methods import dp_fedavg
from fedstill.privacy import correlated
from fedstill.privacy import mechanisms as moves
from fedstill.privacy.plan import Privacy

SIZES, EPOCHS, EXPECTED, ROUNDS, CLIP = [6, 13, 9, 20, 4], 4, 2, 6, 0.8
DATA = [blobs(k, size) for k, size in enumerate(SIZES)]
CLIENTS = [(np.pad(batch.x.numpy(), ((0, 0), (0, 1)), constant_values=1), batch.y.numpy(), EPOCHS) for batch in DATA]
GENERATOR = np.random.Generator(np.random.PCG64(3))
START = GENERATOR.normal(size=(3, 5))  # the last column is the bias
NOISE = GENERATOR.normal(size=(ROUNDS, len(SIZES), 3, 5))
LOCAL = Training(batch_size=64, epochs=EPOCHS, lr=0.1, momentum=0.5)


class Watched:
    """The method, handed the noise of NOISE; and who took part in each round."""

    def __init__(self, method) -> None:
        self.cohorts, self.drawn = [], 0
        (stage,) = method.way
        place = "per_client" if method.trusted is None else "on_cohort"
        inner = getattr(stage, place)

        def noted(uploads, *how):
            self.cohorts.append(uploads.ids.tolist())
            self.drawn = 0
            return inner(uploads, *how)

        self.method = dataclasses.replace(method, way=(dataclasses.replace(stage, **{place: noted}),))

    def draw(self, seed, shape, sigma):
        """For each client in turn, of a matrix the columns of the weight and then that of the bias."""
        matrix = NOISE[len(self.cohorts) - 1][self.drawn // 2]
        self.drawn += 1
        return torch.from_numpy(sigma * (matrix[:, :-1] if len(shape) == 2 else matrix[:, -1])).round().long()


@pytest.mark.parametrize("noise_multiplier", [0.0, 0.7])
@pytest.mark.parametrize(("trust", "sampling"), [("server", "poisson"), ("server", "fixed"), ("nobody", "poisson")])
def test_dp_fedavg_equals_its_equations_in_numpy(trust, sampling, noise_multiplier, monkeypatch):
    watched = Watched(dp_fedavg(clip=CLIP, noise_multiplier=noise_multiplier, trust=trust))
    monkeypatch.setattr(moves, "gaussian_steps", watched.draw)
    start = Weights({"weight": number(START[:, :-1]), "bias": number(START[:, -1])}, {})
    result = federate(
        method=watched.method, model=dataclasses.replace(linear_model(), init=lambda seed: start),
        federation=federation_of(DATA), training=LOCAL, rounds=ROUNDS, cohort=EXPECTED, sampling=sampling, seed=9,
        engine="looped", device="cpu", engine_options={"precision": "float64"}, privacy=Privacy(reproducible=True),
    )  # fmt: skip
    cohorts = watched.cohorts
    assert (len({len(cohort) for cohort in cohorts}) > 3) == (sampling == "poisson")
    assert ([] in cohorts) == ((trust, sampling) == ("server", "poisson"))  # then the model moves by noise alone
    expected, lengths = reference.dp_fedavg(
        START, CLIENTS, cohorts, lr=0.1, momentum=0.5, clip=CLIP, noise_multiplier=noise_multiplier, noise=NOISE,
        expected=EXPECTED if trust == "server" else None,
    )  # fmt: skip
    assert min(lengths) < 0.9 * CLIP < 1.1 * CLIP < max(lengths)
    found = np.column_stack([result.weights.params[name].numpy() for name in ("weight", "bias")])
    # with noise a move is cut to whole steps of CLIP / 2^24
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-6 if noise_multiplier else 1e-10)


def test_with_bands_the_noise_is_the_inverse_matrix_times_independent_noise(monkeypatch):
    """a = (8, 4, 3) on the diagonals of A, and A n = |a| z C e."""
    drawn = []

    def draw(seed, shape, sigma):
        drawn.append(shape)
        matrix = NOISE[(len(drawn) - 1) // 2][0]
        return torch.from_numpy(sigma * (matrix[:, :-1] if len(shape) == 2 else matrix[:, -1])).round().long()

    monkeypatch.setattr(correlated, "gaussian_steps", draw)
    start = Weights({"weight": number(START[:, :-1]), "bias": number(START[:, -1])}, {})
    result = federate(
        method=dp_fedavg(clip=CLIP, noise_multiplier=0.7, bands=3), model=dataclasses.replace(
            linear_model(), init=lambda seed: start
        ),
        federation=federation_of(DATA), training=LOCAL, rounds=ROUNDS, cohort=EXPECTED, sampling="cyclic", seed=9,
        engine="looped", device="cpu", engine_options={"precision": "float64"}, privacy=Privacy(reproducible=True),
    )  # fmt: skip
    cohorts = [draw_cohort(np.arange(5), EXPECTED, seed=9, round=at + 1, sampling="cyclic") for at in range(ROUNDS)]
    whole = sum(a / np.sqrt(89) * np.eye(ROUNDS, k=-lag) for lag, a in enumerate((8, 4, 3)))
    noise = np.einsum("ts,s...->t...", np.linalg.inv(whole), NOISE[:, 0])
    expected, _ = reference.dp_fedavg(
        START, CLIENTS, cohorts, lr=0.1, momentum=0.5, clip=CLIP, noise_multiplier=0.7, noise=noise[:, None],
        expected=EXPECTED,
    )  # fmt: skip
    found = np.column_stack([result.weights.params[name].numpy() for name in ("weight", "bias")])
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-6)
