"""FedDF's public code: which client's BatchNorm statistics the student starts with."""

import pytest
import torch
from by_hand import number, round_of, uploads_of
from papers import released

from fedstill.core.types import Need, Weights
from fedstill.server.aggregate import average, normalized_average

with_last_statistics = released("feddf", "with_last_statistics")


def normed(mean):
    return Weights({"w": number(mean)}, {"bn.running_mean": number([mean]), "bn.num_batches_tracked": torch.tensor(3)})


@pytest.mark.parametrize(
    ("ids", "sizes", "mean"), [([3, 9, 5], [1, 1, 1], 20.0), ([9, 3, 5], [1, 1, 1], 10.0), ([3, 9, 5], [1, 0, 1], 30.0)]
)
def test_the_last_client_is_the_one_of_the_largest_id_that_has_any_data(ids, sizes, mean):
    models = [normed(value) for value in (10.0, 20.0, 30.0)]
    this = round_of(models[0], uploads_of(models, sizes)._replace(ids=torch.tensor(ids)))
    weights, _ = with_last_statistics(average()).apply(models[0], {}, this)
    assert weights.buffers["bn.running_mean"].tolist() == [mean]
    assert torch.equal(weights.params["w"], average().apply(models[0], {}, this)[0].params["w"])
    weights.buffers["bn.running_mean"].fill_(77.0)
    assert not (this.uploads.weights.buffers["bn.running_mean"] == 77.0).any()


@pytest.mark.parametrize("aggregate", [average, normalized_average])
def test_one_clients_statistics_cannot_be_had_from_a_sum_over_clients(aggregate):
    assert Need.INDIVIDUAL_UPLOADS in with_last_statistics(aggregate()).needs
    assert Need.INDIVIDUAL_UPLOADS not in aggregate().needs
