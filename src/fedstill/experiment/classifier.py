"""A federated experiment as a scikit-learn classifier: fit, predict, predict_proba, score."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_consistent_length, check_is_fitted, column_or_1d, validate_data

from fedstill.core.errors import FedstillError
from fedstill.core.tree import to_device, tree_map
from fedstill.data import Source
from fedstill.data.contract import contract_of, federation_without_rows
from fedstill.data.given import from_data, is_frame, owner_name, read_given
from fedstill.data.source import as_array
from fedstill.engine import build_engine
from fedstill.experiment.build import build_federation, reading_options
from fedstill.experiment.config import Experiment
from fedstill.experiment.model import Network, build_network
from fedstill.experiment.run import run

TABLE_NETWORK = {"name": "mlp", "hidden": [64], "init": "torch"}
LOCAL = {"epochs": 2, "batch_size": 32, "lr": 0.1, "momentum": 0.9}


class BadData(FedstillError, ValueError):
    """A user's mistake, as a ValueError, which scikit-learn expects."""


class FederatedClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """Trains one model from the rows of many owners, round by round, behind scikit-learn's interface.

    method: as in an experiment: "fedavg", "fedprox(mu=0.1)", "scaffold+median".
    model: a network's name, a section such as {"name": "mlp", "hidden": [32]}, an nn.Module or a function that builds
        one; None: a small dense network for tables, "cnn" for images.
    rounds: rounds of training; all clients take part in each, unless `settings` has a cohort.
    clients: in how many parts the rows are split where `fit` gets no owners.
    partition: how they are split then: a scheme's name, or a section such as {"scheme": "lda", "alpha": 0.1}.
    local: the section [local] of an experiment; None: two epochs of momentum SGD in batches of 32.
    settings: any other keys and sections of an experiment, e.g. {"cohort": 5, "privacy": {...}}.

    After `fit`: classes_, n_features_in_, feature_names_in_ (of a DataFrame), history_ (a dict for each round, whose
    accuracy is that on the training rows), result_ (the Result), experiment_ and contract_.
    """

    def __init__(
        self,
        method: str = "fedavg",
        *,
        model: Any = None,
        rounds: int = 20,
        clients: int = 10,
        partition: Any = "iid",
        local: dict[str, Any] | None = None,
        settings: dict[str, Any] | None = None,
        seed: int = 0,
    ) -> None:
        self.method = method
        self.model = model
        self.rounds = rounds
        self.clients = clients
        self.partition = partition
        self.local = local
        self.settings = settings
        self.seed = seed

    def fit(self, X: Any, y: Any, groups: Any = None, run_dir: Any = None) -> Self:
        """Train on the rows of X (a DataFrame with numbers and words, an array or a tensor) and return self.

        groups: the owner of each row, or the name of a column, which is then no feature; each owner is a client. None:
            the rows are split into `clients` parts.
        run_dir: a folder for the run's files.
        """
        self._owner_column = groups if isinstance(groups, str) else ""
        if self._owner_column and is_frame(X) and self._owner_column in X.columns:
            X, groups = self._without_owners(X), X[self._owner_column]
        inputs, labels = self._checked(X, y)
        self.classes_, codes = np.unique(labels, return_inverse=True)
        try:
            experiment = self._experiment(inputs, groups)
            names, options = [str(name) for name in self.classes_], reading_options(experiment)
            source = from_data(inputs, codes, groups=groups, test=None, classes=names, **options)
            federation = build_federation(experiment, source)
            everybody = {} if "cohort" in (self.settings or {}) else {"cohort": federation.population}
            self.experiment_, self.contract_ = experiment.model_copy(update=everybody), contract_of(federation)
            self._trained_network = self._network()  # `predict` needs it, even if `model` is another one by then
            self.result_ = run(self.experiment_, federation=federation, model=self._trained_network, run_dir=run_dir)
        except FedstillError as error:
            raise BadData(str(error)) from error
        self.history_ = self.result_.history.rows
        return self

    def predict(self, X: Any) -> np.ndarray:
        """Return the most probable class of each row."""
        places = self.predict_proba(X).argmax(axis=1)
        answers: np.ndarray = self.classes_[places]
        return answers

    def predict_proba(self, X: Any) -> np.ndarray:
        """Return the probability of each class (n, K) by the last model, in the order of classes_."""
        check_is_fitted(self)
        inputs, _ = self._checked(self._without_owners(X), reset=False)
        federation = federation_without_rows(self.contract_)
        task = Source(federation.train, federation.test)
        try:
            samples = read_given(inputs, task)
            if samples.skipped:
                raise FedstillError(f"X: {len(samples.skipped)} rows cannot be read: fill or drop them")
            network = build_network(self.experiment_, federation, self._trained_network)
            # float64, so that the answer for a row does not depend on the rows beside it
            device = self.experiment_.engine.device
            engine = build_engine("auto", device, model=network, federation=federation, precision="float64")
            weights = tree_map(lambda leaf: leaf.double() if leaf.is_floating_point() else leaf, self.result_.weights)
            scores = engine.outputs(to_device(weights, engine.device), samples.x, features=False).logits.double().cpu()
        except FedstillError as error:
            raise BadData(str(error)) from error
        probabilities: np.ndarray = torch.softmax(scores, dim=1).numpy()
        return probabilities

    def _without_owners(self, X: Any) -> Any:
        """Return a table without the column that named the owners in `fit`; new rows may have it or not."""
        if not self._owner_column or not is_frame(X):
            return X
        return X[[column for column in X.columns if column != self._owner_column]]

    def _checked(self, X: Any, y: Any = "no_validation", *, reset: bool = True) -> tuple[Any, Any]:
        """Return inputs and labels once scikit-learn has found them fit, and note the number and names of columns."""
        if is_frame(X):  # its cells are checked by the rules for tables, because words are no numbers
            validate_data(self, X, y, reset=reset, skip_check_array=True)
            inputs, labels = X, y
        else:
            X = as_array(X) if isinstance(X, torch.Tensor) else X
            inputs = validate_data(self, X, y, reset=reset, allow_nd=True)
            inputs, labels = (inputs, y) if isinstance(y, str) else inputs
        if not isinstance(y, str):
            labels = column_or_1d(as_array(labels))
            check_consistent_length(inputs, labels)
            check_classification_targets(labels)
        return inputs, labels

    def _network(self) -> Network | None:
        """Return the network that was given in Python; None where `model` is a name, a section or nothing."""
        return None if self.model is None or isinstance(self.model, str | dict) else self.model

    def _experiment(self, inputs: Any, groups: Any) -> Experiment:
        """Return the experiment that the parameters and the data stand for, with a cohort of one."""
        if groups is not None:
            partition = {"scheme": "natural", "keys": owner_name(inputs, groups), "clients": 0}
        else:
            scheme = {"scheme": self.partition} if isinstance(self.partition, str) else self.partition
            partition = {**scheme, "clients": min(self.clients, len(inputs))}
        if twice := [key for key in self.get_params(deep=False) if key in (self.settings or {})]:
            raise FedstillError(
                f"settings: '{twice[0]}' is a parameter of FederatedClassifier: give {twice[0]}=... instead, because a "
                "search over the parameter would change nothing"
            )
        network = TABLE_NETWORK if is_frame(inputs) or inputs.ndim == 2 else "cnn"
        table = {
            "rounds": self.rounds,
            "seed": self.seed,
            "method": self.method,
            "model": self.model if isinstance(self.model, str | dict) else network,
            "local": LOCAL if self.local is None else self.local,
            "partition": partition,
            "cohort": 1,
        }
        return Experiment.model_validate({**table, **(self.settings or {})})
