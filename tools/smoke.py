"""A first training run with an installed package, in an empty folder; leaves ``art`` for Node."""

from pathlib import Path

import onnxtrain

assert "site-packages" in onnxtrain.__file__, onnxtrain.__file__
onnxtrain.examples.digits_model("model.onnx")
train, test = onnxtrain.examples.digits_data(600), onnxtrain.examples.digits_data(200, seed=1)
artifacts = onnxtrain.build(
    "model.onnx", loss="cross_entropy", optimizer="adamw:lr=0.01", metrics=["accuracy"]
)
artifacts.save("art")
trainer = onnxtrain.Trainer("art")
trainer.fit(train, epochs=12, validation=test, directory="run", progress=False)
score = trainer.evaluate(test).metrics["accuracy"]
trainer.export("trained.onnx")
assert score > 0.9, score
assert Path("trained.onnx").stat().st_size > 1000
print(f"onnxtrain {onnxtrain.__version__}: accuracy {score:.3f}")
