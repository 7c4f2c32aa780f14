"""The methods against label skew in slow, obvious numpy, one sample and one class at a time, from their equations.

`z` and `teacher` are the logits of one sample, `counts` the client's label counts. Nothing is shared with fedstill.
"""

import math

import numpy as np
from numpy_methods import local_sgd, mean, shares

DISTILLING = ("kd", "fedntd", "fedntd_tf", "fedlmd", "fedlmd_tf")


def softmax_over(z, members, tau=1.0):
    """Probabilities (C,) of softmax(z / tau) over some classes, 0 elsewhere."""
    highest = max((z[i] for i in members), default=0.0)
    mass = {i: math.exp((z[i] - highest) / tau) for i in members}
    return [mass[i] / sum(mass.values()) if i in members else 0.0 for i in range(len(z))]


def majority(counts):
    """Y_k: the classes with n_k^y > n_k / C, in whole numbers."""
    return {i for i, count in enumerate(counts) if count * len(counts) > sum(counts)}


def distributions(method, z, teacher, y, counts, tau):
    """(p_student, p_teacher) of one sample; p_teacher is all 0 when no class is left to it."""
    everything = set(range(len(z)))
    if method == "kd":
        return softmax_over(z, everything, tau), softmax_over(teacher, everything, tau)
    student_classes = everything - {y}
    hidden = {y} | (majority(counts) if method.startswith("fedlmd") else set())
    teacher_classes = everything - hidden
    if method.endswith("_tf"):
        even = [1 / len(teacher_classes) if i in teacher_classes else 0.0 for i in everything]
        return softmax_over(z, student_classes, tau), even
    return softmax_over(z, student_classes, tau), softmax_over(teacher, teacher_classes, tau)


def distillation(method, z, teacher, y, counts, tau):
    """tau^2 KL(p_teacher || p_student) of one sample."""
    student, target = distributions(method, z, teacher, y, counts, tau)
    return tau**2 * sum(p * math.log(p / q) for p, q in zip(target, student, strict=True) if p > 0)


def distillation_gradient(method, z, teacher, y, counts, tau):
    """d/dz_i = tau (p_student(i) - p_teacher(i)); 0 when no class is left to the teacher."""
    student, target = distributions(method, z, teacher, y, counts, tau)
    return [tau * (q - p) if sum(target) else 0.0 for q, p in zip(student, target, strict=True)]


def scales(counts, alpha, rule):
    if rule == "binary":
        return [1.0 if count > 0 else alpha for count in counts]
    return [(1 - alpha) * count / max(counts) + alpha for count in counts]


def restricted(z, y, counts, alpha, rule="binary"):
    scaled = [scale * score for scale, score in zip(scales(counts, alpha, rule), z, strict=True)]
    return -math.log(softmax_over(scaled, range(len(z)))[y])


def restricted_gradient(z, y, counts, alpha, rule="binary"):
    by = scales(counts, alpha, rule)
    found = softmax_over([scale * score for scale, score in zip(by, z, strict=True)], range(len(z)))
    return [scale * (p - (i == y)) for i, (scale, p) in enumerate(zip(by, found, strict=True))]


def smoothed_target(classes, y, epsilon):
    return [(1 - epsilon) * (i == y) + epsilon / classes for i in range(classes)]


def smoothed(z, y, epsilon):
    found = softmax_over(z, range(len(z)))
    return -sum(t * math.log(p) for t, p in zip(smoothed_target(len(z), y, epsilon), found, strict=True))


def smoothed_gradient(z, y, epsilon):
    found = softmax_over(z, range(len(z)))
    return [p - t for p, t in zip(found, smoothed_target(len(z), y, epsilon), strict=True)]


def sample_gradient(method, z, teacher, y, counts, *, beta=1.0, tau=1.0, epsilon=0.1, alpha=0.5, rule="binary"):
    """d/dz of the whole local loss of one sample."""
    if method == "fedrs":
        return np.array(restricted_gradient(z, y, counts, alpha, rule))
    if method == "label_smoothing":
        return np.array(smoothed_gradient(z, y, epsilon))
    plain = np.array(smoothed_gradient(z, y, 0.0))
    return plain + beta * np.array(distillation_gradient(method, z, teacher, y, counts, tau))


def federated(method, W, clients, cohorts, *, lr, momentum, weighting="size", **options):
    """Rounds of the method on softmax regression without a bias; a client is (x, y, steps)."""
    for cohort in cohorts:
        models = []
        for k in cohort:
            x, y, steps = clients[k]
            counts = [int((y == i).sum()) for i in range(len(W))]

            def gradient(V, x=x, y=y, W=W, counts=counts):
                rows = [
                    np.outer(sample_gradient(method, V @ row, W @ row, int(label), counts, **options), row)
                    for row, label in zip(x, y, strict=True)
                ]
                return sum(rows) / len(y)

            models.append(local_sgd(W, gradient, steps, lr, momentum)[0])
        W = mean(shares(clients, cohort, weighting), models)
    return W
