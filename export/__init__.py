"""From an early-exit model to an artifact of tier programs (DESIGN §5, §9)."""

import os

# MKL chooses its kernels by shape unless told not to; it reads this once, before its first call. With it a
# product's bits do not depend on the number of rows, and the self-checks run under what `infer` will set as well.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
