"""FedAUX in slow, obvious numpy, from its equations: a net with one hidden layer, full-batch steps.

A net is (A, B): features h = tanh(A x), logits B h. A client is (x, y, steps). Nothing here is shared with fedstill.
"""

import math

import numpy as np
from numpy_methods import mean, shares, softmax

XI = 1e-8  # no score is 0


def features(net, x):
    return np.tanh(x @ net[0].T)


def logits(net, x):
    return features(net, x) @ net[1].T


def gradients(net, x, target, temperature=1.0):
    """Of mean KL(target || softmax(z / T)), or of cross-entropy with a target of 0 and 1: d/dz = (p - target) / T."""
    h, B = features(net, x), net[1]
    error = (softmax(h @ B.T / temperature) - target) / (temperature * len(x))
    return [(error @ B * (1.0 - h**2)).T @ x, error.T @ h]


def local_descent(net, client, lr):
    x, y, steps = client
    for _ in range(steps):
        net = [leaf - lr * slope for leaf, slope in zip(net, gradients(net, x, np.eye(len(net[1]))[y]), strict=True)]
    return net


def length(h):
    return math.sqrt(sum(value**2 for value in h))


def parting(own, negatives, *, lam, form, intercept):
    """Newton's method, down to a gradient of 1e-10, on

    (1/n or 1) sum_x ln(1 + exp(-t_x (<w, h_x> + b))) + lam / 2 ||w||^2, the last entry of the solution being b.
    """
    rows = np.array([[*h, 1.0] for h in own] + [[-value for value in h] + [-1.0] for h in negatives])
    ridge = np.full(rows.shape[1], lam)
    if intercept:
        ridge[-1] = 0.0
    else:
        rows[:, -1] = 0.0
    scale = 1.0 / len(rows) if form == "mean" else 1.0
    w = np.zeros(rows.shape[1])
    for _ in range(50):
        wrong = 1.0 / (1.0 + np.exp(rows @ w))
        slope = ridge * w - scale * rows.T @ wrong
        if np.linalg.norm(slope) < 1e-10:
            return w
        curvature = scale * sum(p * (1 - p) * np.outer(row, row) for p, row in zip(wrong, rows, strict=True))
        w = w - np.linalg.solve(curvature + np.diag(ridge), slope)
    raise ArithmeticError("not solved")


def client_scores(own, negatives, distilled, noise, *, lam, form, intercept, gamma, score, epsilon, delta):
    """s_i(x) on D_distill of one client; `noise` are standard normal numbers."""
    bound = max(length(h) for h in ([*negatives, *own] if gamma == "both" else negatives))

    def scaled(rows):  # by the bound; what is longer than the negatives' bound is cut to it
        return [h / (bound if gamma == "both" else max(bound, length(h))) for h in rows]

    *w, b = parting(scaled(own), scaled(negatives), lam=lam, form=form, intercept=intercept)
    if epsilon is not None:
        n = len(own) + len(negatives)
        w = np.array(w) + math.sqrt(8 * math.log(1.25 / delta)) / (epsilon * lam * n) * noise
    found = [1.0 / (1.0 + math.exp(-(np.dot(w, h) + b))) for h in scaled(distilled)]
    return np.array([s / (1.0 - s) if score == "odds" else s + XI for s in found])


def targets(teachers, trust, x, pool, temperature):
    """(M, K): sigma(sum_i s_i(x) f_i(x) / sum_i s_i(x)), sample by sample; or the same mean of probabilities."""
    said = [logits(net, x) / temperature for net in teachers]
    if pool == "probabilities":
        said = [softmax(z) for z in said]
    mixed = []
    for row in range(len(x)):
        total = sum(s[row] for s in trust)
        mixed.append(sum(s[row] * z[row] for s, z in zip(trust, said, strict=True)) / total)
    return np.array(mixed) if pool == "probabilities" else softmax(np.array(mixed))


def taught(net, x, target, memory, *, steps, optimizer, rate, cosine, clip, weight_decay, temperature):
    """Full-batch steps of SGD or Adam; `memory` is Adam's [step, means, squares], changed in place."""
    for step in range(steps):
        slopes = gradients(net, x, target, temperature)
        if clip is not None:
            slopes = [slope * min(1.0, clip / math.sqrt(sum((s**2).sum() for s in slopes))) for slope in slopes]
        slopes = [slope + weight_decay * leaf for slope, leaf in zip(slopes, net, strict=True)]
        now = rate * (0.5 * (1 + math.cos(math.pi * step / steps)) if cosine else 1.0)
        if optimizer == "adam":
            memory[0] += 1
            memory[1] = [0.9 * m + 0.1 * slope for m, slope in zip(memory[1], slopes, strict=True)]
            memory[2] = [0.999 * v + 0.001 * slope**2 for v, slope in zip(memory[2], slopes, strict=True)]
            means = [m / (1 - 0.9 ** memory[0]) for m in memory[1]]
            squares = [v / (1 - 0.999 ** memory[0]) for v in memory[2]]
            slopes = [m / (np.sqrt(v) + 1e-8) for m, v in zip(means, squares, strict=True)]
        net = [leaf - now * slope for leaf, slope in zip(net, slopes, strict=True)]
    return net


def fedaux(
    net, clients, cohorts, unlabeled, distilled, noise, *, lr, steps, server_lr, optimizer="adam",
    lr_schedule="cosine", clip=5.0, weight_decay=0.0, keep_optimizer=False, weighting="size", pool="logits",
    temperature=1.0, lam=0.01, form="sum", intercept=False, gamma="negatives", score="probability", epsilon=None,
    delta=1e-5,
):  # fmt: skip
    """-> (net, scores (N, M), targets of the last round); `distilled` marks D_distill among the unlabeled rows."""
    x = unlabeled[distilled]
    public, negatives = features(net, x), features(net, unlabeled[~distilled])
    table = np.array([
        client_scores(
            features(net, own), negatives, public, noise[k], lam=lam, form=form, intercept=intercept, gamma=gamma,
            score=score, epsilon=epsilon, delta=delta,
        )
        for k, (own, _, _) in enumerate(clients)
    ])  # fmt: skip
    memory = None
    for cohort in cohorts:
        models = [local_descent(net, clients[k], lr) for k in cohort]
        p = shares(clients, cohort, weighting)
        net = [mean(p, leaves) for leaves in zip(*models, strict=True)]
        target = targets(models, table[cohort], x, pool, temperature)
        if memory is None or not keep_optimizer:
            memory = [0, [np.zeros_like(leaf) for leaf in net], [np.zeros_like(leaf) for leaf in net]]
        net = taught(
            net, x, target, memory, steps=steps, optimizer=optimizer, rate=server_lr, cosine=lr_schedule == "cosine",
            clip=clip, weight_decay=weight_decay, temperature=temperature,
        )  # fmt: skip
    return net, table, target
