"""A parser of command lines whose errors are ValueErrors, which `python -m train` tells as it tells all others."""

from __future__ import annotations

import argparse
from typing import NoReturn


class OptionParser(argparse.ArgumentParser):
    """argparse's own would print its usage and end the process."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)
