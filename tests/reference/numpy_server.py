"""What a server makes of its teachers, in slow, obvious numpy: one sample, one class, one weight at a time.

Written from the equations of the papers. `logits[t][x][c]` is teacher t's score of class c for sample x, `q` the same
for probabilities. Nothing is shared with fedstill.
"""

import math


def softmax(z, sharpness=1.0):
    highest = max(z)
    mass = [math.exp(sharpness * (score - highest)) for score in z]
    return [m / sum(mass) for m in mass]


def averaged_logits(logits, share, temperature=1.0):
    """p(x) = softmax(sum_t w_t z_t(x) / temperature)."""
    teachers, samples, classes = range(len(logits)), range(len(logits[0])), range(len(logits[0][0]))
    pooled = [[sum(share[t] * logits[t][x][c] for t in teachers) for c in classes] for x in samples]
    return [softmax(row, 1 / temperature) for row in pooled]


def averaged_probabilities(logits, share, temperature=1.0):
    """p(x) = sum_t w_t softmax(z_t(x) / temperature)."""
    q = [[softmax(row, 1 / temperature) for row in teacher] for teacher in logits]
    return blended(q, [[w] * len(logits[0]) for w in share])


def standardised(logits, sharpness):
    """q_a(x) = softmax(sharpness f_a(x) / std_a), std_a over all scores of the teacher, n - 1 in the denominator."""
    found = []
    for teacher in logits:
        scores = [score for row in teacher for score in row]
        mean = sum(scores) / len(scores)
        spread = math.sqrt(sum((score - mean) ** 2 for score in scores) / (len(scores) - 1))
        found.append([softmax(row, sharpness / spread) for row in teacher])
    return found


def entropy(p):
    return -sum(mass * math.log(mass) for mass in p if mass > 0)


def confident_shares(q):
    """w_k(x) = exp(-e_k(x)) / sum_j exp(-e_j(x))."""
    shares = [[0.0] * len(q[0]) for _ in q]
    for x in range(len(q[0])):
        weights = [math.exp(-entropy(teacher[x])) for teacher in q]
        for t, weight in enumerate(weights):
            shares[t][x] = weight / sum(weights)
    return shares


def blended(q, shares):
    """sum_t w_t(x) q_t(x)."""
    teachers, samples, classes = range(len(q)), range(len(q[0])), range(len(q[0][0]))
    return [[sum(shares[t][x] * q[t][x][c] for t in teachers) for c in classes] for x in samples]


def trust(loss, classes):
    """u = .25 + .75 loss / ln C, at most 1."""
    return min(1.0, 0.25 + 0.75 * loss / math.log(classes))


def rectified(logits, sent, average, loss, sharpness=4.0):
    """u sum_k w_k q_k + (1 - u) / 2 (q_sent + q_average), all of them standardised."""
    q, (q_sent, q_average) = standardised(logits, sharpness), standardised([sent, average], sharpness)
    u = trust(loss, len(sent[0]))
    clients = blended(q, confident_shares(q))
    return [
        [u * a + (1 - u) / 2 * (b + c) for a, b, c in zip(*rows, strict=True)]
        for rows in zip(clients, q_sent, q_average, strict=True)
    ]


def cosine(a, b):
    lengths = math.sqrt(sum(v * v for v in a)) * math.sqrt(sum(v * v for v in b))
    return sum(v * w for v, w in zip(a, b, strict=True)) / lengths if lengths else 0.0


def clustered(q, features, sharpness):
    """v_c = sum_x q_c(x) h(x) / sum_x q_c(x); q(x) <- softmax_c(-sharpness (1 - cos(h(x), v_c))).

    A class of mass 1e-6 or less has no centre: probability 0.
    """
    samples, classes, width = range(len(q)), range(len(q[0])), range(len(features[0]))
    mass = [sum(q[x][c] for x in samples) for c in classes]
    there = [c for c in classes if mass[c] > 1e-6]
    centres = {c: [sum(q[x][c] * features[x][i] for x in samples) / mass[c] for i in width] for c in there}
    found = []
    for h in features:
        near = softmax([-(1 - cosine(h, centres[c])) for c in there], sharpness)
        found.append([near[there.index(c)] if c in there else 0.0 for c in classes])
    return found


def sharpened(p, temperature):
    powers = [mass ** (1 / temperature) for mass in p]
    return [power / sum(powers) for power in powers]


def maximum_rule(q, threshold):
    """(label, probability, kept) of every sample: the class of the surest teacher, the first of equals."""
    answers = []
    for x in range(len(q[0])):
        best, label = -1.0, None
        for teacher in q:
            for c, mass in enumerate(teacher[x]):
                if mass > best:
                    best, label = mass, c
        answers.append((label, best, best >= threshold))
    return answers


def mean_rule(q, threshold):
    means = blended(q, [[1 / len(q)] * len(q[0]) for _ in q])
    return [(row.index(max(row)), max(row), max(row) >= threshold) for row in means]


def gaussian_moments(models, share):
    """(mean, variance) of every weight: mu = sum_k p_k w_k, v = sum_k p_k (w_k - mu)^2."""
    mean = [sum(p * w for p, w in zip(share, column, strict=True)) for column in zip(*models, strict=True)]
    columns = zip(zip(*models, strict=True), mean, strict=True)
    return mean, [sum(p * (w - m) ** 2 for p, w in zip(share, column, strict=True)) for column, m in columns]


def direction_moments(models, start, scale):
    """(mean, standard deviation) of every weight of start + mean_k ||d_k|| (mean e_k + scale std e_k N(0, 1))."""
    moves = [[w - s for w, s in zip(model, start, strict=True)] for model in models]
    norms = [math.sqrt(sum(d * d for d in move)) for move in moves]
    directions = [[d / norm for d in move] for move, norm in zip(moves, norms, strict=True)]
    length, even = sum(norms) / len(norms), [1 / len(models)] * len(models)
    mean, variance = gaussian_moments(directions, even)
    centre = [s + length * m for s, m in zip(start, mean, strict=True)]
    return centre, [length * scale * math.sqrt(max(v, 1e-5)) for v in variance]


def dirichlet_moments(models, alpha):
    """(mean, variance) of sum_k g_k w_k, g ~ Dir(alpha 1), clients of one size.

    E g_k = 1 / C, Cov(g_j, g_k) = (delta_jk / C - 1 / C^2) / (C alpha + 1).
    """
    count = len(models)
    mean = [sum(column) / count for column in zip(*models, strict=True)]
    variance = []
    for column in zip(*models, strict=True):
        total = 0.0
        for j, a in enumerate(column):
            for k, b in enumerate(column):
                total += a * b * ((j == k) / count - 1 / count**2) / (count * alpha + 1)
        variance.append(total)
    return mean, variance
