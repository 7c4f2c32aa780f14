"""Typical mistakes in a method of one's own: each is one line that names the part, the place and the cure."""

import dataclasses

import pytest
import running
import torch
from quick import EITHER_ENGINE
from run_helpers import toy_federation
from typer.testing import CliRunner

import fedstill
from fedstill import Method, Need, Objective, ServerStep, combine
from fedstill.about.explain import explain
from fedstill.cli import app
from fedstill.compose.combine import weighted_mean
from fedstill.compose.wrappers import every, report_only, rollback
from fedstill.core.errors import FedstillError
from fedstill.core.types import Aggregate, Output, Stage, Weights
from fedstill.local import cross_entropy, proximal, start_model
from fedstill.server import average

HERE = r"\(test_author_mistakes.py, line \d+\)"


def federate(method, engine="batched"):
    data = toy_federation()
    model = fedstill.build_model("mlp", input_shape=(4,), classes=3, hidden=(8,))
    training = fedstill.Training(steps=2, batch_size=5, lr=0.1)
    return running.federate(
        method=method, model=model, federation=data, training=training, rounds=1, cohort=3, engine=engine, device="cpu"
    )


def with_term(loss, **how):
    return Method(combine(cross_entropy(), Objective(loss, **how)), average())


def counted_term():
    def loss(output, batch, local):  # NaN > 0 is False: no number would tell that the counts are not there
        kept = output.logits.masked_fill(local.label_counts > 0, 0.0)
        return weighted_mean(kept.square().sum(-1), batch.weight)

    return Objective(loss)


@pytest.mark.parametrize("engine", EITHER_ENGINE)
def test_label_counts_that_are_read_and_not_declared_are_told_with_the_line(engine):
    told = rf"^counted_term {HERE}: .* reads local.label_counts .* needs=frozenset\({{Need.LABEL_COUNTS}}\)"
    with pytest.raises(FedstillError, match=told):
        federate(Method(combine(cross_entropy(), counted_term()), average()), engine)
    declared = dataclasses.replace(counted_term(), needs=frozenset({Need.LABEL_COUNTS}))
    assert federate(Method(combine(cross_entropy(), declared), average()), engine).history.rows[0]["accepted"] == 3


@pytest.mark.parametrize("engine", EITHER_ENGINE)
def test_whether_label_counts_are_there_may_be_asked_and_they_may_be_printed(engine):
    seen = []

    def loss(output, batch, local):
        seen.append(f"{bool(local.label_counts.isnan().all())} {local.label_counts!r}" if engine == "looped" else "")
        return output.logits.sum() * 0.0

    federate(with_term(loss), engine)
    assert all(text.startswith("True") and "nan" in text for text in seen if engine == "looped")


@pytest.mark.parametrize("engine", EITHER_ENGINE)
def test_features_of_a_frozen_model_that_are_not_declared_are_told(engine):
    def loss(output, batch, local):
        return weighted_mean(local.frozen["start"].features.square().mean(-1), batch.weight)

    with pytest.raises(FedstillError, match=rf"{HERE}: .* features of a frozen model .*Need.FEATURES"):
        federate(with_term(loss, frozen={"start": start_model}), engine)


def hasty_step():
    def apply(candidate, state, round):
        return candidate

    return ServerStep("hasty", apply, stage=Stage.KEEP)


@pytest.mark.parametrize("wrap", [lambda step: step, lambda step: every(1, step), lambda step: rollback(step, 0.5)])
def test_a_server_step_that_returns_only_the_candidate_is_named(wrap):
    with pytest.raises(FedstillError, match=rf"server step hasty_step {HERE} returned only the candidate: .*state"):
        federate(Method(cross_entropy(), average(), (wrap(hasty_step()),)))


def test_so_it_is_where_it_stands_alone_or_is_only_reported():
    for steps in ((hasty_step(),), (average(), report_only(hasty_step()))):
        with pytest.raises(FedstillError, match="hasty_step"):
            federate(Method(cross_entropy(), steps[0], steps[1:]))


@pytest.mark.parametrize(
    ("returned", "told"),
    [
        (lambda candidate, state: None, "returned nothing"),
        (lambda candidate, state: (candidate, None), r"returned \(Weights, NoneType\)"),
        (lambda candidate, state: (candidate.params, state), r"returned \(dict, dict\)"),
        (lambda candidate, state: candidate.params, "returned a dict"),
    ],
)
def test_other_things_that_a_server_step_cannot_return_are_told_in_words(returned, told):
    step = ServerStep("odd", lambda candidate, state, round: returned(candidate, state))
    with pytest.raises(FedstillError, match=told):
        federate(Method(cross_entropy(), average(), (step,)))


def stacked_aggregate(change):
    def apply(candidate, state, round):
        params, buffers = round.uploads.weights
        return Weights({name: change(leaf) for name, leaf in params.items()}, buffers), state

    return Aggregate("odd", apply)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda leaf: leaf, r"is \(3, 8, 4\) torch.float32, and must be \(8, 4\) .*: reduce the first dimension"),
        (lambda leaf: leaf.mean(0).double(), r"is \(8, 4\) torch.float64, and must be \(8, 4\) torch.float32$"),
        (lambda leaf: 0.0, r"is \(\) None, and must be"),
    ],
)
def test_an_aggregate_that_makes_another_form_of_model_is_named_with_the_tensor(change, told):
    with pytest.raises(FedstillError, match=rf"server step stacked_aggregate {HERE} returned another form .*{told}"):
        federate(Method(cross_entropy(), stacked_aggregate(change)))


def test_a_candidate_without_all_tensors_is_named():
    step = ServerStep("odd", lambda candidate, state, round: (Weights({}, candidate.buffers), state))
    with pytest.raises(FedstillError, match=r"its params must be a dict with the names of round.start.params"):
        federate(Method(cross_entropy(), average(), (step,)))


def per_sample_term():
    return Objective(lambda output, batch, local: output.logits.square().sum(-1))


@pytest.mark.parametrize("engine", EITHER_ENGINE)
@pytest.mark.parametrize("objective", [combine(cross_entropy(), per_sample_term()), per_sample_term()])
def test_a_loss_with_one_value_for_each_sample_is_named(engine, objective):
    told = rf"local term per_sample_term {HERE} returned values of shape \(5,\): .*weighted_mean"
    with pytest.raises(FedstillError, match=told):
        federate(Method(objective, average()), engine)


def test_a_loss_that_returns_nothing_is_named_and_a_plain_number_may_be_added():
    with pytest.raises(FedstillError, match="returned a NoneType"):
        federate(with_term(lambda output, batch, local: None))
    assert federate(with_term(lambda output, batch, local: 0.0)).history.rows[0]["accepted"] == 3


def branching(output: Output, batch, local):
    value = weighted_mean(output.logits.mean(-1), batch.weight)
    return value if value > 0 else -value


LINES = {
    "branches on the value of a tensor": branching,
    "calls .item": lambda output, batch, local: (
        weighted_mean(output.logits.mean(-1), batch.weight) * weighted_mean(output.logits.mean(-1), batch.weight).item()
    ),
    "makes a shape that depends on values": lambda output, batch, local: output.logits[output.logits > 0].sum() * 0.0,
    "calls F.one_hot": lambda output, batch, local: (
        torch.nn.functional.one_hot(batch.y).sum() * output.logits.mean() * 0.0
    ),
}


@pytest.mark.parametrize("does", LINES)
def test_what_cannot_run_for_many_clients_at_once_is_told_by_the_rule_it_breaks(does):
    with pytest.raises(FedstillError, match=rf"{HERE} {does}.* engine.name = 'looped' .*adding-a-method.md"):
        federate(with_term(LINES[does]))
    assert federate(with_term(LINES[does]), "looped").history.rows[0]["accepted"] == 3


def test_so_it_is_in_what_a_client_sends_after_training():
    def finish(local, measured):
        return {}, {"told": torch.tensor(local.size.item())}

    with pytest.raises(FedstillError, match=rf"{HERE} calls .item"):
        federate(with_term(lambda output, batch, local: output.logits.sum() * 0.0, finish=finish))


def test_any_other_error_of_ones_own_code_keeps_its_traceback():
    with pytest.raises(KeyError, match="not there"):
        federate(with_term(lambda output, batch, local: local.state["not there"]))


OWN = '''
from fedstill import Method, Objective, ServerStep, combine
from fedstill.compose.combine import weighted_mean
from fedstill.local import cross_entropy
from fedstill.server import average


def small_logits(strength):
    """strength mean |z|^2."""
    square = lambda logits: logits.square().mean(-1)
    return Objective(lambda output, batch, local: strength * weighted_mean(square(output.logits), batch.weight))


def tell():
    """Notes the round."""
    return ServerStep("tell", lambda candidate, state, round: (candidate, state))


def mine(*, strength=0.1):
    """Mine: small logits."""
    return Method(combine(cross_entropy(), small_logits(strength)), average(), (tell(),))


def hasty(*, strength):
    """Hasty: it needs a strength."""
    return mine(strength=strength)
'''


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("method", ["mine", "hasty(strength=1.0)"])
def test_explain_lists_ones_own_parts_with_what_they_do(folder, method):
    found = explain(f"mine.py:{method}")["parts"]
    assert [(part["part"], part["where"]) for part in found] == [
        ("cross_entropy", "client"), ("small_logits", "client"), ("average", "server"), ("tell", "server"),
    ]  # fmt: skip
    assert [part["does"] for part in found][1::2] == ["strength mean |z|^2.", "Notes the round."]


def test_a_required_option_without_a_type_hint_is_told_without_one(folder):
    found = CliRunner().invoke(app, ["explain", "mine.py:hasty"])
    assert found.exit_code == 2
    assert found.stderr.splitlines()[-1].endswith(
        "method.strength is missing: mine.py:hasty needs it: set it, or give it a default"
    )


def plain_mean(output, batch, local):
    return output.logits.square().mean()


def mean_over_all_rows(output, batch, local):
    return (output.logits.square().mean(-1) * batch.weight).mean()


def distance_to_the_start(output, batch, local):  # zero at the start, where client and start are the same model
    return (output.logits - local.frozen["start"].logits).square().mean()


@pytest.mark.parametrize("engine", EITHER_ENGINE)
@pytest.mark.parametrize(
    ("loss", "how"),
    [(plain_mean, {}), (mean_over_all_rows, {}), (distance_to_the_start, {"frozen": {"start": start_model}})],
)
def test_a_mean_that_counts_padding_is_refused_before_anybody_trains(engine, loss, how):
    with pytest.raises(FedstillError, match=rf"local term {loss.__name__} {HERE} counts padding: .*weighted_mean"):
        federate(with_term(loss, **how), engine)


def test_terms_that_fit_no_label_are_refused_unless_they_say_so():
    def small_logits(output, batch, local):
        return weighted_mean(output.logits.square().mean(-1), batch.weight)

    def fits(output, batch, local):
        chosen = output.logits.log_softmax(-1).gather(-1, batch.y.unsqueeze(-1)).squeeze(-1)
        return -weighted_mean(chosen, batch.weight)

    for objective in (proximal(0.1), Objective(small_logits), combine(proximal(0.1), Objective(small_logits))):
        with pytest.raises(FedstillError, match=r"no local term of this method fits the labels.*cross_entropy.*risk="):
            federate(Method(objective, average()))
    for objective in (Objective(fits), Objective(small_logits, risk="small_logits")):
        assert federate(Method(objective, average())).history.rows[0]["accepted"] == 3


def test_two_terms_that_fit_the_labels_are_refused():
    twice = combine(cross_entropy(), proximal(0.1), cross_entropy())
    with pytest.raises(FedstillError, match="2 local terms that fit the labels, cross_entropy and cross_entropy"):
        federate(Method(twice, average()))
