"""What to measure on weights: how sharp the loss is around them, and whether gradients agree.

Everything takes a loss as a function ``loss(params) -> 0-dim tensor``; `functional` makes one of a network, a closure.
"""

from .congruence import Congruence as Congruence
from .congruence import Pairwise as Pairwise
from .congruence import congruence as congruence
from .congruence import pairwise as pairwise
from .functional import Loss as Loss
from .functional import gradient as gradient
from .functional import live_loss as live_loss
from .functional import mean_loss as mean_loss
from .functional import model_loss as model_loss
from .functional import moved as moved
from .functional import weights as weights
from .sharpness import Average as Average
from .sharpness import Worst as Worst
from .sharpness import average_sharpness as average_sharpness
from .sharpness import worst_sharpness as worst_sharpness
