"""FedFTG's server phase, written slowly from the card's equations: sample by sample, client by client.

Networks are written out (dense layers, ReLU, BatchNorm), parameters are plain dicts, torch gives only arithmetic,
gradients and the two optimisers. Independent of fedstill.
"""

from __future__ import annotations

import torch

EPS, MOMENTUM = 1e-5, 0.1  # of torch's BatchNorm


def batch_norm(x, buffers, at, training, gamma=None, beta=None):
    """-> normalised x; in training the running statistics in `buffers` move."""
    mean, var = buffers[f"{at}.running_mean"], buffers[f"{at}.running_var"]
    if training:
        rows = len(x)
        used_mean = sum(x[i] for i in range(rows)) / rows
        used_var = sum((x[i] - used_mean) ** 2 for i in range(rows)) / rows
        buffers[f"{at}.running_mean"] = (1 - MOMENTUM) * mean + MOMENTUM * used_mean.detach()
        buffers[f"{at}.running_var"] = (1 - MOMENTUM) * var + MOMENTUM * used_var.detach() * rows / (rows - 1)
        if f"{at}.num_batches_tracked" in buffers:
            buffers[f"{at}.num_batches_tracked"] = buffers[f"{at}.num_batches_tracked"] + 1
        mean, var = used_mean, used_var
    out = (x - mean) / (var + EPS) ** 0.5
    return out if gamma is None else out * gamma + beta


def relu(x):
    return torch.where(x > 0, x, torch.zeros_like(x))


def classifier(net, params, buffers, x, training):
    """The two small networks of tests/support/server_rounds.py."""
    if net == "mlp":
        hidden = relu(x @ params["encoder.1.weight"].T + params["encoder.1.bias"])
    else:
        hidden = x @ params["body.0.weight"].T
        hidden = relu(batch_norm(hidden, buffers, "body.1", training, params["body.1.weight"], params["body.1.bias"]))
    return hidden @ params["head.weight"].T + params["head.bias"]


def table_generator(params, buffers, z, y, classes, training):
    """Dense, BatchNorm, ReLU, dense, BatchNorm without parameters."""
    asked = torch.stack([torch.cat([z[i], torch.eye(classes, dtype=z.dtype)[int(y[i])]]) for i in range(len(y))])
    hidden = asked @ params["0.weight"].T + params["0.bias"]
    hidden = relu(batch_norm(hidden, buffers, "1", training, params["1.weight"], params["1.bias"]))
    return batch_norm(hidden @ params["3.weight"].T + params["3.bias"], buffers, "4", training)


def kl(p, q):
    return sum(p[c] * (torch.log(p[c]) - torch.log(q[c])) for c in range(len(p)))


def far(kind, s, t):
    """Between the logits of student and teacher on one sample."""
    classes = len(s)
    p, q = torch.exp(s) / torch.exp(s).sum(), torch.exp(t) / torch.exp(t).sum()
    if kind == "l1":
        return sum(abs(s[c] - t[c]) for c in range(classes)) / classes
    if kind == "mse":
        return sum((s[c] - t[c]) ** 2 for c in range(classes)) / classes
    return kl(q, p) if kind == "forward_kl" else kl(p, q)


def alike(z, x):
    """exp(-mean_ij mean_squared(z_i, z_j) mean_absolute(x_i, x_j))."""
    rows = len(z)
    total = 0.0
    for i in range(rows):
        for j in range(rows):
            total = total + ((z[i] - z[j]) ** 2).mean() * (x[i] - x[j]).abs().mean()
    return torch.exp(-total / rows**2)


def generator_loss(rules, alpha, among, s, said, x, z, y):
    """Of the clients `among`; said[k] are the logits of client k's model."""
    rows, total = len(y), rules["lam_dis"] * len(among) / len(alpha) * alike(z, x)
    for k in among:
        hard, named, share = 0.0, 0.0, 0.0
        wrong = 0.0
        for i in range(rows):
            a, cls = alpha[k][int(y[i])], int(y[i])
            t = said[k][i].detach() if rules["through"] == "student" else said[k][i]
            if rules["sought"] != "none":
                hard = hard + a * far(rules["sought"], s[i], t)
            entropy = torch.logsumexp(said[k][i], 0) - said[k][i][cls]
            named, wrong, share = named + a * entropy, wrong + entropy, share + a
        cls_loss = named / rows if rules["cls"] == "sample" else (wrong / rows) * (share / rows)
        total = total - hard / rows + rules["lam_cls"] * cls_loss
    return total


def student_loss(rules, alpha, s, said, y):
    total = 0.0
    for i in range(len(y)):
        for k in range(len(alpha)):
            total = total + alpha[k][int(y[i])] * far(rules["learnt"], s[i], said[k][i])
    scale = len(s[0]) if rules["per_class"] and rules["learnt"] != "mse" else 1
    return total / len(y) / scale


def phase(rules, net, student, teachers, generator, counts, noise, labels):
    """One whole server phase; student, generator and each teacher are (params, buffers). -> student, generator."""
    classes, cohort = len(counts[0]), len(teachers)
    totals = [sum(row[c] for row in counts) for c in range(classes)]
    alpha = [[row[c] / (totals[c] + 1e-6) for c in range(classes)] for row in counts]
    w = {name: leaf.clone().requires_grad_() for name, leaf in student[0].items()}
    theta = {name: leaf.clone().requires_grad_() for name, leaf in generator[0].items()}
    w_buffers, g_buffers = dict(student[1]), dict(generator[1])
    sgd = torch.optim.SGD(w.values(), lr=rules["server_lr"], weight_decay=rules["weight_decay"])
    adam = torch.optim.Adam(theta.values(), lr=rules["generator_lr"])

    def teacher_says(k, x):
        return classifier(net, teachers[k][0], dict(teachers[k][1]), x, False)

    for z, y in zip(noise, labels, strict=True):
        for _ in range(rules["generator_steps"]):
            for among in [[k] for k in range(cohort)] if rules["each"] else [list(range(cohort))]:
                x = table_generator(theta, g_buffers, z, y, classes, True)
                s = classifier(net, {n: p.detach() for n, p in w.items()}, dict(w_buffers), x, False)
                said = {k: teacher_says(k, x) for k in among}
                adam.zero_grad()
                generator_loss(rules, alpha, among, s, said, x, z, y).backward()
                adam.step()
        x = table_generator(theta, dict(g_buffers), z, y, classes, False).detach()
        said = [teacher_says(k, x).detach() for k in range(cohort)]
        for _ in range(rules["student_steps"]):
            sgd.zero_grad()
            logits = classifier(net, w, w_buffers, x, rules["training"])
            student_loss(rules, alpha, logits, said, y).backward()
            sgd.step()
    found = [{name: leaf.detach() for name, leaf in own.items()} for own in (w, theta)]
    return (found[0], w_buffers), (found[1], g_buffers)
