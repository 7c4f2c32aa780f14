"""Fine-tuning on hard samples: a generator looks for inputs on which the candidate and the clients' models differ."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fedstill.compose.moving import head_of
from fedstill.core.errors import FedstillError
from fedstill.core.seeds import seed_for
from fedstill.core.setup import Preparation, no_preparation
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
    Generator,
    GeneratorFor,
    InventedStudent,
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
    turn_of,
    wanted_classes,
    with_samples,
)
from fedstill.server.distill.targets import mix

Distance = Literal["l1", "mse", "forward_kl", "reverse_kl"]
Labels = Literal["quota", "uniform"]
Ensemble = Literal["class", "uniform"]
Level = Literal["sample", "feature"]
Compare = Callable[[Tensor, Tensor, Tensor], Tensor]  # logits of student (B, K) and teachers (T, B, K), share (T, B)
Recognise = Callable[[Tensor, Tensor, Tensor], Tensor]  # logits of teachers (T, B, K), classes (B,), share (T, B)
SLOT = "hard_generator"  # not "generator": another method's, beside it or in the phase before, is its own
RIGHT = "hard samples: right, of all"  # sums over the student's steps that travel with its buffers


def apart(kind: Distance, student: Tensor, teachers: Tensor) -> Tensor:
    """Return (T, B) how far the student s is from teacher t_k on a sample; 0 where both say the same.

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


def discrepancy(kind: Distance, student: Tensor, teachers: Tensor, share: Tensor) -> Tensor:
    """Return md = mean_i sum_k share_ki apart_ki."""
    return (share * apart(kind, student, teachers)).sum(0).mean()


def hardness(kind: Distance) -> Compare:
    """Return the discrepancy that the generator seeks; its gradient goes through the student alone."""
    return lambda student, teachers, share: discrepancy(kind, student, teachers.detach(), share)


def forward_kl_per_class(student: Tensor, teachers: Tensor, share: Tensor) -> Tensor:
    """Return the discrepancy that the student learns to close: the forward KL over the number of classes.

    In the code it is the mean over samples and classes of -log softmax(s) sum_k share_k softmax(t_k), which has the
    same gradient.
    """
    return discrepancy("forward_kl", student, teachers, share) / student.shape[-1]


def wrong(teachers: Tensor, y: Tensor) -> Tensor:
    """Return (T, B) CE(t_ki, y_i)."""
    log_teachers = torch.log_softmax(full_precision(teachers), -1)
    return -log_teachers.gather(-1, y.expand(len(teachers), -1).unsqueeze(-1)).squeeze(-1)


def recognition(teachers: Tensor, y: Tensor, share: Tensor) -> Tensor:
    """Return cls = mean_i sum_k share_ki CE(t_ki, y_i): every sample counts by the teacher's share of its class."""
    return (share * wrong(teachers, y)).sum(0).mean()


def ensemble_names(teachers: Tensor, share: Tensor) -> Tensor:
    """Return (B,) the class that sum_k share_k softmax(t_k) holds for the most probable."""
    return mix(torch.softmax(full_precision(teachers), -1), share).argmax(-1)


@dataclass(frozen=True, kw_only=True)
class Contest:
    """How hard samples are sought and learnt.

    iterations: exchanges of generator and student in a round. batch_size: invented samples in a step.
    generator, student: `steps` are those of an exchange, rates those of round 1.
    hardness: the distance that the generator seeks; None: it seeks none. lesson: the student's loss.
    largest_share: most that a client counts for a class, in even shares; see `capped`.
    recognise: the teachers' cross-entropy in the generator's loss.
    one_by_one: the generator takes its steps for each client in turn, not on all of them together.
    statistics: (model, weights, x, seed) -> the student's buffers after the round, from all samples x of the round,
        invented anew; None: as student.batch_norm says.
    """

    iterations: int = 10
    batch_size: int = 50
    generator: Generator = Generator()
    student: InventedStudent = InventedStudent()
    labels: Labels = "quota"
    ensemble: Ensemble = "class"
    largest_share: float | None = None
    input: Level = "sample"
    hardness: Compare | None = hardness("l1")
    lesson: Compare = forward_kl_per_class
    recognise: Recognise = recognition
    one_by_one: bool = False
    statistics: Callable[[Model, Weights, Tensor, Seed], Params] | None = None

    def __post_init__(self) -> None:
        if self.hardness is None and not self.generator.lam_cls and not self.generator.lam_dis:
            raise FedstillError(
                "method.discrepancy = 'none' with generator.lam_cls = 0 and generator.lam_dis = 0 leaves the generator "
                "nothing to learn: set one of them"
            )

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
    apply: Callable[[Weights, Tensor, bool, Tensor | None], tuple[Tensor, Params]]  # (weights, x, training, seed)
    many: Callable[[Scene, Weights, Tensor], Tensor]  # stacked weights -> (T, B, K) in eval mode
    part: Callable[[Weights], Weights]  # what of a model, or of stacked ones, it is


Loss = Callable[[Weights, Scene], tuple[Tensor, Params]]


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

    @lru_cache(maxsize=4)
    def roles(model: Model) -> tuple[Loss, Loss, Callable[[Scene], Tree]]:
        """Made once for a model, because the engine keeps what it captured of them."""
        made, net = generator(model), _net(contest, model)
        return _hunt(contest, made, net, model), _learn(contest, net), _look(made, net, model)

    def turn(learner: Generator | InventedStudent, number: int, times: int = 1) -> Training:
        rate = learner.lr * learner.lr_decay ** (number - 1)
        return turn_of(learner, contest.batch_size, steps=times * learner.steps, lr=rate, lr_decay=1.0)

    def apply(candidate: Weights, state: Tree, round: Round) -> tuple[Weights, Tree]:
        round = with_samples(round)
        if not contest.iterations or not len(round.uploads.ids):
            return candidate, state
        net, like = _net(contest, round.model), next(leaves(candidate))
        given, seed = _teaching(contest, net, round), seed_for(round.seed, "hard samples")
        drawn = _drawn(contest, wanted_classes(round, quota=contest.labels == "quota"), like, seed)
        pupil = net.part(candidate)
        tallied = pupil._replace(buffers={**pupil.buffers, RIGHT: like.new_zeros(2)})
        hunt, learn, look = roles(round.model)
        clients = len(given["share"]) if contest.one_by_one else 1
        trained = round.trainer.take_turns(
            {
                "generator": Player(hunt, turn(contest.generator, round.number, clients)),
                "student": Player(learn, turn(contest.student, round.number), look),
            },
            {"generator": generator_of(state, SLOT), "student": tallied},
            drawn,
            given,
            seed,
        )
        moved, now = trained["student"].weights, trained["generator"].weights
        learnt = Weights({**candidate.params, **moved.params}, _network(moved).buffers)
        if contest.input == "feature" or contest.student.batch_norm == "restore":
            learnt = learnt._replace(buffers=candidate.buffers)
        elif contest.statistics is not None:
            z, y, made = drawn["z"].flatten(0, 1), drawn["y"].flatten(), generator(round.model)
            x = invent_many(made, now, round.model.classes, z=z, y=y, shape=net.shape)
            learnt = learnt._replace(buffers=contest.statistics(round.model, learnt, x, round.seed))
        round.metrics["generator_loss"] = float(trained["generator"].loss)
        round.metrics["student_loss"] = float(trained["student"].loss)
        right, asked = moved.buffers[RIGHT].tolist()
        if asked:
            round.metrics["samples_right"] = right / asked
        round.models.setdefault("aggregated", candidate)
        state = {**state, SLOT: now._asdict()}
        if contest.input == "sample":
            state["samples"] = shown_samples(generator(round.model), now, round.model, contest.generator.noise)
        return learnt, state

    def prepare(candidate: Weights, state: Tree, preparation: Preparation) -> tuple[Weights, Tree]:
        check_network(contest, preparation.model)
        return candidate, {**state, SLOT: prepared_generator(generator, SLOT, candidate, state, preparation)}

    def check(outlook: Outlook) -> None:
        if contest.input == "sample":
            refuse_text_and_heads(outlook)
        if outlook.model is not None:
            check_network(contest, outlook.model)
        check_fit(generator, outlook)

    return ServerStep(
        "hard_samples",
        apply,
        init=lambda _: {SLOT: {}},
        needs=contest.needs,
        prepare=prepare if contest.iterations else no_preparation,
        check=check if contest.iterations else no_objection,
    )


def _hunt(contest: Contest, generator: Model, net: Net, model: Model) -> Loss:
    """-md + lam_cls cls + lam_dis div, of one client's model (the step says whose) or of all together."""
    how = contest.generator

    def loss(weights: Weights, scene: Scene) -> tuple[Tensor, Params]:
        z, y = scene.drawn["z"], scene.drawn["y"]
        teachers, share = scene.given["teachers"], scene.given["share"]
        cohort = len(share)
        if contest.one_by_one:
            whose = (scene.step % cohort).reshape(1)
            teachers, share = tree_map(lambda leaf: leaf.index_select(0, whose), (teachers, share))
        output, buffers = generator.apply(weights, asked_for(z, y, model.classes), training=True, seed=scene.seed)
        x, weight = output.logits.reshape(-1, *net.shape), share.index_select(1, y)
        answers = net.many(scene, teachers, x)
        total = x.new_zeros(())
        if how.lam_dis:
            total = how.lam_dis * len(share) / cohort * diversity(full_precision(x), full_precision(z))
        if how.lam_cls:
            total = total + how.lam_cls * contest.recognise(answers, y, weight)
        if contest.hardness is not None:
            mine = net.apply(_network(scene.weights["student"]), x, False, None)[0]
            total = total - contest.hardness(mine, answers, weight)
        return total, buffers

    return loss


def _look(generator: Model, net: Net, model: Model) -> Callable[[Scene], Tree]:
    """All that stays the same while the student learns: samples, what teachers say, how much each of them counts."""

    def look(scene: Scene) -> Tree:
        z, y = scene.drawn["z"], scene.drawn["y"]
        x = invent(generator, scene.weights["generator"], model.classes, z=z, y=y, shape=net.shape)
        answers, weight = net.many(scene, scene.given["teachers"], x), scene.given["share"].index_select(1, y)
        asked = scene.given["held"].index_select(0, y)
        right = torch.stack([asked * (ensemble_names(answers, weight) == y), asked]).sum(1)
        return {"x": x, "answers": answers, "weight": weight, "right": right}

    return look


def _learn(contest: Contest, net: Net) -> Loss:
    def loss(weights: Weights, scene: Scene) -> tuple[Tensor, Params]:
        seen = scene.seen
        logits, buffers = net.apply(_network(weights), seen["x"], contest.student.batch_norm != "frozen", scene.seed)
        value = contest.lesson(logits, seen["answers"], seen["weight"])
        return value, {**buffers, RIGHT: weights.buffers[RIGHT] + seen["right"]}

    return loss


def _network(student: Weights) -> Weights:
    return student._replace(buffers={name: leaf for name, leaf in student.buffers.items() if name != RIGHT})


def _net(contest: Contest, model: Model) -> Net:
    return _last_layer(model) if contest.input == "feature" else _whole_network(model)


def _whole_network(model: Model) -> Net:
    def apply(weights: Weights, x: Tensor, training: bool, seed: Tensor | None) -> tuple[Tensor, Params]:
        output, buffers = model.apply(weights, x, training=training, seed=seed)
        return output.logits, buffers

    def many(scene: Scene, teachers: Weights, x: Tensor) -> Tensor:
        return scene.each(teachers, x).logits

    return Net(model.input_shape, apply, many, lambda weights: weights)


def _last_layer(model: Model) -> Net:
    head = model.head
    assert head is not None, "the step declares Need.HEAD"

    def many(scene: Scene, teachers: Weights, x: Tensor) -> Tensor:
        logits: Tensor = torch.func.vmap(lambda params: head(params, x))(teachers.params)
        return logits

    return Net(
        (model.feature_size,),
        lambda weights, x, training, seed: (head(weights.params, x), weights.buffers),
        many,
        lambda weights: head_of(weights, model.head_names),
    )


def _teaching(contest: Contest, net: Net, round: Round) -> Tree:
    """The teachers, how much each counts for a class (T, K), and 1 for classes that somebody holds (K,)."""
    share = teacher_shares(round, by_class=contest.ensemble == "class", largest_share=contest.largest_share)
    held = wanted_classes(round, quota=contest.counts) > 0
    held = (held | ~held.any()).to(share)  # without any count nobody knows
    return {"teachers": net.part(round.uploads.weights), "share": share, "held": held}


def _drawn(contest: Contest, wanted: Tensor, like: Tensor, seed: Seed) -> Tree:
    """A row for each iteration: z (B, d) and the classes y (B,), in the wanted proportions over all iterations."""
    iterations, batch = contest.iterations, contest.batch_size
    y = quota_labels(wanted, iterations * batch, seed_for(seed, "labels")).reshape(iterations, batch)
    return {"z": gaussian_noise(seed, (iterations, batch, contest.generator.noise), like), "y": y.to(like.device)}


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
