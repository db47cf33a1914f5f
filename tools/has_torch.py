"""Exit 0 if this interpreter imports a torch that FlexEP supports (2.10 or newer), else 1."""

from __future__ import annotations

import sys

OLDEST = (2, 10)


def main() -> int:
    try:
        import torch
    except ImportError:
        return 1
    major, minor = torch.__version__.split(".")[:2]
    return 0 if (int(major), int(minor)) >= OLDEST else 1


if __name__ == "__main__":
    sys.exit(main())
