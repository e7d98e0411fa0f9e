"""Train early exits over a frozen base: `python -m train fit|validate|test|generate`."""
