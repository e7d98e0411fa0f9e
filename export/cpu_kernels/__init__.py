"""What decoding on a CPU spends its time in, as C++ kernels of ours: attention over pages, and products with weights.

Libraries choose their order of sums by the shapes of a call, and are slow at the few tokens that decoding computes.
These compute each token by itself, in one order. They are compiled for the machine that exports, and linked into each
package that AOTInductor writes, so the runtime needs neither this folder nor a compiler.
"""
