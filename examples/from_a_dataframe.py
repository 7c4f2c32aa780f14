"""From a DataFrame to a model, cell by cell: three clinics, one model, and what each clinic could have had alone."""

# %% A table with numbers and words, and the clinic that owns each row.
import tempfile

import numpy as np
import pandas as pd
from sklearn.model_selection import GroupKFold, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import fedstill

random = np.random.default_rng(0)
ROWS = 900
patients = pd.DataFrame(
    {
        "age": random.normal(55, 12, ROWS),
        "pressure": random.normal(130, 15, ROWS),
        "smokes": random.choice(["no", "yes"], ROWS, p=[0.7, 0.3]),
    }
)
seen = patients["age"] + random.normal(0, 3, ROWS)  # clinics see patients of different ages
clinic = np.select([seen < 50, seen < 60], ["north", "south"], "west")
risk = (patients["age"] - 55) / 12 + (patients["pressure"] - 130) / 15 + 1.5 * (patients["smokes"] == "yes")
state = np.where(risk + random.normal(0, 0.5, ROWS) > 0.5, "ill", "well")
train = np.arange(ROWS) % 4 > 0  # every fourth patient is new to all clinics

# %% A classifier as scikit-learn has them. Each clinic is a client, and its rows stay with it.
federated = fedstill.FederatedClassifier("fedavg", rounds=10, local={"epochs": 2, "batch_size": 20, "lr": 0.1})
federated.fit(patients[train], state[train], groups=clinic[train])
print(f"accuracy together: {federated.score(patients[~train], state[~train]):.3f}")

# %% Each clinic alone, with the same network and the same budget.
for name in np.unique(clinic):
    own = train & (clinic == name)
    alone = fedstill.FederatedClassifier(rounds=10, clients=1, local=federated.local)
    alone.fit(patients[own], state[own])
    print(f"accuracy of {name} alone: {alone.score(patients[~train], state[~train]):.3f}")

# %% In a pipeline, with cross-validation over clinics: how good is it for a clinic that took no part?
numbers = patients[["age", "pressure"]]
pipeline = make_pipeline(StandardScaler(), fedstill.FederatedClassifier(rounds=5, clients=4))
scores = cross_val_score(pipeline, numbers, state, groups=clinic, cv=GroupKFold(3))
print("accuracy for a clinic that took no part:", scores.round(3))

# %% An experiment gives more: any method, files of the run, calibrated predictions.
experiment = fedstill.Experiment(
    rounds=10,
    model={"name": "mlp", "hidden": [32], "init": "torch"},
    local={"epochs": 2, "batch_size": 20, "lr": 0.1},
    method="scaffold",
)
with tempfile.TemporaryDirectory() as folder:
    fedstill.run(experiment, data=(patients[train], state[train], clinic[train]), run_dir=folder, pictures=False)
    run = fedstill.load_run(folder)
    print(pd.DataFrame(run.history)[["round", "accuracy"]].tail(2).to_string(index=False))
    answers = run.predict(patients[~train])
    print(answers)
    print(f"accuracy for new patients: {np.mean(np.array(answers.labels) == state[~train]):.3f}")
