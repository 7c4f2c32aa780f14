"""The methods in slow, obvious numpy, from their equations: softmax regression, full-batch gradient descent.

A client is (x, y, steps); a model is one matrix W (K, F) with logits x W^T. Nothing here is shared with fedstill.
"""

import numpy as np


def softmax(z):
    exponentials = np.exp(z - z.max(axis=-1, keepdims=True))
    return exponentials / exponentials.sum(axis=-1, keepdims=True)


def ce_gradient(W, x, y):
    error = softmax(x @ W.T)
    error[np.arange(len(y)), y] -= 1.0
    return error.T @ x / len(y)


def ntd_gradient(W, W_teacher, x, y, tau):
    """d/dz_i of tau^2 KL over classes i != y is tau (p_student(i) - p_teacher(i)), sample by sample."""
    total = np.zeros_like(W)
    for row, label in zip(x, y, strict=True):
        others = [i for i in range(len(W)) if i != label]
        student = softmax(W[others] @ row / tau)
        teacher = softmax(W_teacher[others] @ row / tau)
        total[others] += tau * np.outer(student - teacher, row)
    return total / len(y)


def local_sgd(W, gradient, steps, lr, momentum):
    """-> (W, sum of lr b_s)."""
    velocity, b, travel = np.zeros_like(W), 0.0, 0.0
    for _ in range(steps):
        velocity = momentum * velocity + gradient(W)
        W = W - lr * velocity
        b = momentum * b + 1.0
        travel += lr * b
    return W, travel


def shares(clients, cohort, weighting):
    sizes = np.array([len(clients[k][1]) for k in cohort], dtype=float)
    return sizes / sizes.sum() if weighting == "size" else np.full(len(cohort), 1 / len(cohort))


def mean(weights, arrays):
    return sum(p * a for p, a in zip(weights, arrays, strict=True))


def fedavg(W, clients, cohorts, *, lr, momentum, weighting="size", mu=0.0, beta=0.0, tau=1.0, server=None):
    """FedAvg, FedProx (mu), FedNTD (beta, tau); `server(W, W_mean)` turns the average into the next model."""
    for cohort in cohorts:
        models = []
        for k in cohort:
            x, y, steps = clients[k]

            def gradient(V, x=x, y=y, W=W):
                return ce_gradient(V, x, y) + mu * (V - W) + beta * ntd_gradient(V, W, x, y, tau)

            models.append(local_sgd(W, gradient, steps, lr, momentum)[0])
        averaged = mean(shares(clients, cohort, weighting), models)
        W = averaged if server is None else server(W, averaged, models)
    return W


def server_momentum(beta, server_lr):
    state = {"v": 0.0}

    def step(W, averaged, models):
        state["v"] = beta * state["v"] + (W - averaged)
        return W - server_lr * state["v"]

    return step


def server_adaptive(rule, server_lr, beta1, beta2, tau):
    state = {"m": 0.0, "v": tau**2}

    def step(W, averaged, models):
        delta = averaged - W
        state["m"] = beta1 * state["m"] + (1 - beta1) * delta
        v = state["v"]
        state["v"] = {
            "adagrad": v + delta**2,
            "yogi": v - (1 - beta2) * delta**2 * np.sign(v - delta**2),
            "adam": beta2 * v + (1 - beta2) * delta**2,
        }[rule]
        return W + server_lr * state["m"] / (np.sqrt(state["v"]) + tau)

    return step


def server_distillation(unlabeled, steps, server_lr, pool, temperature):
    """Plain gradient descent on mean KL(pooled teachers || student), d/dz = (student - target) / T."""

    def step(W, averaged, models):
        logits = [unlabeled @ model.T / temperature for model in models]
        if pool == "logits":
            target = softmax(sum(logits) / len(logits))
        else:
            target = sum(softmax(z) for z in logits) / len(logits)
        student = averaged
        for _ in range(steps):
            error = softmax(unlabeled @ student.T / temperature) - target
            student = student - server_lr * error.T @ unlabeled / (temperature * len(unlabeled))
        return student

    return step


def descent(student, unlabeled, target, steps, server_lr):
    """The iterates of gradient descent on mean KL(target || student)."""
    path = []
    for _ in range(steps):
        error = softmax(unlabeled @ student.T) - target
        student = student - server_lr * error.T @ unlabeled / len(unlabeled)
        path.append(student)
    return path


def server_hard_labels(unlabeled, steps, server_lr, rule, threshold):
    """Cross-entropy with the class of the surest teacher, or of their mean, where that is sure enough."""

    def step(W, averaged, models):
        said = np.stack([softmax(unlabeled @ model.T) for model in models])
        labels, kept = [], []
        for x in range(len(unlabeled)):
            opinion = said[:, x].mean(axis=0) if rule == "mean" else said[said[:, x].max(axis=1).argmax(), x]
            labels.append(np.eye(len(W))[opinion.argmax()])
            kept.append(opinion.max() >= threshold)
        if not any(kept):
            return averaged
        return descent(averaged, unlabeled[kept], np.array(labels)[kept], steps, server_lr)[-1]

    return step


def server_ensemble(unlabeled, steps, server_lr, sharpen, after, every):
    """FedBE without drawn models: average and clients teach, sharpened; the mean of snapshots after a step."""

    def step(W, averaged, models):
        said = sum(softmax(unlabeled @ model.T) for model in [averaged, *models]) / (1 + len(models))
        target = said ** (1 / sharpen)
        path = descent(averaged, unlabeled, target / target.sum(axis=1, keepdims=True), steps, server_lr)
        snapshots = [path[s - 1] for s in range(1, steps + 1) if s > after and s % every == 0]
        return sum(snapshots) / len(snapshots)

    return step


def scaffold(W, clients, cohorts, *, lr, momentum, option, global_lr, weighting="uniform", control_weighting=None):
    c, own = np.zeros_like(W), [np.zeros_like(W) for _ in clients]
    for cohort in cohorts:
        moves, changes = [], []
        for k in cohort:
            x, y, steps = clients[k]

            def corrected(V, x=x, y=y, c=c, c_k=own[k]):
                return ce_gradient(V, x, y) + c - c_k

            W_k, travel = local_sgd(W, corrected, steps, lr, momentum)
            renewed = ce_gradient(W, x, y) if option == "I" else own[k] - c + (W - W_k) / travel
            moves.append(W_k - W)
            changes.append(renewed - own[k])
            own[k] = renewed
        p = shares(clients, cohort, weighting)
        W = W + global_lr * mean(p, moves)
        q = shares(clients, cohort, control_weighting or weighting)
        c = c + len(cohort) / len(clients) * mean(q, changes)
    return W


def fednova(W, clients, cohorts, *, lr, momentum, weighting="size"):
    for cohort in cohorts:
        directions, lengths = [], []
        for k in cohort:
            x, y, steps = clients[k]
            W_k, travel = local_sgd(W, lambda V, x=x, y=y: ce_gradient(V, x, y), steps, lr, momentum)
            lengths.append(travel / lr)
            directions.append((W - W_k) / lengths[-1])
        p = shares(clients, cohort, weighting)
        W = W - mean(p, lengths) * mean(p, directions)
    return W


def feddyn(W, clients, cohorts, *, lr, momentum, alpha, weighting="uniform"):
    h, own = np.zeros_like(W), [np.zeros_like(W) for _ in clients]
    for cohort in cohorts:
        models = []
        for k in cohort:
            x, y, steps = clients[k]

            def bent(V, x=x, y=y, W=W, g=own[k]):
                return ce_gradient(V, x, y) - g + alpha * (V - W)

            models.append(local_sgd(W, bent, steps, lr, momentum)[0])
            own[k] = own[k] - alpha * (models[-1] - W)
        p = shares(clients, cohort, weighting)
        h = h - alpha * len(cohort) / len(clients) * mean(p, [model - W for model in models])
        W = mean(p, models) - h / alpha
    return W


def dp_fedavg(W, clients, cohorts, *, lr, momentum, clip, noise_multiplier, noise, expected=None):
    """McMahan et al. 2018, Algorithm 1 with FlatClip and clients that count alike. -> (W, lengths of the moves).

    noise[t]: standard normal matrices of round t. A trusted server adds the first of them to the sum, which it divides
    by the `expected` size of a cohort; without one each client adds its own, and those who came are averaged.
    """
    lengths = []
    for cohort, drawn in zip(cohorts, noise, strict=False):
        bounded = []
        for k in cohort:
            x, y, steps = clients[k]
            move = local_sgd(W, lambda V, x=x, y=y: ce_gradient(V, x, y), steps, lr, momentum)[0] - W
            lengths.append(np.sqrt((move**2).sum()))
            bounded.append(move * min(1.0, clip / lengths[-1]))
        if expected is not None:
            W = W + (sum(bounded) + noise_multiplier * clip * drawn[0]) / expected
        else:
            noisy = [move + noise_multiplier * clip * own for move, own in zip(bounded, drawn, strict=False)]
            W = W + sum(noisy) / len(noisy)
    return W, lengths
