"""Methods that run together: terms add up, server steps line up, and a clash is told by name."""

import dataclasses

import pytest
import torch
from by_hand import blobs, federate_by_hand, linear, linear_model, local_view
from running import changed_on_the_way
from toy import same_bits

from fedstill.compose.combine import combine, on_the_way
from fedstill.compose.join import join
from fedstill.compose.wrappers import rollback
from fedstill.core.errors import FedstillError
from fedstill.core.tree import stack
from fedstill.core.types import Method, Objective, Round, Stage, Uploads, Weights
from fedstill.local.labels import smoothed_cross_entropy
from fedstill.local.terms import cross_entropy, proximal
from fedstill.methods import fedavg, fedavgm, fednova, fedprox, scaffold
from fedstill.methods.lookup import build_method
from fedstill.server import average, sgd

DATA = [blobs(k, 8 + 6 * k) for k in range(4)]
COHORTS = [[0, 1, 2], [3, 1], [2, 3, 0]]


def train(method, rounds=3):
    how = {"steps": 3, "lr": 0.2, "momentum": 0.5, "cohorts": COHORTS}
    return federate_by_hand(method, linear_model(), DATA, linear(3, 4, seed=1), rounds=rounds, **how).weights[-1]


def uploads_of(ends, start):
    size = torch.ones(len(ends), dtype=torch.float64)
    uploads = Uploads(stack(ends), size, size, size, size, {}, None, torch.arange(len(ends)))
    return Round(1, start, uploads, linear_model(), len(ends), None, 0, None)


def mixture(text):
    (phase,) = build_method(text)
    return phase.method


def test_one_method_comes_back_as_it_is():
    alone = fedprox()
    assert join({"fedprox": alone}) is alone


def test_cross_entropy_counts_once():
    assert same_bits(train(mixture("fedavg+fedprox(mu=0.0)")), train(fedavg()))


def test_a_mixture_is_the_sum_of_its_terms_and_the_chain_of_its_steps():
    by_hand = Method(combine(cross_entropy(), proximal(0.3)), average("size"), (sgd(1.0, momentum=0.7),))
    assert same_bits(train(mixture("fedprox(mu=0.3)+fedavgm(beta=0.7)")), train(by_hand))
    assert not same_bits(train(by_hand), train(fedprox(mu=0.3)))


@pytest.mark.parametrize("text", ["fedprox(mu=0.3)+scaffold", "scaffold+fedprox(mu=0.3)"])
def test_with_scaffold_models_are_averaged_evenly_as_the_controls_are(text):
    even = train(mixture("scaffold+fedprox(mu=0.3)+average(weighting=uniform)"))
    assert torch.allclose(train(mixture(text)).params["weight"], even.params["weight"], atol=1e-12)
    by_size = train(mixture("scaffold+fedprox(mu=0.3)+average(weighting=size)"))
    assert not torch.allclose(by_size.params["weight"], even.params["weight"], atol=1e-6)


def test_fednovas_average_stands_in_for_the_plain_one():
    names = [step.name for step in mixture("fedprox+fednova").steps]
    assert names == [fednova().aggregate.name]


def test_a_refinement_runs_after_the_servers_step_whatever_the_order():
    for text in ("feddf+fedavgm", "fedavgm+feddf"):
        stages = [step.stage for step in mixture(text).steps]
        assert stages == [Stage.AGGREGATE, Stage.MOVE, Stage.REFINE]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("fedadam+fedavgm", "fedadam and fedavgm both decide the server's step"),
        ("feddyn+fedavgm", "feddyn and fedavgm both decide the server's step"),
    ],
)
def test_two_methods_that_want_one_place_are_named(text, told):
    with pytest.raises(FedstillError, match=told):
        build_method(text)


def replaced_risk(name):
    plain = cross_entropy()
    return Method(dataclasses.replace(plain, risk=name), average())


def test_two_ways_to_fit_the_labels_clash_and_one_replaces_the_cross_entropy():
    with pytest.raises(FedstillError, match=r"a \(by soft\) and b \(by hard\) both replace the cross-entropy"):
        join({"a": replaced_risk("soft"), "b": replaced_risk("hard")})
    both = join({"a": fedprox(), "b": replaced_risk("soft")})
    assert [term.risk for term in both.objective.terms] == ["soft", ""]


def test_two_methods_with_one_client_slot_are_named():
    with pytest.raises(FedstillError, match="one and two both keep 'control' on a client"):
        join({"one": scaffold(), "two": scaffold()})


def test_two_aggregates_that_differ_clash_until_the_run_names_one():
    clash = r"scaffold \(average, uniform\) and fednova \(normalized_average, size\) aggregate differently"
    cure = r"scaffold\+fednova\+average\(weighting='uniform'\), .*\[server\] aggregate"
    with pytest.raises(FedstillError, match=f"{clash}: .*{cure}"):
        build_method("scaffold+fednova")
    assert mixture("scaffold+fednova+average(weighting=uniform)").aggregate == average("uniform")
    assert mixture("scaffold+fednova+normalized_average").aggregate.name == "normalized_average"


def test_the_average_by_size_gives_way_in_methods_of_ones_own_too():
    mine = Method(cross_entropy(), average())
    for parts in ({"mine": mine, "scaffold": scaffold()}, {"scaffold": scaffold(), "mine": mine}):
        assert join(parts).aggregate == average("uniform")


def test_two_methods_with_one_server_step_are_named():
    with pytest.raises(FedstillError, match="feddf and avglogit both run the server step 'distill': use one of them"):
        mixture("feddf+avglogit")


def test_something_must_fit_the_labels():
    penalty = Method(proximal(0.1), average())
    with pytest.raises(FedstillError, match="fits the labels"):
        join({"a": penalty, "b": Method(Objective(proximal(1.0).loss), average())})


def test_a_wrapped_average_is_not_taken_for_the_plain_one():
    mine = Method(cross_entropy(), rollback(average(), 0.5))
    for methods in ({"fedprox": fedprox(), "mine": mine}, {"mine": mine, "fedprox": fedprox()}):
        with pytest.raises(FedstillError, match="aggregate differently"):
            join(methods)


def test_terms_that_differentiate_the_risk_take_the_one_that_replaced_it():
    """SCAFFOLD's option I keeps the gradient of what the client really minimises."""
    batch = blobs(1, 12)
    for text, expected in (
        ("scaffold(option=I)+label_smoothing(epsilon=0.5)", smoothed_cross_entropy(0.5)),
        ("scaffold(option=I)+fedprox", cross_entropy()),
    ):
        objective = mixture(text).objective
        start = linear(3, 4, seed=2)
        view = local_view(start, received={"control": start.params}, state={"control": start.params})

        def risk(params, term=expected, view=view):
            return term.loss(linear_model().apply(Weights(params, {}), batch.x)[0], batch, view)

        found = objective.measure(linear_model(), batch, view)["start_gradient"]
        wanted = torch.func.grad(risk)(start.params)
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


def test_feddyn_with_fednovas_average_still_reaches_the_joint_optimum():
    """h is the mean of the clients' g_k, however the candidate was made: two quadratics, 2 and 20 steps."""
    method = mixture("feddyn(alpha=0.5)+fednova+normalized_average(weighting=uniform)")
    stages = [step.stage for step in method.steps]
    assert stages == [Stage.AGGREGATE, Stage.MOVE]
    moves = method.steps[1]
    start, ends = linear(3, 4, seed=1), [linear(3, 4, seed=s) for s in (2, 3)]
    round = uploads_of(ends, start)
    _, state = moves.apply(start, moves.init(start), round)  # a candidate that did not move at all
    wanted = {n: -0.5 * (sum(e.params[n] for e in ends) / 2 - p) for n, p in start.params.items()}
    torch.testing.assert_close(state["dyn_mean"], wanted, rtol=0, atol=1e-12)


def test_what_changes_uploads_on_the_way_runs_in_turn():
    def adding(number):
        def transmit(uploads, start, seed):
            return [*uploads, (number, seed)]

        return transmit

    methods = {
        str(number): changed_on_the_way(method, adding(number))
        for number, method in enumerate((fedprox(), fedavgm(), fedavg()))
    }
    seen = on_the_way(join(methods), [], None, 0)
    assert [number for number, _ in seen] == [0, 1, 2]
    assert len({seed for _, seed in seen}) == 3, "two kinds of noise must not be the same noise"


def test_every_pair_of_registered_methods_joins_or_says_why_not():
    from fedstill.methods import METHODS

    for one in METHODS:
        for two in METHODS:
            if one != two:
                told = ""
                try:
                    both = mixture(f"{one}+{two}")
                except FedstillError as error:
                    told = str(error)
                if told:
                    assert one in told
                    assert two in told
                else:
                    alone = build_method(one)[0].method.objective.needs | build_method(two)[0].method.objective.needs
                    assert both.objective.needs == alone
