"""Fine-tuning on hard samples: a generator looks for inputs on which the candidate and the clients' models differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fedstill.core.errors import FedstillError
from fedstill.core.heads import head_of
from fedstill.core.seeds import seed_for, to_signed
from fedstill.core.tree import flatten, leaves, rows, tree_map
from fedstill.core.types import (
    Fitted,
    Model,
    Need,
    Outlook,
    Params,
    Player,
    Preparation,
    Round,
    Scene,
    Seed,
    ServerStep,
    Training,
    Tree,
    Weights,
    no_objection,
    no_preparation,
)
from fedstill.server.average import shares
from fedstill.server.hard_losses import ClassWeights, Distance, discrepancy, ensemble_names, lesson_loss, recognition
from fedstill.server.invented import (
    GeneratorFor,
    asked_for,
    class_shares,
    diversity,
    gaussian_noise,
    label_counts,
    quota_labels,
)
from fedstill.server.invented_teaching import first_generator, generator_of, invented_samples, samples_of
from fedstill.server.pools import full_precision

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
RIGHT = "hard samples: share right"  # a sum over the student's steps that travels with its buffers


@dataclass(frozen=True)
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
    clients: Clients = "each"
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
        theta <- Adam on -md_k + lam_cls cls_k + (lam_dis / |S|) div, I_g times for each client k in turn
                 (or once on the sum over k),  x = G(z, y; theta)
        w <- SGD on sum_k a_k(y) KL(softmax t_k(x) || softmax s(x; w)) / K, I_d times,  x = G(z, y; theta)

    Teachers answer in eval mode, the student too while the generator moves; x and the teachers' answers are worked
    out once for the student's I_d steps. One upload teaches alone. Without any label count in the cohort every class
    is as likely and every client counts alike. Zero iterations leave the candidate as it is.
    State: "generator", which lives on from round to round; "samples", what it invents now (not at feature level).
    Reports: generator_loss and student_loss (means over their steps), samples_right: the share of invented samples
    whose class the ensemble names.
    """
    roles = lru_cache(maxsize=4)(lambda model: _roles(contest, generator(model), model))

    def apply(candidate: Weights, state: Tree, round: Round) -> tuple[Weights, Tree]:
        present = round.uploads.size > 0
        if not contest.iterations or not bool(present.any()):
            return candidate, state
        net, made = _net(contest, round.model), generator(round.model)
        given, wanted = _teaching(contest, net, round, present)
        like = next(leaves(candidate))
        seed = seed_for(round.seed, "hard samples")
        drawn = _drawn(contest, wanted, like, seed)
        pupil = net.part(candidate)
        tallied = pupil._replace(buffers={**pupil.buffers, RIGHT: like.new_zeros(())})
        found = round.trainer.take_turns(
            _players(contest, roles(round.model), round.number, len(given["share"])),
            {"generator": generator_of(state), "student": tallied}, drawn, given, seed,
        )  # fmt: skip
        moved, now = found["student"].weights, found["generator"].weights
        learnt = Weights({**candidate.params, **moved.params}, _network(moved).buffers)
        if contest.input == "feature" or contest.batch_norm == "restore":
            learnt = learnt._replace(buffers=candidate.buffers)
        elif contest.batch_norm == "reestimate":
            x = _invented(made, net, now, round.model.classes, z=drawn["z"].flatten(0, 1), y=drawn["y"].flatten())
            learnt = learnt._replace(buffers=fresh_statistics(round.model, learnt, x, round.seed))
        _report(contest, round, candidate, found)
        state = {**state, "generator": now._asdict()}
        if contest.input == "sample":
            state["samples"] = invented_samples(made, now, round.model, contest.noise, round.seed)._asdict()
        return learnt, state

    return ServerStep(
        apply,
        init=lambda _: {"generator": {}, "samples": {}},
        needs=contest.needs,
        samples=samples_of,
        prepare=_preparing(generator, contest) if contest.iterations else no_preparation,
        check=_refuse_text if contest.iterations and contest.input == "sample" else no_objection,
    )


def _report(contest: Contest, round: Round, candidate: Weights, found: Mapping[str, Fitted]) -> None:
    round.metrics["generator_loss"] = float(found["generator"].loss)
    round.metrics["student_loss"] = float(found["student"].loss)
    if contest.student_steps:
        right = float(found["student"].weights.buffers[RIGHT])
        round.metrics["samples_right"] = right / (contest.iterations * contest.student_steps)
    round.models["aggregated"] = candidate


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
        x = _invented(generator, net, scene.weights["generator"], model.classes, z=z, y=y)
        said, weight = net.many(scene, scene.given["teachers"], x), scene.given["share"].index_select(1, y)
        right = (ensemble_names(said, weight) == y).to(scene.given["share"].dtype).mean()
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


@torch.no_grad()
def _invented(generator: Model, net: Net, weights: Weights, classes: int, *, z: Tensor, y: Tensor) -> Tensor:
    output, _ = generator.apply(weights, asked_for(z, y, classes), training=False)
    return output.logits.reshape(-1, *net.shape)


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


def _teaching(contest: Contest, net: Net, round: Round, present: Tensor) -> tuple[Tree, Tensor]:
    """The teachers and how much each counts for a class, (T, K); and how much each class is asked for, (K,)."""
    like, classes = next(leaves(round.start)), round.model.classes
    here = present.nonzero().flatten()
    teachers = round.uploads.weights if len(here) == len(present) else rows(round.uploads.weights, here)
    counts = label_counts(round)[here] if contest.counts else like.new_zeros((len(here), classes))
    known = bool((counts > 0).any())
    alike = shares(round.uploads, "uniform")[here].to(like).unsqueeze(1).expand(-1, classes).contiguous()
    share = class_shares(counts).to(like) if contest.ensemble == "class" and known else alike
    wanted = counts.sum(0) if contest.labels == "quota" and known else torch.ones(classes, dtype=torch.float64)
    return {"teachers": net.part(teachers), "share": share}, wanted


def _drawn(contest: Contest, wanted: Tensor, like: Tensor, seed: Seed) -> Tree:
    """A row for each iteration: z (B, d) and the classes y (B,), in the wanted proportions over all iterations."""
    iterations, batch = contest.iterations, contest.batch_size
    y = quota_labels(wanted, iterations * batch, seed_for(seed, "labels")).reshape(iterations, batch)
    return {"z": gaussian_noise(seed, (iterations, batch, contest.noise), like), "y": y.to(like.device)}


@torch.no_grad()
def fresh_statistics(model: Model, weights: Weights, x: Tensor, seed: Seed) -> Params:
    """Buffers whose running means and variances are those of the batch x alone.

    A layer moves them from r to r + m (batch - r) by a momentum m of its own: from 0 to m batch, from 1 to 1 - m more.
    """
    key = torch.tensor(to_signed(seed_for(seed, "statistics")), device=x.device)
    running = [name for name in weights.buffers if name.endswith(("running_mean", "running_var"))]
    if not running or not model.batch_statistics:
        return weights.buffers

    def moved(value: float) -> Params:
        held = {name: torch.full_like(weights.buffers[name], value) for name in running}
        return model.apply(Weights(weights.params, {**weights.buffers, **held}), x, training=True, seed=key)[1]

    from_zero, from_one = moved(0.0), moved(1.0)
    told = {name: from_zero[name] / (1.0 - (from_one[name] - from_zero[name])) for name in running}
    return {**weights.buffers, **told}


def _preparing(
    generator: GeneratorFor, contest: Contest
) -> Callable[[Weights, Tree, Preparation], tuple[Weights, Tree]]:
    """The first generator; one that an earlier phase of the run trained goes on, if it has this form."""

    def prepare(candidate: Weights, state: Tree, preparation: Preparation) -> tuple[Weights, Tree]:
        check_network(contest, preparation.model)
        fresh = first_generator(generator, candidate, preparation)._asdict()
        kept = state.get("generator") or {}
        return candidate, {**state, "generator": kept if _form(kept) == _form(fresh) else fresh}

    return prepare


def _form(tree: Tree) -> dict[str, torch.Size]:
    return {name: leaf.shape for name, leaf in flatten(tree).items()}


def check_network(contest: Contest, model: Model) -> None:
    """Refuse a network for which nothing can be invented."""
    if contest.input == "feature":
        if not model.head_names:
            raise FedstillError(
                f"model '{model.name}': algorithm.input = 'feature' trains the last layer alone, and another layer "
                "shares its parameters: use input = 'sample'"
            )
        return
    if model.tokens is not None:
        raise FedstillError(_WORDS)
    if not model.input_shape or not model.classes:
        raise FedstillError(
            f"model '{model.name}' does not say what one sample looks like: make it with from_module, which sets "
            "input_shape and classes"
        )


_WORDS = (
    "a generator invents numbers, not words: for text set algorithm.input = 'feature', which invents what the last "
    "layer reads, or use a method without a generator"
)


def _refuse_text(outlook: Outlook) -> None:
    if outlook.tokenizer is not None:
        raise FedstillError(_WORDS)
