"""Where tasks come from: few-shot families, each task of which is a pure function of (seed, split, number).

    >>> from metasam.tasks import Sinusoid
    >>> task = Sinusoid(shots=10).batch("train", range(4))
    >>> task.support[0].shape
    torch.Size([4, 10, 1])

Families: `Sinusoid` (needs nothing), `Glyphs` (letters out of matplotlib's fonts, no download), `Omniglot`,
`OmniglotOneShot`, and `ImageEpisodes` for images of one's own. Anything with the members of `TaskFamily` can stand
in for them. Ordinary supervised training takes a `Supervised`, see `metasam.tasks.supervised`. Pillow, matplotlib,
torchvision and scikit-learn are imported when a source needs them.
"""

from metasam.tasks.baselines import modified_hausdorff_nearest_neighbour, pixel_nearest_neighbour
from metasam.tasks.episodes import Episodes, EpisodeSampler, ImageEpisodes
from metasam.tasks.family import SPLITS, TaskFamily
from metasam.tasks.glyphs import Glyphs
from metasam.tasks.omniglot import Omniglot, OmniglotOneShot
from metasam.tasks.sinusoid import Sinusoid
from metasam.tasks.streams import Supervised

__all__ = [
    "SPLITS",
    "EpisodeSampler",
    "Episodes",
    "Glyphs",
    "ImageEpisodes",
    "Omniglot",
    "OmniglotOneShot",
    "Sinusoid",
    "Supervised",
    "TaskFamily",
    "modified_hausdorff_nearest_neighbour",
    "pixel_nearest_neighbour",
]
