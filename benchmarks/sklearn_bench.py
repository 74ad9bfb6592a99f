"""Estimators beside those of scikit-learn and torch: same data, net, batches, epochs, one thread.

Seconds are CPU time of one thread, so that other processes hardly affect them. Rounds
are interleaved: in each, every contestant trains once. The table gives medians of seconds, and
medians over rounds of the ratio to scikit-learn.

    OMP_NUM_THREADS=1 python benchmarks/sklearn_bench.py            # prints the table
    OMP_NUM_THREADS=1 python benchmarks/sklearn_bench.py --write    # docs/sklearn.md, docs/images
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import platform
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import make_classification, make_regression
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import SGDRegressor
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.preprocessing import scale

from onnxtrain.sklearn import OnnxClassifier, OnnxRegressor
from onnxtrain.sklearn.nets import dense_weights

HIDDEN = (50, 10)
DOCS = Path(__file__).parents[1] / "docs"
BEGIN, END = "<!-- benchmark -->", "<!-- /benchmark -->"


@dataclasses.dataclass
class Result:
    """One training: how long it took, the loss of each epoch, and that of the result."""

    seconds: float
    curve: list[float]
    loss: float


@dataclasses.dataclass(frozen=True)
class Case:
    """A task that several libraries train on."""

    name: str
    kind: str
    rows: int
    columns: int
    epochs: int
    rounds: int
    batch: int = 64
    classes: int = 1

    def data(self) -> tuple[np.ndarray, np.ndarray]:
        """Return features and targets."""
        if self.kind != "classifier":
            X, y = make_regression(self.rows, self.columns, noise=5.0, random_state=0)
            return X.astype(np.float32), scale(y).astype(np.float32)
        X, y = make_classification(
            self.rows,
            self.columns,
            n_informative=20,
            n_classes=self.classes,
            class_sep=2.0,
            random_state=0,
        )
        return scale(X).astype(np.float32), y


CASES = [
    Case("linear, 1,000 x 100", "linear", 1000, 100, epochs=100, rounds=7),
    Case("linear, 1,000 x 100, batch 256", "linear", 1000, 100, epochs=100, rounds=7, batch=256),
    Case("linear, 60,000 x 784", "linear", 60_000, 784, epochs=2, rounds=3),
    Case("MLP regressor, 1,000 x 100", "regressor", 1000, 100, epochs=100, rounds=5),
    Case("MLP regressor, 60,000 x 784", "regressor", 60_000, 784, epochs=2, rounds=3),
    Case("MLP classifier, 1,000 x 100", "classifier", 1000, 100, epochs=100, rounds=5, classes=2),
    Case("MLP classifier, 60,000 x 784", "classifier", 60_000, 784, epochs=2, rounds=3, classes=10),
]
RATE = {"linear": 5e-3, "regressor": 1e-3, "classifier": 1e-3}


def final_loss(case: Case, X: np.ndarray, y: np.ndarray, predict: Callable) -> float:
    """Return the loss of the trained model over all data, by one formula for everybody."""
    if case.kind != "classifier":
        return float(np.mean((predict(X).reshape(-1) - y) ** 2) / 2)
    p = np.clip(predict(X), 1e-10, 1)
    return float(-np.log(p[np.arange(len(y)), y]).mean())


def with_sklearn(case: Case, X: np.ndarray, y: np.ndarray, seed: int) -> Result:
    if case.kind == "linear":
        model = SGDRegressor(
            penalty=None,
            learning_rate="constant",
            eta0=RATE["linear"] / case.batch,  # it steps after each row
            max_iter=case.epochs,
            tol=None,
            random_state=seed,
        )
    else:
        kind = MLPClassifier if case.kind == "classifier" else MLPRegressor
        model = kind(
            hidden_layer_sizes=HIDDEN,
            batch_size=case.batch,
            max_iter=case.epochs,
            learning_rate_init=RATE[case.kind],
            alpha=0.0,
            tol=0.0,
            n_iter_no_change=case.epochs + 1,
            random_state=seed,
        )
    return timed(case, model, X, y)


def with_onnxtrain(case: Case, X: np.ndarray, y: np.ndarray, seed: int) -> Result:
    kind = OnnxClassifier if case.kind == "classifier" else OnnxRegressor
    linear = case.kind == "linear"
    model = kind(
        hidden_layer_sizes=() if linear else HIDDEN,
        optimizer="sgd" if linear else "adam",
        learning_rate=RATE[case.kind],
        batch_size=case.batch,
        max_iter=case.epochs,
        tol=None,
        threads=1,
        random_state=seed,
    )
    return timed(case, model, X, y)


def timed(case: Case, model, X: np.ndarray, y: np.ndarray) -> Result:
    start = time.process_time()
    model.fit(X, y)
    seconds = time.process_time() - start
    predict = model.predict_proba if case.kind == "classifier" else model.predict
    return Result(seconds, list(getattr(model, "loss_curve_", [])), final_loss(case, X, y, predict))


def with_torch(case: Case, X: np.ndarray, y: np.ndarray, seed: int) -> Result:
    random = np.random.RandomState(seed)
    linear, classes = case.kind == "linear", case.classes
    start = time.process_time()
    sizes = [case.columns, *(() if linear else HIDDEN), classes if classes > 2 else 1]
    layers: list[torch.nn.Module] = []
    for a, b in itertools.pairwise(sizes):
        layers += [torch.nn.Linear(a, b), torch.nn.ReLU()]
    net = torch.nn.Sequential(*layers[:-1])
    # The same first weights, and below the same order of rows: only the libraries differ.
    for i, array in enumerate(dense_weights(sizes, "relu", random).values()):
        parameter = list(net.parameters())[i]
        parameter.data = torch.from_numpy(np.ascontiguousarray(array.T))
    kind = torch.optim.SGD if linear else torch.optim.Adam
    optimizer = kind(net.parameters(), lr=RATE[case.kind])
    x = torch.from_numpy(X)
    if classes > 2:
        loss, t = torch.nn.CrossEntropyLoss(), torch.from_numpy(y)
    elif classes == 2:
        loss, t = torch.nn.BCEWithLogitsLoss(), torch.from_numpy(y).float().reshape(-1, 1)
    else:
        t = torch.from_numpy(y).reshape(-1, 1)
        loss = lambda p, t: ((p - t) ** 2).mean() / 2  # noqa: E731
    curve = []
    for _ in range(case.epochs):
        total = 0.0
        for pick in torch.from_numpy(random.permutation(len(x))).split(case.batch):
            optimizer.zero_grad()
            value = loss(net(x[pick]), t[pick])
            value.backward()
            optimizer.step()
            total += value.item() * len(pick)
        curve.append(total / len(x))
    seconds = time.process_time() - start

    def predict(X: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            raw = net(torch.from_numpy(X))
            if classes > 2:
                return raw.softmax(1).numpy()
            if classes == 2:
                return torch.cat([1 - raw.sigmoid(), raw.sigmoid()], 1).numpy()
            return raw.numpy()

    return Result(seconds, curve, final_loss(case, X, y, predict))


CONTESTANTS = {"scikit-learn": with_sklearn, "onnxtrain": with_onnxtrain, "torch": with_torch}


def measure(case: Case) -> tuple[list[str], dict[str, list[float]]]:
    """Return a row of the table, and a loss curve for each contestant."""
    X, y = case.data()
    first = with_onnxtrain(dataclasses.replace(case, epochs=1), X, y, 0).seconds
    again = with_onnxtrain(dataclasses.replace(case, epochs=1), X, y, 0).seconds
    runs: dict[str, list[Result]] = {name: [] for name in CONTESTANTS}
    for seed in range(case.rounds):
        for name, train in CONTESTANTS.items():
            runs[name].append(train(case, X, y, seed))
    seconds = {n: float(np.median([r.seconds for r in rs])) for n, rs in runs.items()}
    losses = {n: spread([r.loss for r in rs]) for n, rs in runs.items()}
    pairs = zip(runs["scikit-learn"], runs["onnxtrain"], strict=True)
    ratio = float(np.median([a.seconds / b.seconds for a, b in pairs]))
    row = [
        case.name,
        str(case.epochs),
        *(f"{seconds[n]:.3f}" for n in CONTESTANTS),
        f"{ratio:.2f}x",
        f"{max(first - again, 0.0):.2f}",
        *(losses[n] for n in CONTESTANTS),
    ]
    print(" | ".join(row), flush=True)
    return row, {n: rs[0].curve for n, rs in runs.items() if rs[0].curve}


def spread(losses: list[float]) -> str:
    """Return the median and, in brackets, the smallest and the largest."""
    return f"{np.median(losses):.3g} ({min(losses):.2g} to {max(losses):.2g})"


def table(rows: list[list[str]]) -> str:
    head = ["task", "epochs"]
    head += [f"{n}, s" for n in CONTESTANTS]
    head += ["faster than scikit-learn", "first build, s", *(f"loss, {n}" for n in CONTESTANTS)]
    lines = ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 1)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines)


def draw(curves: dict[str, dict[str, list[float]]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    wanted = {n: c for n, c in curves.items() if max(map(len, c.values())) > 5}
    figure, axes = pyplot.subplots(1, len(wanted), figsize=(5 * len(wanted), 3.6), squeeze=False)
    for axis, (name, group) in zip(axes[0], wanted.items(), strict=True):
        for label, curve in group.items():
            axis.semilogy(range(1, len(curve) + 1), curve, label=label, linewidth=1.2)
        axis.set(xlabel="epoch", ylabel="loss", title=name)
        axis.legend()
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="put the table into docs/sklearn.md")
    parser.add_argument("--only", default="", help="tasks whose name has this in it")
    options = parser.parse_args()
    warnings.simplefilter("ignore", ConvergenceWarning)
    torch.set_num_threads(1)
    rows, curves = [], {}
    for case in CASES:
        if options.only in case.name:
            row, curves[case.name] = measure(case)
            rows.append(row)
    text = table(rows)
    print(text)
    if options.write:
        draw(curves, DOCS / "images" / "sklearn_losses.png")
        path = DOCS / "sklearn.md"
        page = path.read_text()
        head, _, rest = page.partition(BEGIN)
        _, _, tail = rest.partition(END)
        where = (
            f"Processor seconds, one thread, {platform.machine()}, on a machine that other work "
            f"shares; batches of 64 unless said; Python {platform.python_version()}."
        )
        path.write_text(f"{head}{BEGIN}\n{text}\n\n{where}\n{END}{tail}")


if __name__ == "__main__":
    main()
