"""Methods as the public code of FedNTD and FedLMD has them: FedLMD's tables depend on them, nothing else should.

fedstill run --method "benchmarks/fedlmd/released.py:scaffold"
"""

from __future__ import annotations

from fedstill.compose.combine import combine
from fedstill.core.types import Method
from fedstill.local.contrast import Previous, model_contrast
from fedstill.local.terms import control_variates, cross_entropy
from fedstill.server.aggregate import average
from fedstill.server.memory import update_control


def scaffold() -> Method:
    """SCAFFOLD that averages models by size and controls evenly.

    Where the clients' sizes differ, the corrections c - c_k do not cancel over the cohort.
    """
    return Method(combine(cross_entropy(), control_variates("II")), average("size"), (update_control("uniform"),))


def moon(*, mu: float = 0.1, temperature: float = 0.5, previous: Previous = "init") -> Method:
    """MOON that contrasts a client's first visit with the very first global model.

    Args:
        mu: weight of the contrast.
        temperature: temperature of the contrast.
        previous: the model that stands for the client's last one at its first visit: the first global model ("init"),
            the received one ("start"), or none ("skip"), as fedstill's moon has it.
    """
    contrast = model_contrast(mu, temperature=temperature, previous=previous)
    return Method(combine(cross_entropy(), contrast), average())
