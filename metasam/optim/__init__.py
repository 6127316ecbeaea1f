"""Rules as ordinary optimizers: `SharpnessAware`, a true ``torch.optim.Optimizer``, and the named methods on it.

>>> import torch
>>> model = torch.nn.Linear(3, 1)
>>> optimizer = SAM(model.parameters(), torch.optim.SGD, rho=0.05, lr=0.1, momentum=0.9)
>>> x, y = torch.randn(8, 3), torch.randn(8, 1)
>>> def closure():
...     optimizer.zero_grad()
...     loss = torch.nn.functional.mse_loss(model(x), y)
...     loss.backward()
...     return loss
>>> loss = optimizer.step(closure)
"""

from .named import ASAM as ASAM
from .named import ESAM as ESAM
from .named import GSAM as GSAM
from .named import RWP as RWP
from .named import SAM as SAM
from .named import WSAM as WSAM
from .named import AgnosticSAM as AgnosticSAM
from .named import FisherSAM as FisherSAM
from .named import FriendlySAM as FriendlySAM
from .named import LookbehindSAM as LookbehindSAM
from .named import LookSAM as LookSAM
from .named import MomentumSAM as MomentumSAM
from .named import MultiStepSAM as MultiStepSAM
from .named import RandomSAM as RandomSAM
from .named import SparseSAM as SparseSAM
from .named import VaSSO as VaSSO
from .oracle import LiveOracle as LiveOracle
from .schedules import ProportionalRho as ProportionalRho
from .schedules import RhoScheduler as RhoScheduler
from .sharpness_aware import SharpnessAware as SharpnessAware
