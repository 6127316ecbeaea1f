"""metasam: sharpness-aware learning on two levels.

Supervised runs import an optimizer, ``from metasam import SAM``; meta-learning runs put the same rules in the inner
loop, the outer loop, or both, ``from metasam import SharpMAML``. Needs torch; ``higher`` when its engine is used.
"""

from .meta import SharpMAML as SharpMAML
from .optim import ASAM as ASAM
from .optim import ESAM as ESAM
from .optim import GSAM as GSAM
from .optim import RWP as RWP
from .optim import SAM as SAM
from .optim import WSAM as WSAM
from .optim import AgnosticSAM as AgnosticSAM
from .optim import FisherSAM as FisherSAM
from .optim import FriendlySAM as FriendlySAM
from .optim import LookbehindSAM as LookbehindSAM
from .optim import LookSAM as LookSAM
from .optim import MomentumSAM as MomentumSAM
from .optim import MultiStepSAM as MultiStepSAM
from .optim import ProportionalRho as ProportionalRho
from .optim import RandomSAM as RandomSAM
from .optim import RhoScheduler as RhoScheduler
from .optim import SharpnessAware as SharpnessAware
from .optim import SparseSAM as SparseSAM
from .optim import VaSSO as VaSSO
from .types import Task as Task

__version__ = "0.1.0"
__all__ = [
    "ASAM",
    "ESAM",
    "GSAM",
    "RWP",
    "SAM",
    "WSAM",
    "AgnosticSAM",
    "FisherSAM",
    "FriendlySAM",
    "LookSAM",
    "LookbehindSAM",
    "MomentumSAM",
    "MultiStepSAM",
    "ProportionalRho",
    "RandomSAM",
    "RhoScheduler",
    "SharpMAML",
    "SharpnessAware",
    "SparseSAM",
    "Task",
    "VaSSO",
]
