"""Write people.csv: breast cancer data of scikit-learn, divided among twenty hospitals that differ."""

import csv

from sklearn.datasets import load_breast_cancer

data = load_breast_cancer()
rows = sorted(
    zip(data.data.tolist(), data.target.tolist(), strict=True)
)  # by the first feature, so that hospitals differ
with open("people.csv", "w", newline="") as file:
    writer = csv.writer(file)
    writer.writerow([*data.feature_names, "diagnosis", "hospital"])
    writer.writerows([*x, ("malignant", "benign")[y], f"hospital-{i // 29}"] for i, (x, y) in enumerate(rows))
