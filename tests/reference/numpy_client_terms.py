"""MOON, FedMMD and FedCurv in slow, obvious numpy: as numpy_methods, with the logits as features.

Nothing here is shared with fedstill. FedCurv stores every client's pair, as its paper does.
"""

import numpy as np
from numpy_methods import ce_gradient, local_sgd, mean, shares


def cosine(a, b):
    return a @ b / (np.linalg.norm(a) * np.linalg.norm(b))


def cosine_slope(z, other):
    """d cos(z, other) / dz."""
    length = np.linalg.norm(z)
    return other / (length * np.linalg.norm(other)) - cosine(z, other) * z / length**2


def contrast(z, positive, negative, temperature):
    near, far = np.exp(cosine(z, positive) / temperature), np.exp(cosine(z, negative) / temperature)
    return -np.log(near / (near + far))


def contrast_gradient(V, W_global, W_previous, x, temperature):
    """d/dz of -log(near / (near + far)) is share of far / T times (slope to far - slope to near)."""
    total = np.zeros_like(V)
    for row in x:
        z, near, far = V @ row, W_global @ row, W_previous @ row
        share = 1.0 - np.exp(-contrast(z, near, far, temperature))
        total += np.outer(share / temperature * (cosine_slope(z, far) - cosine_slope(z, near)), row)
    return total / len(x)


def moon(W, clients, cohorts, *, lr, momentum, mu, temperature, previous):
    first, last = W, {}
    for cohort in cohorts:
        models = []
        for k in cohort:
            x, y, steps = clients[k]
            stand_in = {"skip": None, "init": first, "start": W}[previous]
            W_previous = last.get(k, stand_in)

            def gradient(V, x=x, y=y, W=W, W_previous=W_previous):
                plain = ce_gradient(V, x, y)
                return plain if W_previous is None else plain + mu * contrast_gradient(V, W, W_previous, x, temperature)

            models.append(local_sgd(W, gradient, steps, lr, momentum)[0])
            last[k] = models[-1]
        W = mean(shares(clients, cohort, "size"), models)
    return W


def kernel_sum(squared, sigma, slope=False):
    """sum_b exp(-D / bandwidth_b) over the bandwidths sigma / 4 {1, 2, 4, 8, 16}, or its derivative by D."""
    total = 0.0
    for factor in (1, 2, 4, 8, 16):
        bandwidth = sigma / 4 * factor
        total += np.exp(-squared / bandwidth) * (-1.0 / bandwidth if slope else 1.0)
    return total


def mean_squared_distance(h, r):
    rows = np.concatenate([h, r])
    total = sum(np.sum((a - b) ** 2) for a in rows for b in rows)
    return total / (len(rows) ** 2 - len(rows)) + 1e-8


def discrepancy(h, r):
    sigma, total = mean_squared_distance(h, r), 0.0
    for i in range(len(h)):
        for j in range(len(h)):
            for a, b, sign in ((h, h, 1), (r, r, 1), (h, r, -1), (r, h, -1)):
                total += sign * kernel_sum(np.sum((a[i] - b[j]) ** 2), sigma)
    return total / len(h) ** 2


def discrepancy_slope(h, r):
    """d MMD^2 / dh with sigma held fixed."""
    sigma, slope = mean_squared_distance(h, r), np.zeros_like(h)
    for i in range(len(h)):
        for j in range(len(h)):
            slope[i] += 4 * kernel_sum(np.sum((h[i] - h[j]) ** 2), sigma, slope=True) * (h[i] - h[j])
            slope[i] -= 4 * kernel_sum(np.sum((h[i] - r[j]) ** 2), sigma, slope=True) * (h[i] - r[j])
    return slope / len(h) ** 2


def fedmmd(W, clients, cohorts, *, lr, momentum, lam):
    for cohort in cohorts:
        models = []
        for k in cohort:
            x, y, steps = clients[k]

            def gradient(V, x=x, y=y, W=W):
                return ce_gradient(V, x, y) + lam * discrepancy_slope(x @ V.T, x @ W.T).T @ x

            models.append(local_sgd(W, gradient, steps, lr, momentum)[0])
        W = mean(shares(clients, cohort, "size"), models)
    return W


def fisher_diagonal(W, x, y, fisher):
    if fisher == "per_batch":
        return ce_gradient(W, x, y) ** 2
    return sum(ce_gradient(W, x[i : i + 1], y[i : i + 1]) ** 2 for i in range(len(y))) / len(y)


def fedcurv(W, clients, cohorts, *, lr, momentum, lam, fisher):
    """gradient of lam sum_{j != k} (V - W_j)' diag(u_j) (V - W_j), the pairs as they were when the round began."""
    stored = {}
    for cohort in cohorts:
        models, renewed = [], {}
        for k in cohort:
            x, y, steps = clients[k]
            others = [pair for j, pair in stored.items() if j != k]

            def gradient(V, x=x, y=y, others=others):
                return ce_gradient(V, x, y) + 2 * lam * sum(u * (V - W_j) for W_j, u in others)

            models.append(local_sgd(W, gradient, steps, lr, momentum)[0])
            renewed[k] = models[-1], fisher_diagonal(models[-1], x, y, fisher)
        stored.update(renewed)
        W = mean(shares(clients, cohort, "size"), models)
    return W


def released_fednova(W, clients, cohorts, *, lr, momentum):
    """FedNova whose clients descend their gradient minus their own last mean move."""
    own = [np.zeros_like(W) for _ in clients]
    for cohort in cohorts:
        directions, lengths = [], []
        for k in cohort:
            x, y, steps = clients[k]
            W_k, travel = local_sgd(W, lambda V, x=x, y=y, d=own[k]: ce_gradient(V, x, y) - d, steps, lr, momentum)
            own[k] = (W - W_k) / travel
            lengths.append(travel / lr)
            directions.append((W - W_k) / lengths[-1])
        p = shares(clients, cohort, "size")
        W = W - mean(p, lengths) * mean(p, directions)
    return W
