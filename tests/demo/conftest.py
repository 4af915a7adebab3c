"""The demo's modules, importable as they are when `accelerate launch` runs the script beside them."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
