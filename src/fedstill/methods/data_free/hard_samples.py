"""Fine-tuning on hard samples: a generator looks for inputs on which the candidate and the clients' models differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fedstill.compose.head_only import head_of
from fedstill.core.errors import FedstillError
from fedstill.core.seeds import seed_for, to_signed
from fedstill.core.setup import Preparation, no_preparation
from fedstill.core.trainer import Fitted
from fedstill.core.tree import full_precision, leaves, tree_map
from fedstill.core.types import (
    Model,
    Need,
    Outlook,
    Params,
    Player,
    Round,
    Scene,
    Seed,
    ServerStep,
    Training,
    Tree,
    Weights,
    no_objection,
)
from fedstill.methods.data_free.inventing import (
    WORDS,
    GeneratorFor,
    asked_for,
    check_fit,
    diversity,
    gaussian_noise,
    generator_of,
    invent,
    invent_many,
    prepared_generator,
    quota_labels,
    refuse_text_and_heads,
    shown_samples,
    teacher_shares,
    wanted_classes,
    with_samples,
)
from fedstill.server.distill.targets import mix

Clients = Literal["each", "joint"]
Discrepancy = Literal["l1", "kl", "mse", "none"]
Through = Literal["student", "both"]
StudentLoss = Literal["forward_kl", "reverse_kl", "mse"]
Scale = Literal["class", "batch"]
Labels = Literal["quota", "uniform"]
Ensemble = Literal["class", "uniform"]
BatchNorm = Literal["train", "frozen", "restore", "reestimate"]
Level = Literal["sample", "feature"]
SOUGHT: dict[Discrepancy, Distance] = {"l1": "l1", "kl": "reverse_kl", "mse": "mse"}
SLOT = "hard_generator"  # not "generator": another method's, beside it or in the phase before, is its own
RIGHT = "hard samples: right, of all"  # sums over the student's steps that travel with its buffers


@dataclass(frozen=True, kw_only=True)
class Contest:
    """How hard samples are sought and learnt; see `fedftg` for what each field means.

    Rates are those of round 1 and are multiplied by lr_decay after each round.
    """

    iterations: int = 10
    generator_steps: int = 1
    student_steps: int = 5
    batch_size: int = 50
    noise: int = 100
    lam_cls: float = 1.0
    lam_dis: float = 1.0
    server_lr: float = 0.1
    generator_lr: float = 0.01
    lr_decay: float = 0.998
    weight_decay: float = 1e-3
    clients: Clients = "joint"
    discrepancy: Discrepancy = "l1"
    discrepancy_through: Through = "student"
    cls_weights: ClassWeights = "sample"
    student_loss: StudentLoss = "forward_kl"
    student_scale: Scale = "class"
    labels: Labels = "quota"
    ensemble: Ensemble = "class"
    batch_norm: BatchNorm = "train"
    input: Level = "sample"

    @property
    def counts(self) -> bool:
        """Whether label counts are looked at."""
        return self.labels == "quota" or self.ensemble == "class"

    @property
    def needs(self) -> frozenset[Need]:
        if not self.iterations:
            return frozenset()
        needs = {Need.INDIVIDUAL_UPLOADS, Need.ONE_ARCHITECTURE}
        needs |= {Need.LABEL_COUNTS_UPLOADED} if self.counts else set()
        return frozenset(needs | ({Need.HEAD} if self.input == "feature" else set()))


class Net(NamedTuple):
    """The part of a network that invented samples go through: all of it, or its last layer."""

    shape: tuple[int, ...]  # of what it reads
    one: Callable[[Weights, Tensor, bool, Tensor | None], tuple[Tensor, Params]]  # (weights, x, training, seed)
    many: Callable[[Scene, Weights, Tensor], Tensor]  # stacked weights -> (T, B, K) in eval mode
    part: Callable[[Weights], Weights]  # what of a model, or of stacked ones, it is


Loss = Callable[[Weights, Scene], tuple[Tensor, Params]]


class Roles(NamedTuple):
    """What the two players do with one model: made once, because the engine keeps what it captured of them."""

    hunt: Loss
    learn: Loss
    look: Callable[[Scene], Tree]


def hard_samples(generator: GeneratorFor, contest: Contest) -> ServerStep:
    """The candidate learns from all clients' models on samples that a generator finds where it differs from them.

        a_k(y) = n_k^y / n^y,   p(y) = n^y / n,   for i = 1..I:  y ~ p (B of them),  z ~ N(0, 1)
        theta <- Adam on sum_k (-md_k + lam_cls cls_k) + lam_dis div, I_g times,  x = G(z, y; theta)
                 (or on -md_k + lam_cls cls_k + (lam_dis / |S|) div, I_g times for each client k in turn)
        w <- SGD on sum_k a_k(y) KL(softmax t_k(x) || softmax s(x; w)) / K, I_d times,  x = G(z, y; theta)

    Teachers answer in eval mode, the student too while the generator moves; x and the teachers' answers are worked
    out once for the student's I_d steps. One upload teaches alone. Without any label count in the cohort every class
    is as likely and every client counts alike. Zero iterations leave the candidate as it is.
    State: "hard_generator", which lives on from round to round.
    Reports: generator_loss and student_loss (means over their steps), samples_right: the share of invented samples
    whose class the ensemble names, among those of classes that somebody holds.
    """
    roles = lru_cache(maxsize=4)(lambda model: _roles(contest, generator(model), model))

    def apply(candidate: Weights, state: Tree, round: Round) -> tuple[Weights, Tree]:
        round = with_samples(round)
        if not contest.iterations or not len(round.uploads.ids):
            return candidate, state
        net, like = _net(contest, round.model), next(leaves(candidate))
        given, seed = _teaching(contest, net, round), seed_for(round.seed, "hard samples")
        drawn = _drawn(contest, wanted_classes(round, quota=contest.labels == "quota"), like, seed)
        pupil = net.part(candidate)
        tallied = pupil._replace(buffers={**pupil.buffers, RIGHT: like.new_zeros(2)})
        found = round.trainer.take_turns(
            _players(contest, roles(round.model), round.number, len(given["share"])),
            {"generator": generator_of(state, SLOT), "student": tallied}, drawn, given, seed,
        )  # fmt: skip
        moved, now = found["student"].weights, found["generator"].weights
        learnt = Weights({**candidate.params, **moved.params}, _network(moved).buffers)
        if contest.input == "feature" or contest.batch_norm == "restore":
            learnt = learnt._replace(buffers=candidate.buffers)
        elif contest.batch_norm == "reestimate":
            z, y, made = drawn["z"].flatten(0, 1), drawn["y"].flatten(), generator(round.model)
            x = invent_many(made, now, round.model.classes, z=z, y=y, shape=net.shape)
            learnt = learnt._replace(buffers=fresh_statistics(round.model, learnt, x, round.seed))
        _report(contest, round, candidate, found)
        state = {**state, SLOT: now._asdict()}
        if contest.input == "sample":
            state["samples"] = shown_samples(generator(round.model), now, round.model, contest.noise)
        return learnt, state

    return ServerStep(
        "hard_samples",
        apply,
        init=lambda _: {SLOT: {}},
        needs=contest.needs,
        prepare=_preparing(generator, contest) if contest.iterations else no_preparation,
        check=_checking(generator, contest) if contest.iterations else no_objection,
    )


def _report(contest: Contest, round: Round, candidate: Weights, found: Mapping[str, Fitted]) -> None:
    round.metrics["generator_loss"] = float(found["generator"].loss)
    round.metrics["student_loss"] = float(found["student"].loss)
    right, asked = found["student"].weights.buffers[RIGHT].tolist()
    if asked:
        round.metrics["samples_right"] = right / asked
    round.models.setdefault("aggregated", candidate)


def _players(contest: Contest, roles: Roles, number: int, teachers: int) -> dict[str, Player]:
    decay = contest.lr_decay ** (number - 1)
    turn = contest.generator_steps * (teachers if contest.clients == "each" else 1)
    size = contest.batch_size
    hunter = Training(steps=turn, batch_size=size, optimizer="adam", lr=contest.generator_lr * decay)
    pupil = Training(
        steps=contest.student_steps, batch_size=size, lr=contest.server_lr * decay, weight_decay=contest.weight_decay
    )
    return {"generator": Player(roles.hunt, hunter), "student": Player(roles.learn, pupil, roles.look)}


def _roles(contest: Contest, generator: Model, model: Model) -> Roles:
    net = _net(contest, model)
    return Roles(_hunt(contest, generator, net, model), _learn(contest, net), _look(generator, net, model))


def _hunt(contest: Contest, generator: Model, net: Net, model: Model) -> Loss:
    """-md + lam_cls cls + lam_dis div, of one client's model (the step says whose) or of all together."""

    def loss(own: Weights, scene: Scene) -> tuple[Tensor, Params]:
        z, y = scene.drawn["z"], scene.drawn["y"]
        teachers, share = scene.given["teachers"], scene.given["share"]
        cohort = len(share)
        if contest.clients == "each":
            whose = (scene.step % cohort).reshape(1)
            teachers, share = tree_map(lambda leaf: leaf.index_select(0, whose), (teachers, share))
        output, buffers = generator.apply(own, asked_for(z, y, model.classes), training=True, seed=scene.seed)
        x, weight = output.logits.reshape(-1, *net.shape), share.index_select(1, y)
        said = net.many(scene, teachers, x)
        total = x.new_zeros(())
        if contest.lam_dis:
            total = contest.lam_dis * len(share) / cohort * diversity(full_precision(x), full_precision(z))
        if contest.lam_cls:
            total = total + contest.lam_cls * recognition(said, y, weight, contest.cls_weights)
        if contest.discrepancy != "none":
            mine = net.one(_network(scene.weights["student"]), x, False, None)[0]
            theirs = said.detach() if contest.discrepancy_through == "student" else said
            total = total - discrepancy(SOUGHT[contest.discrepancy], mine, theirs, weight)
        return total, buffers

    return loss


def _look(generator: Model, net: Net, model: Model) -> Callable[[Scene], Tree]:
    """All that stays the same while the student learns: samples, what teachers say, how much each of them counts."""

    def look(scene: Scene) -> Tree:
        z, y = scene.drawn["z"], scene.drawn["y"]
        x = invent(generator, scene.weights["generator"], model.classes, z=z, y=y, shape=net.shape)
        said, weight = net.many(scene, scene.given["teachers"], x), scene.given["share"].index_select(1, y)
        asked = scene.given["held"].index_select(0, y)
        right = torch.stack([asked * (ensemble_names(said, weight) == y), asked]).sum(1)
        return {"x": x, "said": said, "weight": weight, "right": right}

    return look


def _learn(contest: Contest, net: Net) -> Loss:
    def loss(own: Weights, scene: Scene) -> tuple[Tensor, Params]:
        seen = scene.seen
        logits, buffers = net.one(_network(own), seen["x"], contest.batch_norm != "frozen", scene.seed)
        per_class = contest.student_scale == "class"
        found = lesson_loss(contest.student_loss, logits, seen["said"], seen["weight"], per_class=per_class)
        return found, {**buffers, RIGHT: own.buffers[RIGHT] + seen["right"]}

    return loss


def _network(student: Weights) -> Weights:
    return student._replace(buffers={name: leaf for name, leaf in student.buffers.items() if name != RIGHT})


def _net(contest: Contest, model: Model) -> Net:
    return _last_layer(model) if contest.input == "feature" else _whole_network(model)


def _whole_network(model: Model) -> Net:
    def one(weights: Weights, x: Tensor, training: bool, seed: Tensor | None) -> tuple[Tensor, Params]:
        output, buffers = model.apply(weights, x, training=training, seed=seed)
        return output.logits, buffers

    def many(scene: Scene, teachers: Weights, x: Tensor) -> Tensor:
        return scene.each(teachers, x).logits

    return Net(model.input_shape, one, many, lambda weights: weights)


def _last_layer(model: Model) -> Net:
    head = model.head
    assert head is not None, "the step declares Need.HEAD"

    def many(scene: Scene, teachers: Weights, x: Tensor) -> Tensor:
        said: Tensor = torch.func.vmap(lambda params: head(params, x))(teachers.params)
        return said

    return Net(
        (model.feature_size,),
        lambda weights, x, training, seed: (head(weights.params, x), weights.buffers),
        many,
        lambda weights: head_of(weights, model.head_names),
    )


def _teaching(contest: Contest, net: Net, round: Round) -> Tree:
    """The teachers, how much each counts for a class (T, K), and 1 for classes that somebody holds (K,)."""
    share = teacher_shares(round, by_class=contest.ensemble == "class")
    held = wanted_classes(round, quota=contest.counts) > 0
    held = (held | ~held.any()).to(share)  # without any count nobody knows
    return {"teachers": net.part(round.uploads.weights), "share": share, "held": held}


def _drawn(contest: Contest, wanted: Tensor, like: Tensor, seed: Seed) -> Tree:
    """A row for each iteration: z (B, d) and the classes y (B,), in the wanted proportions over all iterations."""
    iterations, batch = contest.iterations, contest.batch_size
    y = quota_labels(wanted, iterations * batch, seed_for(seed, "labels")).reshape(iterations, batch)
    return {"z": gaussian_noise(seed, (iterations, batch, contest.noise), like), "y": y.to(like.device)}


@torch.no_grad()
def fresh_statistics(model: Model, weights: Weights, x: Tensor, seed: Seed) -> Params:
    """Buffers whose running means and variances are those of the batch x alone.

    A layer moves them from r to r + m (batch - r) by a momentum m of its own: from 0 to m batch, and from the size s of
    that to (1 - m) s more. A layer that does not move them keeps its own. Outside the engine, as `invent_many` is.
    """
    key = torch.tensor(to_signed(seed_for(seed, "statistics")), device=x.device)
    running = [name for name in weights.buffers if name.endswith(("running_mean", "running_var"))]
    if not running or not model.traits.batch_statistics:
        return weights.buffers

    uncounted = {n: torch.zeros_like(b) for n, b in weights.buffers.items() if n.endswith("num_batches_tracked")}

    def moved(held: Params) -> Params:
        start = Weights(weights.params, {**weights.buffers, **uncounted, **held})
        return model.apply(start, x, training=True, seed=key)[1]

    from_zero = moved({name: torch.zeros_like(weights.buffers[name]) for name in running})
    tops = {name: from_zero[name].abs().amax() for name in running}
    size = {name: torch.where(top > 0, top, torch.ones_like(top)) for name, top in tops.items()}
    from_size = moved({name: size[name].expand_as(weights.buffers[name]).clone() for name in running})
    told = dict(weights.buffers)
    for name in running:
        momentum = 1.0 - ((from_size[name] - from_zero[name]).double() / size[name]).mean()
        if bool(momentum > 0):
            told[name] = from_zero[name] / momentum.to(x)
    return told


def _checking(generator: GeneratorFor, contest: Contest) -> Callable[[Outlook], None]:
    def check(outlook: Outlook) -> None:
        if contest.input == "sample":
            refuse_text_and_heads(outlook)
        if outlook.model is not None:
            check_network(contest, outlook.model)
        check_fit(generator, outlook)

    return check


def _preparing(
    generator: GeneratorFor, contest: Contest
) -> Callable[[Weights, Tree, Preparation], tuple[Weights, Tree]]:
    """The first generator; one that an earlier phase of the run trained goes on, if it has this form."""

    def prepare(candidate: Weights, state: Tree, preparation: Preparation) -> tuple[Weights, Tree]:
        check_network(contest, preparation.model)
        return candidate, {**state, SLOT: prepared_generator(generator, SLOT, candidate, state, preparation)}

    return prepare


def check_network(contest: Contest, model: Model) -> None:
    """Refuse a network for which nothing can be invented."""
    if contest.input == "feature":
        if not model.head_names:
            raise FedstillError(
                f"model '{model.name}': method.input = 'feature' trains the last layer alone, and another layer "
                "shares its parameters: use input = 'sample'"
            )
        return
    if model.tokens is not None:
        raise FedstillError(WORDS)
    if not model.input_shape or not model.classes:
        raise FedstillError(
            f"model '{model.name}' does not say what one sample looks like: make it with from_module, which sets "
            "input_shape and classes"
        )


Distance = Literal["l1", "mse", "forward_kl", "reverse_kl"]
ClassWeights = Literal["sample", "client"]


def apart(kind: Distance, student: Tensor, teachers: Tensor) -> Tensor:
    """(T, B) how far the student s is from teacher t_k on a sample; 0 where both say the same.

        l1:          mean_c |s_c - t_kc|
        mse:         mean_c (s_c - t_kc)^2
        forward_kl:  KL(softmax(t_k) || softmax(s))
        reverse_kl:  KL(softmax(s) || softmax(t_k))

    >>> s, t = torch.tensor([[1.0, 0.0, -1.0]]), torch.tensor([[[2.0, 0.0, 0.0]], [[0.0, 1.0, 0.0]]])
    >>> [round(float(value), 4) for value in apart("l1", s, t)]
    [0.6667, 1.0]
    """
    student, teachers = full_precision(student), full_precision(teachers)
    if kind in ("l1", "mse"):
        gap = student - teachers
        return (gap.abs() if kind == "l1" else gap.square()).mean(-1)
    log_student, log_teachers = torch.log_softmax(student, -1), torch.log_softmax(teachers, -1)
    if kind == "forward_kl":
        return (log_teachers.exp() * (log_teachers - log_student)).sum(-1)
    return (log_student.exp() * (log_student - log_teachers)).sum(-1)


def pooled(each: Tensor, share: Tensor) -> Tensor:
    """mean_i sum_k share_ki each_ki."""
    return (share * each).sum(0).mean()


def discrepancy(kind: Distance, student: Tensor, teachers: Tensor, share: Tensor) -> Tensor:
    """md = mean_i sum_k share_ki apart_ki."""
    return pooled(apart(kind, student, teachers), share)


def lesson_loss(kind: Distance, student: Tensor, teachers: Tensor, share: Tensor, *, per_class: bool) -> Tensor:
    """The discrepancy that the student learns to close; per_class: a KL counts 1 / K of itself, as in the code.

    There it is the mean over samples and classes of -log softmax(s) sum_k share_k softmax(t_k): the same gradient.
    """
    found = discrepancy(kind, student, teachers, share)
    return found / student.shape[-1] if per_class and kind.endswith("kl") else found


def recognition(teachers: Tensor, y: Tensor, share: Tensor, weights: ClassWeights = "sample") -> Tensor:
    """cls = sum_k mean_i share_ki CE(t_ki, y_i), every sample by its own share of the teacher.

    weights "client": sum_k mean_i share_ki mean_i CE(t_ki, y_i), the code's form, in which classes do not count.
    """
    log_teachers = torch.log_softmax(full_precision(teachers), -1)
    wrong = -log_teachers.gather(-1, y.expand(len(teachers), -1).unsqueeze(-1)).squeeze(-1)
    return pooled(wrong, share) if weights == "sample" else (wrong.mean(1) * share.mean(1)).sum()


def ensemble_names(teachers: Tensor, share: Tensor) -> Tensor:
    """(B,) the class that sum_k share_k softmax(t_k) holds for the most probable."""
    return mix(torch.softmax(full_precision(teachers), -1), share).argmax(-1)
