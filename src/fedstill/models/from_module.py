"""Make a Model from an nn.Module: a stateless function that vmap can run for a whole cohort."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import is_lazy

from fedstill.core.author_mistakes import why_not_under_vmap
from fedstill.core.errors import FedstillError
from fedstill.core.seeds import torch_generator, torch_stream
from fedstill.core.tree import clone, leaves, tree_map
from fedstill.core.types import Apply, Model, Output, Params, ReadTokens, Seed, Traits, Weights
from fedstill.models.stacked.convolutions import has_stacked_kernels
from fedstill.models.stacked.folded import all_fold
from fedstill.models.stateless import Skeleton, Step, canonical_names, weights_of


def from_module(
    source: nn.Module | Callable[[], nn.Module],
    *,
    input_shape: tuple[int, ...],
    classes: int | None = None,
    name: str | None = None,
    check: bool = True,
    input_dtype: torch.dtype = torch.float32,
) -> Model:
    """Make a Model from a module, or from a factory (a class or function called without arguments).

    The module returns logits (B, K) or (features, logits). With logits alone, the features are the input of its last
    layer, if that is an nn.Linear. The head is the submodule called `head`, or else the last nn.Linear, if it maps
    the features to the logits (tried on one input); it runs in eval mode.

    `init(seed)` calls the factory under that seed. Of a module it returns a copy of the weights that the module has
    now, whatever the seed. Parameters with requires_grad=False stand among the buffers: a run keeps every bit of them,
    and nobody sends them. The module itself is never changed. Its constants must be buffers (register_buffer), because
    only these follow it to a GPU.

    `input_shape` is the shape of one sample; `classes` checks the width of the logits; `check=False` skips the trial
    runs that refuse global random draws and find out whether vmap can run the module (for modules known to be good).
    `input_dtype` is torch.int64 for a module that reads ids (nn.Embedding).
    """
    module = _build(source, 0)
    name = name or type(module).__name__
    options = {"input_shape": input_shape, "classes": classes, "name": name, "check": check, "input_dtype": input_dtype}
    x = torch.rand(2, *input_shape, generator=torch_generator(0))
    if not input_dtype.is_floating_point:
        x = x.round().to(input_dtype)  # ids 0 and 1, which every vocabulary has
    seen = _look(module, x, name=name, classes=classes)
    if check:
        check_training(module, x, name=name)
    unbatchable = why_unbatchable(module, x) if check else None
    fold = unbatchable is None or not all_fold(module)  # a layer that cannot read folded images may be the reason
    if not fold:
        unbatchable = why_unbatchable(module, x, fold=False)
    copied = weights_of(module) if isinstance(source, nn.Module) else None
    layers, (head, head_names) = list(module.modules()), _head(module, seen.head)
    return Model(
        name=name,
        init=lambda seed: weights_of(_build(source, seed)) if copied is None else clone(copied),
        apply=_apply(module, seen.reads_features, fold=fold),
        head=head,
        head_names=head_names,
        frozen_names=tuple(name for name, leaf in module.named_parameters() if not leaf.requires_grad),
        tokens=_tokens(module),
        traits=Traits(
            features=seen.has_features,
            convolutional=any(isinstance(layer, _ConvNd) for layer in layers),
            stacks_on_gpu=has_stacked_kernels(module) or (fold and all_fold(module)),
            batch_statistics=any(isinstance(layer, _BatchNorm) for layer in layers),
            unbatchable=unbatchable,
        ),
        input_shape=tuple(input_shape),
        classes=seen.classes,
        feature_size=seen.feature_size,
        recipe=partial(from_module, source, **options),  # type: ignore[arg-type]
    )


def _build(source: nn.Module | Callable[[], nn.Module], seed: Seed) -> nn.Module:
    if isinstance(source, nn.Module):
        try:
            return copy.deepcopy(source).cpu()
        except Exception as error:
            raise FedstillError(f"{type(source).__name__} cannot be copied: {first_line(error)}") from error
    if not callable(source):
        raise FedstillError(f"a model is an nn.Module or a function that builds one, not {type(source).__name__}")
    try:
        inspect.signature(source).bind()
    except TypeError as error:
        raise FedstillError(
            f"the model factory {getattr(source, '__name__', source)} is called without arguments ({error}): hand over "
            "an nn.Module, or lambda: MyNetwork(...)"
        ) from None
    except ValueError:
        pass  # a function of C has no signature
    with torch_stream(seed):
        module = source()
    if not isinstance(module, nn.Module):
        raise FedstillError(f"the model factory returned {type(module).__name__}: it must return an nn.Module")
    return module


class _Seen(NamedTuple):
    """The facts about a module that one trial run showed."""

    has_features: bool
    reads_features: str | None  # path of the nn.Linear whose input are the features of a module that returns logits
    head: str | None  # path of the submodule that maps features to logits
    classes: int
    feature_size: int


def _look(module: nn.Module, x: Tensor, *, name: str, classes: int | None) -> _Seen:
    if any(is_lazy(leaf) for leaf in (*module.parameters(), *module.buffers())):
        raise FedstillError(f"model '{name}' has lazy layers: run it once on an example batch first")
    trial = copy.deepcopy(module).eval()
    linears: list[tuple[str, Tensor, Tensor]] = []  # path, input, output of every call

    def note(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if inputs:
            linears.append((paths[layer], inputs[0], output))

    paths = {layer: path for path, layer in trial.named_modules()}
    for layer in paths:
        if isinstance(layer, nn.Linear):
            layer.register_forward_hook(note)
    try:
        with torch.no_grad():
            result = trial(x)
    except Exception as error:
        problem = f"model '{name}' cannot run on a batch of shape {tuple(x.shape)}"
        raise FedstillError(f"{problem}: {first_line(error)}") from error
    features, logits = _split(result, name=name, rows=len(x), classes=classes)
    last = linears[-1] if linears and linears[-1][2] is logits else None
    width = logits.shape[1]
    if features is not None:
        head = _find_head(trial, features, logits, last[0] if last else None)
        return _Seen(True, None, head, width, features.shape[1])
    if last is not None and last[1].dim() == 2:
        return _Seen(True, last[0], _find_head(trial, last[1], logits, last[0]), width, last[1].shape[1])
    return _Seen(False, None, None, width, 0)


def _split(result: Any, *, name: str, rows: int, classes: int | None) -> tuple[Tensor | None, Tensor]:
    """Return (features or None, logits) of a module's result; refuse a result of another form."""
    parts = result if isinstance(result, tuple | list) else (result,)
    if len(parts) not in (1, 2) or not all(isinstance(part, Tensor) for part in parts):
        kinds = ", ".join(type(part).__name__ for part in parts)
        kinds = f"({kinds})" if isinstance(result, tuple | list) else kinds
        raise FedstillError(f"model '{name}' returned {kinds}: it must return logits or (features, logits)")
    logits = parts[-1]
    if logits.dim() != 2 or len(logits) != rows or (classes is not None and logits.shape[1] != classes):
        raise FedstillError(
            f"model '{name}' returned logits of shape {tuple(logits.shape)} for {rows} samples: they must be "
            f"({rows}, {classes or 'classes'}); a pair is returned as (features, logits), in this order"
        )
    return (_flat(parts[0]) if len(parts) == 2 else None), logits


def _flat(features: Tensor) -> Tensor:
    return features.flatten(1) if features.dim() > 2 else features


def _find_head(trial: nn.Module, features: Tensor, logits: Tensor, last: str | None) -> str | None:
    modules = dict(trial.named_modules())
    for path in ("head", last):
        if path is None or path not in modules:
            continue
        part = modules[path]
        if any(True for _ in part.buffers()) or not all(leaf.requires_grad for leaf in part.parameters()):
            continue  # a head is called with parameters alone
        try:
            with torch.no_grad():
                again = part(features)
        except Exception:
            continue
        if isinstance(again, Tensor) and again.shape == logits.shape and torch.allclose(again, logits, atol=1e-6):
            return path
    return None


def _head(module: nn.Module, path: str | None) -> tuple[Callable[[Params, Tensor], Tensor] | None, tuple[str, ...]]:
    """Return (the head, the names of its parameters); no names where another layer shares one (a tied embedding)."""
    if path is None:
        return None, ()
    prefix, stored = f"{path}." if path else "", canonical_names(module)
    skeleton = Skeleton(module.get_submodule(path), training=False, stored=stored, prefix=prefix)

    def head(params: Params, features: Tensor) -> Tensor:
        logits: Tensor = skeleton(params, features, Step())[0]
        return logits

    names = [name for leaf, name in stored.items() if leaf.startswith(prefix)]
    others = {name for leaf, name in stored.items() if not leaf.startswith(prefix)}
    return head, () if others.intersection(names) else tuple(dict.fromkeys(names))


class _TokenReader(nn.Module):
    """Runs the encoder of a text network up to its pooling; its parameters keep their names in the network."""

    def __init__(self, encoder: nn.Module, causal: bool) -> None:
        super().__init__()
        self.encoder, self.causal = encoder, causal

    def forward(self, x: Tensor) -> Tensor:
        states: Tensor = self.encoder.token_states(x, causal=self.causal)  # type: ignore[operator]
        return states


def _tokens(module: nn.Module) -> ReadTokens | None:
    """Return the reader of token states, if the module's `encoder` has a method token_states(x, causal=...)."""
    encoder = getattr(module, "encoder", None)
    if not isinstance(encoder, nn.Module) or not hasattr(encoder, "token_states"):
        return None
    stored = canonical_names(_TokenReader(encoder, False))
    empty = copy.deepcopy(encoder).to("meta")
    skeletons = {
        (causal, training): Skeleton(_TokenReader(empty, causal), training=training, stored=stored)
        for causal in (False, True)
        for training in (False, True)
    }
    # Stands for parameters that are not read and may be missing (the pooling); it has no values, so reading it fails.
    unread = {name: table[leaf] for name, table, leaf in skeletons[False, False].slots}

    def tokens(
        weights: Weights, x: Tensor, *, causal: bool = True, training: bool = False, seed: Tensor | None = None
    ) -> Tensor:
        tensors = {**unread, **weights.params, **weights.buffers}
        states: Tensor = skeletons[causal, training](tensors, x, Step(None, seed))[0]
        return states

    return tokens


def _apply(module: nn.Module, reads_features: str | None, *, fold: bool) -> Apply:
    stored = canonical_names(module)
    skeletons = {mode: Skeleton(module, training=mode, stored=stored, fold=fold) for mode in (False, True)}
    norms = [layer for layer in module.modules() if isinstance(layer, _BatchNorm)]
    uses_batch = {True: bool(norms), False: any(norm.running_mean is None for norm in norms)}
    if reads_features is not None:
        for skeleton in skeletons.values():
            skeleton.keep_features_of(reads_features)

    def apply(
        weights: Weights, x: Tensor, *, training: bool = False, weight: Tensor | None = None, seed: Tensor | None = None
    ) -> tuple[Output, Params]:
        if weight is not None and uses_batch[training]:
            # padding is replaced by a real row, so that whatever it holds (NaN too) cannot reach a gradient
            real = (weight > 0).reshape(-1, *(1 for _ in x.shape[1:]))
            x = torch.where(real, x, x.index_select(0, weight.argmax().reshape(1)))
        step = Step(weight, seed)
        result, changed = skeletons[training]({**weights.params, **weights.buffers}, x, step)
        parts = result if isinstance(result, tuple | list) else (result,)
        logits = parts[-1]
        features = _flat(parts[0]) if len(parts) == 2 else step.features
        return Output(logits, logits if features is None else features), {**weights.buffers, **changed}

    return apply


class _Follow:
    """Knows at any moment which layer of a module is running, and which layer drew random numbers."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.running: list[tuple[str, Tensor]] = []  # outermost first; with the random state on entry
        self.drew: str | None = None
        for path, layer in module.named_modules():
            label = f"layer {path} ({type(layer).__name__})" if path else f"the module ({type(layer).__name__})"
            layer.register_forward_pre_hook(
                lambda *_, label=label: self.running.append((label, torch.random.get_rng_state()))
            )
            layer.register_forward_hook(self._leave)

    def _leave(self, *_: Any) -> None:
        label, state = self.running.pop()
        if self.drew is None and not torch.equal(state, torch.random.get_rng_state()):
            self.drew = label

    @property
    def innermost(self) -> str:
        return self.running[-1][0] if self.running else f"the module ({type(self.module).__name__})"


def first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def check_training(module: nn.Module, x: Tensor, *, name: str) -> None:
    """Refuse a module that cannot train, or that draws from a global random stream, because runs must repeat."""
    skeleton = Skeleton(module, training=True, stored=canonical_names(module))
    follow = _Follow(skeleton.module)
    weights = weights_of(module)
    try:
        with torch_stream(0), torch.no_grad():
            skeleton({**weights.params, **weights.buffers}, x, Step(torch.ones(len(x)), torch.tensor(0)))
    except FedstillError:
        raise
    except Exception as error:
        where = f"model '{name}' cannot train on a batch of shape {tuple(x.shape)}, in {follow.innermost}"
        raise FedstillError(f"{where}: {first_line(error)}") from error
    if follow.drew is not None:
        raise FedstillError(
            f"model '{name}': {follow.drew} draws random numbers in forward, so that a run would not repeat: "
            "use nn.Dropout layers (fedstill draws their masks from the run's seed) or set its dropout to 0"
        )


def why_unbatchable(module: nn.Module, example_input: Tensor, *, fold: bool = True) -> str | None:
    """Return why vmap cannot train the module for many clients at once, and the cure; None if it can.

    The function tries it: two clients on the CPU, with padding and without, forward and backward, and in eval mode.
    `example_input` is a small batch (B, ...); fold: see stateless.convert.
    """
    stored = canonical_names(module)
    for training in (True, False):
        skeleton = Skeleton(module, training=training, stored=stored, fold=fold)
        follow = _Follow(skeleton.module)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # an operation that vmap runs client by client is slow, not wrong
                _try_two(module, skeleton, example_input)
        except Exception as error:
            message, advice = first_line(error), "see 'torch.func.vmap' limitations"
            reason, cure = why_not_under_vmap(message) or (f"fails under vmap ({message})", advice)
            problem = f"{follow.innermost} {reason} and so cannot run for many clients at once"
            return f"{problem}: {cure}, or set engine.name = 'looped'"
    return None


def _try_two(module: nn.Module, skeleton: Skeleton, example_input: Tensor) -> None:
    params, buffers = tree_map(lambda leaf: torch.stack([leaf, leaf]), weights_of(module))
    trained = [leaf.requires_grad_() for leaf in params.values()]
    x = torch.stack([example_input, example_input])

    def client(params: Params, buffers: Params, x: Tensor, seed: Tensor, *weight: Tensor) -> Any:
        return skeleton({**params, **buffers}, x, Step(weight[0] if weight else None, seed))

    padded = [[torch.ones(x.shape[:2])]] if skeleton.training else []
    for weight in [*padded, []]:
        result, _ = vmap(client)(params, buffers, x, torch.arange(2), *weight)
        total = torch.stack([leaf.sum() for leaf in leaves(result)]).sum()
        if total.requires_grad and skeleton.training:
            torch.autograd.grad(total, trained, allow_unused=True)
