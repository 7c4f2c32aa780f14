"""A server-only phase: the feature extractor learns a task of its own on unlabeled data, once for all runs."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fedstill.core.errors import FedstillError
from fedstill.core.limits import CountOrNone, NotNegative, Positive, Rows
from fedstill.core.needs import CURES
from fedstill.core.seeds import seed_for, to_signed, torch_stream, uniform
from fedstill.core.setup import Preparation
from fedstill.core.trainer import Fitted, Lesson, Trainer, threads
from fedstill.core.tree import flatten, to_device, tree_map
from fedstill.core.types import Model, Need, Objective, Outlook, Seed, ServerStep, Stage, Training, Tree, Weights

VERSION = 2  # raise it when the same pretext, data and seed give another extractor
PROBE_ROWS = 4  # inputs on which two networks are compared
SAVE_SECONDS = 30.0  # between two savings of an unfinished training

Probe = Callable[[Weights, Preparation], Mapping[str, float]]  # how good an extractor is; it changes nothing


@dataclass(frozen=True)
class Pretraining:
    """How the server teaches the extractor before the first round.

    Args:
        epochs: passes over the unlabeled data; 0 is FedAvg (of the same weighting) bit for bit.
        batch_size: samples in a step; the last, smaller batch of an epoch is left out.
        lr: learning rate of the optimiser.
        weight_decay: of the optimiser, on every parameter.
        clip: bound of the gradient norm; none switches it off.
        seed: draws first weights and batches of the pre-training alone, so that runs of several seeds share one
            extractor (if they share the unlabeled data); none goes by the run's seed and first weights.
    """

    epochs: CountOrNone = 3
    batch_size: Rows = 32
    lr: Positive = 1e-3
    weight_decay: NotNegative = 0.01
    clip: Positive | None = None
    seed: CountOrNone | None = None

    def by(self, optimizer: Literal["adam", "adamw"]) -> Training:
        keys = ("epochs", "batch_size", "lr", "weight_decay", "clip")
        return Training(optimizer=optimizer, **{key: getattr(self, key) for key in keys})


@dataclass(frozen=True)
class Pretext:
    """A task whose answers lie in the data itself.

    model: the run's model -> extractor and task head as one Model. Parameters that are to come back have the names
        that they have in the run's model; names of its own must be new.
    objective: made once per built method. training: epochs, batch size, optimiser; the rate may fall by
        `lr_epoch_decay`. An epoch's last, smaller batch is left out.
    targets: y (M, ...) from all unlabeled samples x (M, ...), in storage form.
    identity: all that the result follows from beside the training (names and numbers, for a JSON).
    suited: the task for this run's data, of the same name and training (the same one for the same data: its objective
        is made once); it refuses data that it cannot learn from. None: as it is.
    """

    name: str
    model: Callable[[Model], Model]
    objective: Objective
    training: Training
    targets: Callable[[Tensor], Tensor]
    identity: Mapping[str, Any] = field(default_factory=dict)
    needs: frozenset[Need] = frozenset()  # beyond unlabeled data and a head of its own
    suited: Callable[[Outlook], Pretext] | None = None

    def __post_init__(self) -> None:
        if self.training.steps is not None or self.training.lr_schedule != "constant" or self.training.lr_decay != 1.0:
            raise FedstillError(f"{self.name}: pre-training goes epoch by epoch: set epochs and lr_epoch_decay only")


def pretrain(
    pretext: Pretext, *, seed: Seed | None = None, probe: Probe | None = None, save_seconds: float = SAVE_SECONDS
) -> ServerStep:
    """Train the extractor on all unlabeled data before the first round; the classification head stays as it was.

    The model that is sent in round 1 has the extractor of the pretext's last epoch, never of one that labels picked.
    seed: draws the first weights and the batches, so that runs of different seeds share one extractor; None takes the
    run's own model and seed. probe: its numbers are reported before (name_before) and after.

    The result is kept by what it follows from (pretext, network, first weights, unlabeled rows, seed), and another run
    gets the same bits; of runs that need it at the same time one trains it, and the others wait. An unfinished training
    is kept too, at the end of an epoch at most every `save_seconds`, and as far as it came when it is interrupted, and
    goes on there. Every epoch is a function of its number, of the weights and of the optimiser's moments, which are all
    kept: on a CPU a training that was interrupted ends with the bits of one that was not. On a GPU that is true up to
    what its kernels leave open (sums in an order of their own).
    Reports: <pretext>_epochs (trained in this run: 0 if it was found), <pretext>_loss (of the last epoch).
    """

    def check(outlook: Outlook) -> None:
        if pretext.training.epochs:
            _suited(pretext, outlook)

    def prepare(candidate: Weights, state: Tree, preparation: Preparation) -> tuple[Weights, Tree]:
        if not pretext.training.epochs:
            return candidate, state
        task = _suited(pretext, Outlook(preparation.round, preparation.unlabeled, preparation.tokenizer))
        if probe is not None:
            _report(preparation, probe(candidate, preparation), "_before")
        extractor = _cached_or_trained(task, candidate, preparation, seed, save_seconds)
        candidate = with_extractor(candidate, extractor)
        if probe is not None:
            _report(preparation, probe(candidate, preparation))
        return candidate, state

    needs = pretext.needs | {Need.UNLABELED, Need.HEAD}
    return ServerStep(pretext.name, prepare=prepare, needs=needs, stage=Stage.KEEP, check=check)


def _suited(pretext: Pretext, outlook: Outlook) -> Pretext:
    """The task as this run has it; refused where there is nothing to learn from, or much to lose."""
    if (played := outlook.round - 1) > 0:
        raise FedstillError(
            f"{pretext.name} would replace the model that {played} round{'s have' if played > 1 else ' has'} trained: "
            "let it stand in the first phase"
        )
    return pretext if pretext.suited is None else pretext.suited(outlook)


def _report(preparation: Preparation, numbers: Mapping[str, float], suffix: str = "") -> None:
    preparation.metrics.update({f"{name}{suffix}": value for name, value in numbers.items()})


def _cached_or_trained(
    pretext: Pretext, candidate: Weights, preparation: Preparation, seed: Seed | None, save_seconds: float
) -> Weights:
    """The extractor, from the cache or from training; without the head of either task."""
    whole, x = pretext.model(preparation.model), _rows(pretext, preparation)
    chosen = preparation.seed if seed is None else seed
    first = candidate if seed is None else _like(preparation.model.init(seed_for(seed, "model")), candidate)
    start = _like(whole.init(seed_for(chosen, "pretext")), candidate)
    start = with_extractor(start, _shared(first, start))
    identity, cache = identity_of(pretext, start, first, preparation, chosen), preparation.cache

    def waiting(who: str) -> None:
        preparation.tell(f"{pretext.name}: waits for the extractor that another run trains, {who}", 0.0)

    with nullcontext() if cache is None else cache.alone(identity, waiting):
        kept = None if cache is None else cache.load(identity)
        if kept:
            preparation.tell(f"{pretext.name}: the extractor was found, trained by an earlier run", 1.0)
            _report(preparation, {f"{pretext.name}_epochs": 0.0, f"{pretext.name}_loss": float(kept["loss"])})
            return _like(Weights(kept["params"], kept.get("buffers", {})), candidate)
        work = _Training(pretext, preparation.trainer.lend(whole), x, chosen, preparation, identity, save_seconds)
        fitted = work.run(Fitted(start, {}, torch.zeros(())))
        extractor = _shared(fitted.weights, _without(candidate, preparation.model.head_names))
        if cache is not None:
            cache.save(identity, {**extractor._asdict(), "loss": fitted.loss})
            cache.save(unfinished(identity), {})
        return extractor


class _Training:
    """Epoch by epoch from the first, or from the last one that was kept."""

    def __init__(
        self,
        pretext: Pretext,
        trainer: Trainer,
        x: Tensor,
        seed: Seed,
        setup: Preparation,
        identity: Mapping[str, Any],
        save_seconds: float,
    ) -> None:
        self.pretext, self.trainer, self.x, self.seed = pretext, trainer, x, seed
        self.setup, self.identity, self.save_seconds = setup, unfinished(identity), save_seconds

    def run(self, fitted: Fitted) -> Fitted:
        """Train to the last epoch; whatever ends it early, the last whole epoch is kept."""
        fitted, done = self._kept(fitted)
        name, epochs, kept, began = self.pretext.name, self.pretext.training.epochs, done, time.perf_counter()
        _report(self.setup, {f"{name}_epochs": float(epochs - done)})
        y = self.pretext.targets(self.x)
        try:
            while done < epochs:
                after = self._epoch(fitted, y, done)
                loss = float(after.loss)
                if not np.isfinite(loss):
                    raise FedstillError(f"{name}: the loss of epoch {done + 1} is {loss}: use a lower training.lr")
                fitted, done = after, done + 1
                self.setup.tell(f"{name}: epoch {done}/{epochs}, loss {loss:.4f}", done / epochs)
                if done < epochs and time.perf_counter() - began >= self.save_seconds:
                    self._keep(fitted, done)
                    kept, began = done, time.perf_counter()
        except FedstillError:
            raise  # it would end there again
        except BaseException:
            if done > kept:
                with suppress(Exception):  # a broken device: the error to tell is the one that broke it
                    self._keep(fitted, done)
            raise
        _report(self.setup, {f"{name}_loss": float(fitted.loss)})
        return fitted

    def _epoch(self, fitted: Fitted, y: Tensor, epoch: int) -> Fitted:
        plan = self.pretext.training
        batch, rate = min(plan.batch_size, len(self.x)), plan.lr * plan.lr_epoch_decay**epoch
        once = replace(plan, epochs=1, steps=len(self.x) // batch, batch_size=batch, lr=rate, lr_epoch_decay=1.0)
        seed = seed_for(self.seed, "pretrain", epoch)
        lesson = Lesson(self.pretext.objective, self.x, y, once)
        return self.trainer.fit(lesson, fitted.weights, seed, optimizer=fitted.optimizer)

    def _keep(self, fitted: Fitted, done: int) -> None:
        if self.setup.cache is not None:
            part = {**fitted._asdict(), "weights": fitted.weights._asdict(), "epochs": torch.tensor(done)}
            self.setup.cache.save(self.identity, part)

    def _kept(self, fitted: Fitted) -> tuple[Fitted, int]:
        """Where an interrupted training stopped, else the start."""
        entry = None if self.setup.cache is None else self.setup.cache.load(self.identity)
        if not entry:
            return fitted, 0
        done, epochs = int(entry["epochs"]), self.pretext.training.epochs
        weights = Weights(entry["weights"]["params"], entry["weights"].get("buffers", {}))
        device = next(iter(fitted.weights.params.values())).device
        self.setup.tell(f"{self.pretext.name}: goes on after epoch {done}, where it was interrupted", done / epochs)
        optimizer = to_device(entry.get("optimizer", {}), device)
        return Fitted(_like(weights, fitted.weights), optimizer, entry["loss"]), done


def identity_of(
    pretext: Pretext, start: Weights, first: Weights, preparation: Preparation, seed: Seed
) -> dict[str, Any]:
    """All that a pre-trained extractor follows from, the device and its precision left out."""
    return {
        "kind": "pretrained extractor",
        "version": VERSION,
        "pretext": pretext.name,
        "options": dict(pretext.identity),
        "training": asdict(pretext.training),
        "model": preparation.model.name,
        "start": digest({**flatten(start)}),
        "computes": _fingerprint(pretext, preparation.model, first, _rows(pretext, preparation)),
        "unlabeled": digest({"x": _rows(pretext, preparation)}),
        "inputs": dict(preparation.inputs),
        "seed": seed,
    }


def unfinished(identity: Mapping[str, Any]) -> dict[str, Any]:
    return {**identity, "kind": "unfinished pre-training"}


def digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over names, forms and values."""
    hashed = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        hashed.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        hashed.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return hashed.hexdigest()


def _fingerprint(pretext: Pretext, model: Model, weights: Weights, x: Tensor) -> str:
    """Return a digest of the network's outputs, because weights tell no groups, heads, dropout, momentum, activations.

    It is tried in train mode by fixed draws, and once more at larger weights, where bounds (ReLU6) and branches that
    start at 0 show. On a CPU and in float64 machines differ by far less than what is rounded away; in float32 they may
    not, and then the extractor is trained once more. Of what cannot be tried at all only the weights count.
    """
    rows = _probe_rows(x)
    on_host = Weights(*({name: leaf.detach().cpu() for name, leaf in part.items()} for part in weights))
    wide = _as(on_host, torch.float64)
    tried = {"first": wide, "larger": wide._replace(params={n: _larger(n, leaf) for n, leaf in wide.params.items()})}
    with torch.no_grad(), torch_stream(0), threads(1):  # three runs at once on 2 cores: 0.2 s, with two each 13 s
        with suppress(Exception):
            outcomes = {which: _outcome(pretext, model, tried_weights, rows) for which, tried_weights in tried.items()}
            return digest(flatten(tree_map(lambda leaf: _rounded(leaf, 1e5), outcomes)))
        with suppress(Exception):  # a module of one's own that makes float32 tensors itself
            outcome = _outcome(pretext, model, _as(on_host, torch.float32), rows)
            return digest({name: _rounded(leaf, 1e3) for name, leaf in outcome.items()})
    return "unknown"


def _probe_rows(x: Tensor) -> Tensor:
    """Draws of mean 0 and variance 1, as inputs are; of text, whose ids must be known ones, some of its rows."""
    if x.ndim == 2 and not x.is_floating_point():
        return x[torch.linspace(0, len(x) - 1, PROBE_ROWS).long()].long().cpu()
    return (uniform(torch.tensor(0), (PROBE_ROWS, *x.shape[1:])) - 0.5) * 12**0.5


def _as(weights: Weights, dtype: torch.dtype) -> Weights:
    return tree_map(lambda leaf: leaf.to(dtype) if leaf.is_floating_point() else leaf, weights)


def _larger(name: str, leaf: Tensor) -> Tensor:
    draws = uniform(torch.tensor(to_signed(seed_for(0, name))), leaf.shape)
    return 8.0 * leaf + (draws.to(leaf.dtype) - 0.5)


def _outcome(pretext: Pretext, model: Model, weights: Weights, x: Tensor) -> dict[str, Tensor]:
    """Return the outputs of a training step's network: its states of tokens, where the pretext reads these alone."""
    seed, like = torch.tensor(0), next(iter(weights.params.values()))
    x = x.to(like.dtype) if x.is_floating_point() else x
    if Need.TOKENS in pretext.needs and model.tokens is not None:
        ways = {"causal": True, "both": False}
        return {name: model.tokens(weights, x, causal=way, training=True, seed=seed) for name, way in ways.items()}
    output, buffers = model.apply(weights, x, training=True, seed=seed)
    return {**output._asdict(), **{f"buffers.{name}": leaf for name, leaf in buffers.items()}}


def _rounded(leaf: Tensor, places: float) -> Tensor:
    """In parts of the largest value, which comes last, itself rounded."""
    values = torch.nan_to_num(leaf.double().flatten(), nan=0.0, posinf=0.0, neginf=0.0)
    largest = values.norm(p=torch.inf).clamp_min(1.0 / places)  # below it is what sums that should be 0 leave
    size = float(f"{float(largest):.3e}")
    return torch.cat([(values / largest * places).round() + 0.0, values.new_tensor([size])])


def with_extractor(candidate: Weights, extractor: Weights) -> Weights:
    """The candidate with the leaves of an extractor in their places."""
    return Weights({**candidate.params, **extractor.params}, {**candidate.buffers, **extractor.buffers})


def _rows(pretext: Pretext, preparation: Preparation) -> Tensor:
    if preparation.unlabeled is None or not len(preparation.unlabeled):
        raise FedstillError(f"{pretext.name} needs {Need.UNLABELED.value}: {CURES[Need.UNLABELED]}")
    return preparation.unlabeled


def _shared(source: Weights, names: Weights) -> Weights:
    """The leaves of the source that the other one has, too."""
    both = zip(source, names, strict=True)
    return Weights(*({name: leaf for name, leaf in part.items() if name in other} for part, other in both))


def _without(weights: Weights, names: tuple[str, ...]) -> Weights:
    return weights._replace(params={name: leaf for name, leaf in weights.params.items() if name not in names})


def _like(weights: Weights, candidate: Weights) -> Weights:
    """Weights on the device and in the precision of the candidate's."""
    like = next(leaf for leaf in candidate.params.values())

    def moved(leaf: Tensor) -> Tensor:
        return leaf.to(like.device, like.dtype if leaf.is_floating_point() else leaf.dtype)

    return Weights(*({name: moved(leaf) for name, leaf in part.items()} for part in weights))
