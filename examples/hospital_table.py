"""Write the table of docs/tutorial-data.md: patients of five hospitals, with gaps, a patient number and a ward.

    python examples/hospital_table.py        writes patients.csv and new_patients.csv into this folder

The measurements are scikit-learn's breast cancer set (569 patients). Which hospital a patient belongs to is drawn here:
a clinic for difficult cases sees mostly malignant tumours, a screening centre mostly benign ones.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
from sklearn.datasets import load_breast_cancer

# how many malignant tumours come to a hospital for one benign tumour, relative to the others
HOSPITALS = {"Altona": 2.0, "Barmbek": 1.0, "City Clinic": 8.0, "Harbour": 0.5, "Screening Centre": 0.1}
COLUMNS = ["mean radius", "mean texture", "mean smoothness", "mean compactness", "mean symmetry", "worst area"]


def patients(seed: int = 0) -> pd.DataFrame:
    """Return one row a patient: the number, the hospital, the ward, six measurements and the diagnosis."""
    random, bunch = np.random.default_rng(seed), load_breast_cancer(as_frame=True)
    table = bunch.data[COLUMNS].rename(columns=lambda name: name.replace(" ", "_"))
    malignant = bunch.target.to_numpy() == 0
    chances = np.where(malignant[:, None], list(HOSPITALS.values()), 1.0)
    chances /= chances.sum(1, keepdims=True)
    drawn = (chances.cumsum(1) > random.random((len(table), 1))).argmax(1)
    table.insert(0, "patient_id", [f"P{number:04}" for number in range(len(table))])
    table.insert(1, "hospital", np.array(list(HOSPITALS))[drawn])
    table.insert(2, "ward", random.choice(["day", "surgery", "night"], len(table)))
    table["diagnosis"] = np.where(malignant, "malignant", "benign")
    for column in ("mean_texture", "ward"):  # gaps, as real tables have them
        table.loc[random.random(len(table)) < 0.05, column] = np.nan
    return table


def main(folder: str | Path = ".") -> None:
    table = patients()
    new = table.sample(69, random_state=1)
    table.drop(new.index).to_csv(Path(folder) / "patients.csv", index=False)
    new.drop(columns=["diagnosis"]).to_csv(Path(folder) / "new_patients.csv", index=False)
    print("patients.csv: 500 patients of", ", ".join(HOSPITALS))
    print("new_patients.csv: 69 patients without a diagnosis")


if __name__ == "__main__":
    main()
