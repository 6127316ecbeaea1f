"""metasam: sharpness-aware learning on two levels.

Supervised runs import an optimizer, ``from metasam import SAM``; meta-learning runs put the same rules in the inner
loop, the outer loop, or both, ``from metasam import SharpMAML``. Needs torch; ``higher`` when its engine is used.
"""

from .meta import SharpMAML as SharpMAML
from .optim import ASAM as ASAM
from .optim import SAM as SAM
from .optim import SharpnessAware as SharpnessAware
from .types import Task as Task

__version__ = "0.1.0"
__all__ = ["ASAM", "SAM", "SharpMAML", "SharpnessAware", "Task"]
