"""A method of your own: one file, run by its path, registered nowhere.

fedstill run --set method=examples/my_method.py:my_method --rounds 3
"""

from torch import Tensor, log_softmax

from fedstill import Batch, Local, Method, Need, Objective, Output, combine
from fedstill.compose.combine import weighted_mean
from fedstill.local import cross_entropy, start_model
from fedstill.server.aggregate import average


def keep_absent_classes(strength: float) -> Objective:
    """strength mean_x sum_c p_c log(p_c / q_c) over the classes c that the client lacks; p received, q trained."""

    def loss(output: Output, batch: Batch, local: Local) -> Tensor:
        received, trained = log_softmax(local.frozen["start"].logits, -1), log_softmax(output.logits, -1)
        lost = received.exp() * (received - trained)
        of_absent = lost.masked_fill(local.label_counts > 0, 0.0).sum(-1)
        return strength * weighted_mean(of_absent, batch.weight)

    return Objective(loss, frozen={"start": start_model}, needs=frozenset({Need.LABEL_COUNTS}))


def my_method(*, strength: float = 0.1) -> Method:
    """My method: clients keep what the received model says of the classes they do not have.

        F_k + strength mean_x sum_{c: n_k^c = 0} p_c(x) log(p_c(x) / q_c(x)),    w <- sum_{k in S} p_k w_k

    Args:
        strength: weight of the term; 0 is FedAvg bit for bit.

    Reveals: the trained model and the number of samples n_k.
    """
    return Method(combine(cross_entropy(), keep_absent_classes(strength)), average())
