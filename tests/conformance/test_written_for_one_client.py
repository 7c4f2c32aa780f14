"""An objective has no client dimension, so a cohort is vmap of it and must give what a loop gives."""

import pytest
import torch
from by_hand import F64, blobs, linear, linear_model, local_view, number
from papers import released
from whole_server import whole

from fedstill.compose.combine import combine
from fedstill.core.tree import flatten, rows, stack, tree_map
from fedstill.core.types import Method, Weights
from fedstill.methods import METHODS, fedcurv, scaffold

BUILT = {name: factory() for name, factory in METHODS.items()}
# fedgen's term must be bound to a model with a head: tests/methods/data_free/test_feature_generator.py
OBJECTIVES = {name: method for name, method in BUILT.items() if method.objective.bind is None} | {
    "scaffold-I": scaffold(option="I"),
    "fednova-released": released("fedlmd", "fednova")(),
    "fedcurv-per-sample": fedcurv(fisher="per_sample"),
    "moon-init": released("fedlmd", "moon")(),
}
MODEL = linear_model()


def noisy(tree, seed):
    generator = torch.Generator().manual_seed(seed)
    return tree_map(lambda leaf: leaf + torch.randn(leaf.shape, generator=generator, dtype=F64), tree)


def client_view(method: Method, client: int):
    start = linear(3, 4, seed=1)
    objective = method.objective
    broadcast = whole(method).broadcast(whole(method).init(start))
    return local_view(
        start,
        params=noisy(start.params, client),
        received={slot: noisy(value, 10) for slot, value in broadcast.items()},
        state={slot: noisy(value, 20 + client) for slot, value in objective.init(start).items()},
        travel=number(0.3 + client),
        label_counts=number([[1.0, 3.0, 2.0], [4.0, 0.0, 2.0], [2.0, 2.0, 2.0]][client]),
    )


def loss_of(objective, params, batch, view):
    view = view._replace(params=params)
    frozen = {name: MODEL.apply(teacher(view), batch.x)[0] for name, teacher in objective.frozen.items()}
    output, _ = MODEL.apply(Weights(params, {}), batch.x, training=True)
    return objective.loss(output, batch, view._replace(frozen=frozen))


def after_training(objective, batch, view):
    return objective.finish(view, objective.measure(MODEL, batch, view) if objective.measure else {})


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_batched_cohort_gives_what_a_loop_over_clients_gives(name):
    method = OBJECTIVES[name]
    views = [client_view(method, k) for k in range(3)]
    batches = [blobs(k, 6)._replace(weight=number([1.0] * (6 - k) + [0.0] * k)) for k in range(3)]

    def gradient(batch, view):
        return torch.func.grad_and_value(lambda params: loss_of(method.objective, params, batch, view))(view.params)

    def finish(batch, view):
        return after_training(method.objective, batch, view)

    for function in (gradient, finish):
        together = torch.func.vmap(function)(stack(batches), stack(views))
        for k in range(3):
            torch.testing.assert_close(rows(together, k), function(batches[k], views[k]), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_what_a_padded_sample_holds_changes_nothing(name):
    objective, view, data = OBJECTIVES[name].objective, client_view(OBJECTIVES[name], 0), blobs(0, 6)
    real = type(data)(*(leaf[:4] for leaf in data))
    padded = data._replace(weight=number([1.0] * 4 + [0.0] * 2))
    gradients = [
        torch.func.grad(lambda params, b=batch: loss_of(objective, params, b, view))(view.params)
        for batch in (real, padded)
    ]
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(
        after_training(objective, padded, view), after_training(objective, real, view), rtol=1e-12, atol=1e-14
    )


def form_of(tree):
    return {path: (leaf.shape, leaf.dtype) for path, leaf in flatten(tree).items()}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_client_state_keeps_its_shape_and_dtype(name):
    objective, view = OBJECTIVES[name].objective, client_view(OBJECTIVES[name], 0)
    state, _ = after_training(objective, blobs(0, 6), view)
    assert state.keys() == view.state.keys()
    assert form_of(state) == form_of(objective.init(linear(3, 4)))
    assert all(leaf.dtype == F64 for leaf in flatten(state).values())


def test_local_terms_of_different_methods_add_up():
    terms = [METHODS[name]().objective for name in ("fedntd", "feddyn")] + [OBJECTIVES["scaffold"].objective]
    both = combine(*terms)
    assert set(both.init(linear(3, 4))) == {"control", "dyn_gradient"}
    view = client_view(OBJECTIVES["scaffold"], 0)
    view = view._replace(state={**view.state, **client_view(OBJECTIVES["feddyn"], 0).state})
    batch = blobs(0, 6)
    expected = sum(loss_of(term, view.params, batch, view) for term in terms)
    torch.testing.assert_close(loss_of(both, view.params, batch, view), expected)
