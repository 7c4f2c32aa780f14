"""The other scorers of FedAUX's Fig. 4: what they say of near and far samples, against slow formulas."""

import math

import numpy as np
import pytest
import torch

from fedstill.methods.fedaux.certainty import LEAST, comparable, log_scores, normalised, relative

SCORERS = ("kde", "isolation_forest", "one_class_svm", "two_class_svm")


def cloud(seed, count, centre, features=3):
    generator = np.random.default_rng(seed)
    return torch.from_numpy(generator.normal(size=(count, features)) + np.asarray(centre))


NEGATIVES = cloud(0, 60, 0.0)


@pytest.mark.parametrize("scorer", SCORERS)
def test_the_client_with_such_samples_counts_more(scorer):
    centres = ((3.0, 0.0, 0.0), (-3.0, 0.0, 0.0))
    asked = torch.cat([cloud(8, 20, centre) for centre in centres])
    logs = [log_scores(scorer, cloud(k, 30, centre), NEGATIVES, asked, 1) for k, centre in enumerate(centres)]
    share = normalised(relative(torch.stack(logs)))
    right = torch.cat([share[0, :20], share[1, 20:]])
    assert right.mean() > 0.52
    assert (right > 0.5).double().mean() > 0.9


def test_the_density_is_that_of_a_gaussian_kernel_with_scotts_width():
    own, asked = cloud(1, 9, 1.0, features=2), cloud(2, 4, 0.0, features=2)
    width = math.sqrt(float(own.var(dim=0, correction=0).mean())) * 9 ** (-1 / 6)
    wanted = [
        math.log(
            sum(math.exp(-float(((x - y) ** 2).sum()) / (2 * width**2)) for y in own) / (9 * 2 * math.pi * width**2)
        )
        for x in asked
    ]
    found = log_scores("kde", own, NEGATIVES[:, :2], asked, 0)
    assert found.tolist() == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize("scorer", SCORERS)
def test_a_client_of_one_sample_has_finite_scores(scorer):
    found = log_scores(scorer, cloud(1, 1, 1.0), NEGATIVES[:2], cloud(2, 5, 0.0), 3)
    assert found.shape == (5,)
    assert bool(found.isfinite().all())


@pytest.mark.parametrize("scorer", SCORERS)
def test_the_same_seed_gives_the_same_scores(scorer):
    first, again = (log_scores(scorer, cloud(1, 9, 1.0), NEGATIVES, NEGATIVES[:4], 2**63 + 5) for _ in range(2))
    assert torch.equal(first, again)


def test_scores_without_a_scale_are_parts_of_the_largest():
    logs = torch.tensor([[-5000.0, 0.0], [-5000.0 - math.log(4), -1e5]], dtype=torch.float64)
    assert relative(logs).tolist() == [[1.0, 1.0], [pytest.approx(0.25), LEAST]]


def test_densities_of_spaces_of_different_dimension_count_by_their_clients():
    """24 and 384 features: a density is of another size in each, and says nothing about the other."""
    wide = torch.tensor([[900.0, 950.0], [905.0, 800.0], [905.0, 940.0]], dtype=torch.float64)
    narrow = torch.tensor([[-3.0, -9.0], [-4.0, -2.0]], dtype=torch.float64)
    share = normalised(relative(torch.cat(comparable([wide, narrow]))))
    torch.testing.assert_close(share[:3].sum(0), torch.full((2,), 3 / 5, dtype=torch.float64))
    for part, own in ((share[:3], wide), (share[3:], narrow)):  # among themselves they share as if alone
        torch.testing.assert_close(part / part.sum(0), normalised(relative(own)))


def test_densities_of_one_architecture_stay_as_they_are():
    logs = [torch.tensor([[-5.0, 2.0], [3.0, 4.0]])]
    assert comparable(logs) is logs
    assert comparable([logs[0], torch.empty(0, 2)])[1].shape == (0, 2)  # none of its clients answered
