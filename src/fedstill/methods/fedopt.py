"""Server optimisers on top of FedAvg: FedAvgM, FedAdam, FedYogi, FedAdagrad and torch's own (fedopt)."""

from __future__ import annotations

from typing import Literal

from fedstill.core.limits import Decay, Positive
from fedstill.core.types import Method
from fedstill.local.terms import cross_entropy
from fedstill.server.aggregate import average
from fedstill.server.optimizers import adam, adaptive, sgd


def fedavgm(*, beta: Decay = 0.5, server_lr: Positive = 1.0) -> Method:
    """FedAvgM: FedAvg with heavy-ball momentum on the server.

        D = sum_k p_k w_k - w,    v <- beta v - D,    w <- w - server_lr v
        p_k = n_k / sum_{j in S} n_j

    Args:
        beta: momentum (beta); with 0 and server_lr 1 it is FedAvg bit for bit.
        server_lr: the server's learning rate (eta_s).

    Tries: beta = 0.3, 0.5, 0.7, 0.9; server_lr = 0.3, 1.0.
    Reveals: the trained model and the number of samples n_k.
    Differs from the paper: beta is 0.9 there, for runs of thousands of rounds. 0.5 is ours, because in 12 to 20 rounds
        0.9 overshoots. Some code damps v by (1 - beta) or uses Nesterov's form; this does not.
    Reference: Hsu, Qi and Brown, Measuring the Effects of Non-Identical Data Distribution for Federated Visual
        Classification, 2019.
    """
    return Method(cross_entropy(), average(), (sgd(server_lr, momentum=beta),))


def fedadam(*, server_lr: Positive = 0.01, beta1: Decay = 0.9, beta2: Decay = 0.99, tau: Positive = 1e-3) -> Method:
    """FedAdam: the server takes Adam steps along the clients' mean move.

        D = sum_k p_k w_k - w,    m <- beta1 m + (1 - beta1) D,    v <- beta2 v + (1 - beta2) D^2
        w <- w + server_lr m / (sqrt(v) + tau),    m_0 = 0,    v_0 = tau^2
        p_k = n_k / sum_{j in S} n_j

    Args:
        server_lr: the server's learning rate (eta).
        beta1: decay of the mean move (beta_1).
        beta2: decay of its square (beta_2).
        tau: adaptivity, the floor of sqrt(v) (tau).

    Tries: server_lr = 0.003, 0.01, 0.03, 0.1; tau = 0.0001, 0.001, 0.01.
    Reveals: the trained model and the number of samples n_k.
    Differs from the paper: clients count by n_k; the paper counts them alike. It tunes server_lr for each task. 0.01 is
        our choice, FedYogi's usual value; 0.1, usual in other libraries, moves weights of a small network too far in a
        round. torch's Adam, with bias correction, is fedopt.
    Reference: Reddi et al., Adaptive Federated Optimization, ICLR 2021, Algorithm 2.
    """
    return Method(cross_entropy(), average(), (adaptive("adam", lr=server_lr, beta1=beta1, beta2=beta2, tau=tau),))


def fedyogi(*, server_lr: Positive = 0.01, beta1: Decay = 0.9, beta2: Decay = 0.99, tau: Positive = 1e-3) -> Method:
    """FedYogi: FedAdam whose second moment changes additively, so that it falls slowly.

        D = sum_k p_k w_k - w,    m <- beta1 m + (1 - beta1) D,    v <- v - (1 - beta2) D^2 sign(v - D^2)
        w <- w + server_lr m / (sqrt(v) + tau),    m_0 = 0,    v_0 = tau^2
        p_k = n_k / sum_{j in S} n_j

    Args:
        server_lr: the server's learning rate (eta).
        beta1: decay of the mean move (beta_1).
        beta2: 1 - beta2 is how fast the second moment follows (beta_2).
        tau: adaptivity, the floor of sqrt(v) (tau).

    Tries: server_lr = 0.003, 0.01, 0.03, 0.1; tau = 0.0001, 0.001, 0.01.
    Reveals: the trained model and the number of samples n_k.
    Differs from the paper: clients count by n_k; the paper counts them alike.
    Reference: Reddi et al., Adaptive Federated Optimization, ICLR 2021, Algorithm 2.
    """
    return Method(cross_entropy(), average(), (adaptive("yogi", lr=server_lr, beta1=beta1, beta2=beta2, tau=tau),))


def fedadagrad(*, server_lr: Positive = 0.03, beta1: Decay = 0.0, tau: Positive = 1e-3) -> Method:
    """FedAdagrad: the server divides each coordinate's step by the root of all its past moves.

        D = sum_k p_k w_k - w,    m <- beta1 m + (1 - beta1) D,    v <- v + D^2
        w <- w + server_lr m / (sqrt(v) + tau),    m_0 = 0,    v_0 = tau^2
        p_k = n_k / sum_{j in S} n_j

    Args:
        server_lr: the server's learning rate (eta).
        beta1: decay of the mean move (beta_1); 0 in the paper.
        tau: adaptivity, the floor of sqrt(v) (tau).

    Tries: server_lr = 0.01, 0.03, 0.1; tau = 0.0001, 0.001, 0.01.
    Reveals: the trained model and the number of samples n_k.
    Differs from the paper: clients count by n_k; the paper counts them alike. It tunes server_lr for each task. 0.03 is
        our choice, because 0.1 moves the weights of a small network too far in the first rounds.
    Reference: Reddi et al., Adaptive Federated Optimization, ICLR 2021, Algorithm 2.
    """
    return Method(cross_entropy(), average(), (adaptive("adagrad", lr=server_lr, beta1=beta1, beta2=0.0, tau=tau),))


def fedopt(
    *, optimizer: Literal["sgd", "adam"] = "sgd", server_lr: Positive = 0.3, momentum: Decay = 0.9, beta2: Decay = 0.999
) -> Method:
    """FedOpt: the mean move, as a gradient, goes into an ordinary optimiser that lives on the server.

        g = w - sum_k p_k w_k,    w <- optimizer(w, g)
        p_k = n_k / sum_{j in S} n_j

    Args:
        optimizer: "sgd" (with momentum) or "adam" (torch's: bias correction, eps 1e-8).
        server_lr: its learning rate; 0.3 suits sgd, 3e-4 suits adam. sgd with 1 and momentum 0 is FedAvg bit for bit.
        momentum: sgd's momentum, adam's beta_1.
        beta2: adam's beta_2; sgd has no use for it.

    Tries: server_lr = 0.01, 0.03, 0.1, 0.3, 1.0; momentum = 0.0, 0.5, 0.9.
    Reveals: the trained model and the number of samples n_k.
    Differs from the paper: "adam" is the library optimiser that other papers run under this name, not FedAdam. Papers
        that use "sgd" choose server_lr between 0.01 and 0.3. With momentum 0.9, 0.1 comes to full speed after ten
        rounds, which short runs cannot wait for, so 0.3 is the default.
    Reference: Reddi et al., Adaptive Federated Optimization, ICLR 2021, Algorithm 1.
    """
    step = adam(server_lr, beta1=momentum, beta2=beta2) if optimizer == "adam" else sgd(server_lr, momentum=momentum)
    return Method(cross_entropy(), average(), (step,))
