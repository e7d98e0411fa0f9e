"""What programs can run on here."""

from __future__ import annotations

import torch


def check_device(device: str) -> None:
    """ValueError unless programs can run on `device` here."""
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device={device!r} must be 'cpu' or 'cuda' (choose one of several with CUDA_VISIBLE_DEVICES)")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device='cuda': PyTorch finds no GPU here; use device='cpu'")
