"""Networks as plain modules: the small ones of the few-shot literature, and those of image classification.

Each has a body that makes features and a linear ``head``, so that ``inner_params=["head.*"]`` adapts the head alone
(ANIL, Raghu et al. 2020). ``torch.manual_seed`` before the call fixes the weights. None draws at random while it runs,
and all can be differentiated twice.
"""

from .convolutional import conv
from .few_shot import conv4, mlp, strided_conv
from .resnet import resnet18, wide_resnet
from .transformer import vit

__all__ = ["conv", "conv4", "mlp", "resnet18", "strided_conv", "vit", "wide_resnet"]
