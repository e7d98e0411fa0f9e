"""One file for each way to build programs; `infer.backends` has the loading side under the same names."""

BACKENDS = ("eager", "inductor")
