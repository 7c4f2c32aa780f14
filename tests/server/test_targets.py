import pytest
import torch
from by_hand import number
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from largest_tensor import LargestTensor

from fedstill.server.distill.targets import cluster_labels, sharpen, smooth_over_rounds

quick = settings(deadline=None, max_examples=60)
POINTS = [[1.0, 0.0], [0.0, 1.0], [3.0, 4.0]]
BELIEF = [[0.9, 0.1], [0.2, 0.8], [0.5, 0.5]]


@st.composite
def beliefs(draw, samples=6):
    """(M, K) rows that sum to 1."""
    classes = draw(st.integers(2, 5))
    logits = draw(arrays("float64", (samples, classes), elements=st.floats(-6, 6)))
    return torch.softmax(torch.from_numpy(logits), -1)


def random_points(seed, samples=6, width=3):
    return torch.randn(samples, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize(
    ("before", "temperature", "after"),
    [
        ([0.6, 0.4], 0.5, [0.692308, 0.307692]),  # FedBE
        ([0.8, 0.2], 1 / 0.75, [0.738796, 0.261204]),  # the power 0.75 of MrTF's released code
        ([0.6, 0.4], 1.0, [0.6, 0.4]),
        ([0.25] * 4, 0.1, [0.25] * 4),
    ],
)
def test_sharpening_as_worked_by_hand(before, temperature, after):
    assert sharpen(number(before), temperature).tolist() == pytest.approx(after, abs=1e-6)


@pytest.mark.parametrize("temperature", [1e-3, 0.5, 1.0, 2.0, 1e3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_impossible_stays_impossible_at_every_temperature(temperature, dtype):
    found = sharpen(torch.tensor([[0.7, 0.3, 0.0], [1.0, 0.0, 0.0]], dtype=dtype), temperature)
    assert (found[:, 2] == 0).all()
    assert found[1].tolist() == [1.0, 0.0, 0.0]


@quick
@given(beliefs(), st.floats(0.05, 20.0))
def test_sharpening_keeps_the_order_of_classes_and_rows_that_sum_to_one(belief, temperature):
    found = sharpen(belief, temperature)
    torch.testing.assert_close(found.sum(1), torch.ones(len(belief), dtype=torch.float64))
    ordered = belief.sort(dim=1).indices
    assert (found.gather(1, ordered).diff(dim=1) >= -1e-12).all()
    largest, before = found.max(1).values, belief.max(1).values
    assert ((largest >= before - 1e-12) if temperature <= 1 else (largest <= before + 1e-12)).all()


@pytest.mark.parametrize(
    ("sharpness", "expected"),
    [
        (4.0, [[0.723934, 0.276066], [0.316463, 0.683537], [0.490595, 0.509405]]),
        (8.0, [[0.873041, 0.126959], [0.176514, 0.823486], [0.481197, 0.518803]]),
    ],
)
def test_clustered_labels_as_worked_by_hand(sharpness, expected):
    """The centres are (1.5, 1.375) and (1.142857, 2)."""
    found = cluster_labels(number(BELIEF), number(POINTS), sharpness)
    torch.testing.assert_close(found, number(expected), rtol=0, atol=1e-6)


@pytest.mark.parametrize(("sharpness", "expected"), [(4.0, [0.982014, 0.017986]), (8.0, [0.999665, 0.000335])])
def test_sure_labels_on_orthogonal_features_are_as_sure_as_the_sharpness_allows(sharpness, expected):
    found = cluster_labels(torch.eye(2), torch.eye(2), sharpness)
    assert found[0].tolist() == pytest.approx(expected, abs=1e-6)
    assert found[1].tolist() == pytest.approx(expected[::-1], abs=1e-6)


@pytest.mark.parametrize(
    ("classes", "sharpness", "ceiling"), [(10, 4.0, 0.8585), (10, 8.0, 0.9970), (62, 4.0, 0.4723), (100, 8.0, 0.9679)]
)
def test_no_target_on_non_negative_features_passes_the_ceiling_of_its_sharpness(classes, sharpness, ceiling):
    found = cluster_labels(torch.eye(classes), torch.eye(classes), sharpness)
    assert float(found.max()) == pytest.approx(ceiling, abs=5e-5)


@quick
@given(beliefs(), st.integers(0, 99), st.floats(1e-3, 1e3), st.floats(1e-3, 1e3))
def test_neither_the_scale_of_features_nor_that_of_a_class_counts(belief, seed, features_times, class_times):
    assume(float(belief[:, 0].sum()) * min(class_times, 1.0) > 1e-5)  # less is no class
    points = random_points(seed)
    found = cluster_labels(belief, points)
    torch.testing.assert_close(found.sum(1), torch.ones(len(belief), dtype=torch.float64))
    torch.testing.assert_close(cluster_labels(belief, features_times * points), found, rtol=1e-7, atol=1e-9)
    scaled = belief.clone()
    scaled[:, 0] *= class_times
    torch.testing.assert_close(cluster_labels(scaled, points), found, rtol=1e-7, atol=1e-9)


@quick
@given(beliefs(), st.integers(0, 99))
def test_the_order_of_samples_does_not_count(belief, seed):
    points = random_points(seed)
    turned = cluster_labels(belief.flip(0), points.flip(0)).flip(0)
    torch.testing.assert_close(turned, cluster_labels(belief, points))


def test_a_class_that_nobody_believes_in_gets_nothing_and_takes_nothing_from_the_others():
    two = cluster_labels(number(BELIEF), number(POINTS))
    three = cluster_labels(torch.cat([number(BELIEF), torch.zeros(3, 1)], 1), number(POINTS))
    assert three[:, 2].tolist() == [0.0] * 3
    torch.testing.assert_close(three[:, :2], two)


def test_features_of_zero_are_equally_near_to_every_class():
    points = number([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]])
    found = cluster_labels(number(BELIEF), points)
    assert found[2].tolist() == [0.5, 0.5]
    assert cluster_labels(number(BELIEF), torch.zeros_like(points)).tolist() == [[0.5, 0.5]] * 3


def test_feature_maps_are_read_as_one_long_vector():
    maps = random_points(3, width=8).reshape(6, 2, 2, 2)
    belief = torch.softmax(random_points(4), 1)
    assert torch.equal(cluster_labels(belief, maps), cluster_labels(belief, maps.flatten(1)))


def test_the_refinery_makes_nothing_larger_than_features_and_targets():
    """84,000 samples, 81 classes and 256 features would be 7 GB side by side."""
    samples, classes, width = 300, 20, 50
    with LargestTensor() as largest:
        cluster_labels(torch.softmax(random_points(0, samples, classes), 1), random_points(1, samples, width))
    assert largest.numbers <= samples * width


def test_targets_are_smoothed_over_rounds():
    new, old = number([[0.8, 0.2]]), number([[0.4, 0.6]])
    assert smooth_over_rounds(new, None, 0.75) is new
    assert smooth_over_rounds(new, old, 0.75)[0].tolist() == pytest.approx([0.5, 0.5])
    torch.testing.assert_close(smooth_over_rounds(new, old, 0.0), new)
